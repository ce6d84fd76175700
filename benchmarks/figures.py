"""Figures in the text of pages: `figures.toml` names the committed result behind each, and `pictures.py` writes them.

A template is a piece of a page's text with `{expression:format}` in the place of each figure. The expression is
Python; its names are the results files, whose rows are found by name: `{capped["capuchin vgg16"].step_ms:.1f}`.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from peer_pages import best_of_peers, gain, three_digits
from record import ROOT

LIST = ROOT / "benchmarks" / "figures.toml"
FIELD = re.compile(r"\{([^{}]+):([^{}:]+)\}")
NUMBER = r"([+-]?\d[\d.,]*(?:e[+-]?\d+)?(?<![.,]))"
UNIT = re.compile(
    r"(?<![\w.#/^-])[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?\s(?:[mun]?s|[KMGT]i?B(?:/s)?|%|times|seconds|minutes|hours|\w+/s)(?!\w)"
    r"|(?<![\w.#/-])\d[\d,.]*(?:[KMG]i?B|%)(?!\w)"
)
CELL = re.compile(r"(?<![\w./-])\d[\d,]*\.\d+(?![\w.-])")


class Record(dict[str, Any]):
    """A JSON object whose entries are attributes, and whose rows are found by their names."""

    def __getattr__(self, name: str) -> Any:
        """Return the entry called `name`."""
        return _record(self[name])

    def __missing__(self, name: str) -> Record:
        """Return the row called `name`."""
        (row,) = [row for row in self.get("rows", ()) if row["name"] == name]
        return Record(row)


def _record(value: Any) -> Any:
    if isinstance(value, list):
        return [_record(item) for item in value]
    return Record(value) if isinstance(value, dict) else value


def results_by_name(folder: Path) -> dict[str, Record]:
    """Return all results files by name, with `_` in place of `-`."""
    return {
        re.sub(r"\W", "_", path.stem): Record(json.loads(path.read_text(encoding="utf-8")))
        for path in folder.glob("*.json")
    }


def best(run: Record) -> Record:
    """Return the fastest other contender of a run of `mbc bench`."""
    contender = best_of_peers(run)
    assert contender is not None
    return Record(contender)


@cache
def fp32_errors(provider: str) -> Record:
    """Return the errors of a provider's convolutions in strict fp32, as the bundled profile of the H200 has them.

    Of mbc's own kernels only those of emulated fp32 count.
    """
    archive = ROOT / "mbc" / "data" / "profiles" / "h200.sqlite.gz"
    with tempfile.NamedTemporaryFile() as unpacked, closing(sqlite3.connect(unpacked.name)) as profile:
        unpacked.write(gzip.decompress(archive.read_bytes()))
        unpacked.flush()
        errors = sorted(
            error
            for signature, name, error in profile.execute(
                "SELECT signature, name, error FROM candidate JOIN request ON request = id "
                "WHERE provider = ? AND error >= 0 AND refused = ''", (provider,),
            )
            if '"kind":"convolution' in signature and '"precision":"fp32"' in signature
            if provider != "mbc" or "fp32" in name
        )  # fmt: skip
    return Record(count=len(errors), median=median(errors), p90=errors[len(errors) * 9 // 10], most=errors[-1])


FUNCTIONS = {"fp32_errors": fp32_errors, "best": best, "gain": gain, "median": median, "three": three_digits}


@dataclass(frozen=True)
class PageFigures:
    """The figures of one page: templates, and texts whose numbers do not come from results."""

    templates: Sequence[str]
    settings: Sequence[str]  # limits and constants of the code, inputs of examples, properties of hardware
    decisions: Sequence[str]  # results of one day, kept by the decision page that the text links


def listed(path: Path = LIST) -> dict[str, PageFigures]:
    """Return the pages of `figures.toml` by their path from the repository's root."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: PageFigures(_templates(table), table.get("settings", ()), table.get("decisions", ()))
        for name, table in tables.items()
    }


def _templates(table: Mapping[str, Any]) -> Sequence[str]:
    """Return the templates of a page's text and of the rows of its tables."""
    rows = [_row(group["row"], texts) for group in table.get("rows", ()) for texts in group["of"]]
    return [*table.get("figures", ()), *rows]


def _row(template: str, texts: Sequence[str]) -> str:
    for number, text in enumerate(texts):
        template = template.replace(f"${number}", text)
    return template


def with_results(text: str, templates: Sequence[str], results: Mapping[str, Any]) -> str:
    """Return a page's text in which the figures of all templates are filled in again.

    Raises:
        SystemExit: A template's words are not in the page, or more than once.
    """
    names = {**FUNCTIONS, **results}
    for template in templates:
        start, end = span_of(text, template)
        match = re.compile(_pattern(template)).match(text, start)
        assert match is not None and match.end() == end
        pieces: list[str] = []
        for number, field in enumerate(FIELD.finditer(template), 1):
            pieces += [text[start : match.start(number)], _formatted(eval(field[1], names), field[2])]
            start = match.end(number)
        text = text[: match.start()] + "".join(pieces) + text[start:]
    return text


def unexplained(text: str, page: PageFigures) -> list[str]:
    """Return the figures of a page, with their lines, that neither a template nor a list of `page` explains.

    Code, links, and parts between `<!-- figures` marks are left out. In tables every number with a decimal point counts
    as a figure, elsewhere every number with a unit.
    """
    blank = re.sub(
        r"^```.*?^```|<!-- figures.*?<!-- end of figures -->|`(?:[^`\n]|\n(?!\n))*`|\]\([^)]*\)",
        lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE,
    )  # fmt: skip
    spans = [span_of(text, template) for template in (*page.templates, *page.settings, *page.decisions)]
    spans = [_with_table(text, *span) for span in spans]
    matches = list(UNIT.finditer(blank))
    for line in re.finditer(r"^\|.*$", blank, re.MULTILINE):
        matches += CELL.finditer(blank, line.start(), line.end())
    return [
        f"{match[0]!r} in: {text[text.rfind(chr(10), 0, match.start()) + 1 :].splitlines()[0]}"
        for match in matches
        if not any(start <= match.start() and match.end() <= end for start, end in spans)
    ]


def _formatted(value: Any, form: str) -> str:
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", format(value, form)).replace("e+", "e")


def span_of(text: str, template: str) -> tuple[int, int]:
    """Return the span of the words of a template in a page, in which they must occur once."""
    spans = [match.span() for match in re.finditer(_pattern(template), text)]
    if len(spans) != 1:
        raise SystemExit(f"a page has {len(spans)} times, not once: {template}")
    return spans[0]


def _with_table(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of the whole table if the span is the line of its heads, otherwise the span itself."""
    table = re.compile(r"\|.*\|\n\| ---.*\n(?:\|.*\n)*").match(text, start)
    return (start, table.end()) if table and text[end : end + 6] == "\n| ---" else (start, end)


def _pattern(template: str) -> str:
    """Return a regular expression that matches the words of a template with any figures and any line breaks."""
    words = FIELD.split(template)[::3]
    return NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in words)

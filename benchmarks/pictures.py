"""Writes the figures of pages from the committed results, and measures nothing.

Tables and charts go into benchmarks/README.md, single figures into the text of README.md and docs/ (`figures.toml`).

`--check` writes nothing and fails if a picture or a page is out of date.

    python benchmarks/pictures.py [--check]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_pages import accuracy_pages
from figures import listed, results_by_name, with_results
from goal_pages import correctness_pages, goal_pages, headline_pages
from gpus_pages import gpus_pages
from memory_pages import memory_pages
from peer_pages import peer_pages
from record import ROOT

README = ROOT / "benchmarks" / "README.md"
PRECISIONS = ("fp32", "tf32", "bf16")
BEGIN, END = "<!-- figures: written by pictures.py -->", "<!-- end of figures -->"
Rows = Sequence[Mapping[str, Any]]


def drawn(results: Path) -> tuple[dict[str, str], str]:
    """Return SVG texts by file name, and the part of the page with tables and pictures."""
    pictures: dict[str, str] = {}
    page: list[str] = []
    for make in (
        headline_pages,
        goal_pages,
        correctness_pages,
        peer_pages,
        accuracy_pages,
        memory_pages,
        gpus_pages,
        _predictions,
        _deterministic,
        _planning,
    ):
        charts, text = make(results)
        pictures |= charts
        page += text
    return pictures, "\n".join(page).strip() + "\n"


def _read(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _where(document: Mapping[str, Any]) -> str:
    machine = f"{document['gpu'] or 'no GPU'}, driver {document['driver'] or '-'}"
    return f"{machine}, {document['date'][:10]}: `{document['command']}`"


def _predictions(results: Path) -> tuple[dict[str, str], list[str]]:
    files = [document for p in PRECISIONS if (document := _read(results, f"predictions_{p}")) is not None]
    if not files:
        return {}, []
    rows = (
        [r["name"], _number(r["predicted_ms"], 3), _number(r["step_ms"], 3), _number(r["predicted_over_measured"], 3),
         "yes" if r["arena_equal"] else "no"]
        for document in files for r in document["rows"] if r.get("predicted_over_measured")
    )  # fmt: skip
    head = ["network", "predicted, ms", "measured, ms", "predicted over measured", "arena as planned"]
    page = ["## Predicted and measured", "", *map(_where, files), "", *table(head, rows)]
    page += ["Predicted over measured steps in the other results, whatever part of a plan was estimated:", ""]
    return {}, [*page, *table(["results", "steps", "least", "median", "most"], _all_predictions(results))]


def _all_predictions(results: Path) -> list[list[str]]:
    """Return a row for each results file that has measured steps of plans, and one for all of `mbc bench`."""
    ratios: dict[str, list[float]] = {}
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if path.stem.startswith("bench_"):
            ratios.setdefault("bench_*", []).append(document["predicted_ms"] / document["mbc"]["step_ms"])
        elif not path.stem.startswith("predictions_"):
            for row in document.get("rows", ()):
                figures = [value for key, value in row.items() if key.endswith("predicted_over_measured") and value]
                ratios.setdefault(path.stem, []).extend(figures)
    return [
        [f"`{name}`", str(len(values)), *(f"{value:.2f}" for value in (min(values), median(values), max(values)))]
        for name, values in ratios.items()
        if values
    ]


def _deterministic(results: Path) -> tuple[dict[str, str], list[str]]:
    document = _read(results, "deterministic")
    if document is None:
        return {}, []
    rows = (
        [r["name"], _number(r["free_ms"], 3), _number(r["deterministic_ms"], 3), _gain(r["price"]),
         _gain(r["price_predicted"]), "yes" if r.get("deterministic_equal") else "no"]
        for r in document["rows"] if "failed" not in r
    )  # fmt: skip
    head = ["network", "free, ms", "deterministic, ms", "price", "predicted", f"same bits in {document['runs']} runs"]
    return {}, ["## deterministic = true", "", _where(document), "", *table(head, rows)]


_PLANNING_TIMES = ("plan_s", "command_s", "most_menu_of_sums_s")


def _planning(results: Path) -> tuple[dict[str, str], list[str]]:
    document = _read(results, "planning_time")
    if document is None:
        return {}, []
    rows = (
        [r["name"], _number(next(r[k] for k in _PLANNING_TIMES if k in r), 3), f"{r['limit_s']:g}"]
        for r in document["rows"] if "failed" not in r
    )  # fmt: skip
    head = [f"on {document['cores']} cores", "seconds", "at most"]
    return {}, ["## Planning", "", *table(head, rows)]


def with_figures(page: str, figures: str) -> str:
    """Return the page with everything between the two marks replaced."""
    before, document, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not document or not closed:
        raise SystemExit(f"the page has no '{BEGIN}' ... '{END}' to write figures between")
    return f"{before}{BEGIN}\n\n{figures}\n{END}{after}"


def wanted_pages(results: Path) -> dict[Path, str]:
    """Return the text that every picture, and every page with figures, has to have."""
    pictures, figures = drawn(results)
    wanted = {results / name: text for name, text in pictures.items()}
    wanted[README] = with_figures(README.read_text(encoding="utf-8"), figures)
    named = results_by_name(results)
    for name, page in listed().items():
        path = ROOT / name
        wanted[path] = with_results(wanted.get(path) or path.read_text(encoding="utf-8"), page.templates, named)
    return wanted


def out_of_date(wanted: Mapping[Path, str]) -> list[Path]:
    """Return the files whose text is another one."""
    return [p for p, text in wanted.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]


def main() -> None:
    """Write pictures and figures, or fail if `--check` finds that some are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = wanted_pages(ROOT / "benchmarks" / "results")
    stale = out_of_date(wanted)
    if arguments.check and stale:
        raise SystemExit(f"out of date, run benchmarks/pictures.py: {', '.join(p.name for p in stale)}")
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()

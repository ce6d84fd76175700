"""Texts use the terms of docs/glossary.md: none has a phrase that the project used before, but the glossary itself.

`python tests/test_vocabulary.py [AREA ...]` lists what is found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from mbc.cli import main

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
AREAS = ("docs", "front", "mbc", "templates", "tests", "benchmarks")


@dataclass(frozen=True)
class Old:
    """A phrase that is not to be used: a regular expression of whole words, in which a space matches a line break, too,
    with the comment sign of the next line. `say` are terms of the glossary."""

    phrase: str
    say: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w`/-])(?:{self.phrase.replace(' ', _SPACE)})(?![\w`-])", re.IGNORECASE)


_SPACE = r"(?:\s+(?:(?:#+|//+|\*|>)[ \t]+)?)"
OLD = (
    Old(r"ma(?:de|kes?|king) (?:\w+ ){0,2}again", "recompute, rematerialize"),
    Old(r"(?:made|makes?) again along|back along with", "fused rematerialization"),
    Old(r"along with (?:the |any |other )?sums", "fused rematerialization"),
    Old(r"(?:sent|sends?|go|goes|gone|going|went) to the host", "offload, prefetch"),
    Old(r"fetched back|sent away", "offload, prefetch"),
    Old(r"hand(?:s|ed|ing)? (?:\w+ )?on in micro-batches", "depth-first execution in micro-batches"),
    Old(r"(?:in|groups in|into|of) strips", "depth-first execution in micro-batches"),
    Old(
        r"alive at once|alive when|what is alive|is alive then",
        "live bytes, peak live bytes",
    ),
    Old(r"where most is taken|most is taken|the most that is taken", "live bytes, peak live bytes"),
    Old(r"what no plan needs less than|no plan beats", "lower bound (set by OP)"),
    Old(r"no placement beats", "peak live bytes"),
    Old(r"(?:kernels|launches|others?|runs?) beside (?:others?|kernels|launches)", "concurrent stream"),
    Old(r"beside each other|go beside", "concurrent stream; critical-path lower bound"),
    Old(
        r"fastest choice(?: of known kernels)?,? one after the other",
        "best serial schedule",
    ),
    Old(
        r"groups? of operations|launch(?:es)? that covers? several operations",
        "fused operation, fusion group",
    ),
    Old(
        r"halves of (?:words|them)|multipl(?:y|ies) halves|words? of fp32|product of words",
        "emulated fp32 (3xFP16)",
    ),
    Old(r"three products for one", "emulated fp32 (3xFP16)"),
    Old(
        r"of one place|places? of (?:a|the) filter|several places",
        "pointwise (1x1) convolution; filter tap",
    ),
    Old(
        r"relu'?s? signs|signs of relu|(?:by|without|with|its|their) signs",
        "ReLU bit mask",
    ),
    Old(r"leaves? (?:the |their |its )?(?:batch )?statistics", "statistics in the epilogue"),
    Old(r"statistics (?:of its result )?that (?:a )?convolutions? leaves?", "statistics in the epilogue"),
    Old(r"on (?:the|its|their) way (?:in|out|into|to)|on the way", "prologue, epilogue"),
    Old(r"comes? along|shipped profile|profile as shipped", "bundled profile"),
    Old(r"terms? of (?:a|the) sums?|\d+ terms", "K is the length of the reduction"),
    Old(
        r"to the image|gradients? of (?:a convolution's|their|the|its) images?",
        "data gradient",
    ),
    Old(
        r"multiplying warp\w*|warps that multiply|copiers?|multipliers?",
        "producer, consumer warpgroup",
    ),
    Old(r"waits meet|they meet|threads meet", "coalesced waits"),
    Old(r"convoys?|copies travel together", "coalesced copies"),
    Old(r"the books|books know|books that", "ledger of live bytes; undo log"),
    Old(
        r"(?:makes?|made|making) room|room is made|less room|the room",
        "memory that is free, free bytes",
    ),
    Old(r"taken back|takes? back", "to undo, to revert a decision"),
    Old(r"(?:in|into|to) pieces", "split update; micro-batch"),
    Old(r"ways that|the ways", "candidate, variant"),
    Old(r"windows (?:that )?lie side by side", "non-overlapping transposed convolution"),
    Old(r"foretold|foretells?", "prediction interval; scaled time"),
    Old(r"states at (?:home|the host)", "offload, prefetch"),
)

_BY_SCRIPT = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)  # benchmarks/pictures.py writes these


@dataclass(frozen=True)
class Found:
    place: str
    line: int
    old: Old
    text: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.text!r}: say {self.old.say!r}"


def _files(area: str) -> list[Path]:
    """The files of an area, sorted; the glossary is in none, nor is this file."""
    patterns = {
        "docs": ["docs/**/*.md", "CHANGELOG.md", "benchmarks/README.md"],
        "front": ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/**/README.md"],
        "mbc": ["mbc/**/*.py"],
        "templates": ["templates/**/*"],
        "tests": ["tests/**/*.py", "tests/**/*.cpp", "tests/**/*.h", "tests/**/*.cu"],
        "benchmarks": ["benchmarks/*.py"],
    }[area]
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(found - {GLOSSARY, Path(__file__).resolve()})


def _search(place: str, text: str) -> Iterator[Found]:
    """Old phrases of a text, by line. What a script writes is judged in the script."""
    text = _BY_SCRIPT.sub(lambda match: "\n" * match.group().count("\n"), text)
    for old in OLD:
        for match in old.pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Found(place, line, old, " ".join(match.group().split()))


def _commands(folder: Path) -> Iterator[tuple[list[str], int]]:
    """Commands whose whole output is read, with their exit codes: help texts, and plans with and without a budget."""
    yield ["--help"], 0
    for name in ("compile", "train", "show", "diff", "verify", "check", "fit", "profile", "bench", "gpus", "doctor"):
        yield [name, "--help"], 0
    network, package = str(ROOT / "examples" / "01_digits" / "net.mbc"), str(folder / "package")
    yield ["compile", network, "--gpu", "h200", "--output", package], 0
    yield ["verify", package], 0
    yield ["show", package], 0
    yield ["show", package, "--roofline"], 0
    yield ["show", network, "--gpu", "h200", "--set", "memory.device=622MB"], 0
    yield ["show", network, "--gpu", "h200", "--set", "memory.device=619MB"], 1


def _found(area: str) -> list[Found]:
    return [found for path in _files(area)
            for found in _search(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))]  # fmt: skip


def _judge(found: list[Found]) -> None:
    assert not found, "phrases that docs/glossary.md replaces:\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("area", AREAS)
def test_texts_use_the_terms_of_the_glossary(area: str) -> None:
    assert _files(area)
    _judge(_found(area))


def test_commands_use_the_terms_of_the_glossary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # nothing to build with
    found: list[Found] = []
    for command, expected in _commands(tmp_path):
        try:
            code = main(command)
        except SystemExit as end:  # help texts end so
            code = end.code
        assert (code or 0) == expected, command
        written = capsys.readouterr()
        found += _search(f"mbc {' '.join(command)}", written.out + written.err)
    _judge(found)


def test_a_phrase_is_found_across_a_line_break_and_with_its_line() -> None:
    (found,) = _search("x.py", "one\n# a value is made\n# again here\n")
    assert (found.line, found.text, found.old.say) == (2, "made # again", "recompute, rematerialize")


def test_what_to_say_is_in_the_glossary() -> None:
    terms = GLOSSARY.read_text(encoding="utf-8").casefold()
    for old in OLD:
        for term in old.say.split("; "):
            assert term.casefold() in terms, term


if __name__ == "__main__":
    for name in sys.argv[1:] or AREAS:
        for one in _found(name):
            print(one)

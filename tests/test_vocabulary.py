"""Texts use the terms of docs/glossary.md: none has a phrase that the project used before, but the glossary itself.

`python tests/test_vocabulary.py [AREA ...]` lists what is found, those phrases included that are still to be replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mbc.cli import main

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"

# Phrase -> what to say instead. A phrase is a regular expression of whole words; a space in it matches a line break,
# too, with the comment sign of the next line.
PHRASES: Mapping[str, str] = {
    r"ma(?:de|kes?|king) (?:\w+ ){0,2}again": "recompute, rematerialize",
    r"(?:made|makes?) again along|back along with": "fused rematerialization",
    r"along with (?:the |any |other )?sums": "inside the reduction",
    r"(?:sent|sends?|go|goes|gone|going|went) to the host": "offload",
    r"fetched back|sent away": "prefetch",
    r"hand(?:s|ed|ing)? (?:\w+ )?on in micro-batches": "depth-first execution in micro-batches",
    r"(?:in|groups in|into|of) strips": "in micro-batches, depth-first",
    r"alive at once|alive when|what is alive|is alive then": "live bytes, peak live bytes",
    r"where most is taken|most is taken|the most that is taken": "at the peak",
    r"what no plan needs less than|no plan beats|no placement beats": "lower bound (set by OP)",
    r"(?:kernels|launches|others?|each other|run|runs|go) beside (?:other|others|each other|kernels|launches)|"
    r"beside each other|go beside": "concurrent stream",
    r"fastest choice one after the other|one after the other\b(?= +~)": "best serial schedule",
    r"groups? of operations(?! that)|launch(?:es)? that covers? several operations": "fused operation, fusion group",
    r"halves of (?:words|them)|multipl(?:y|ies) halves|words of fp32|a word of fp32|product of words|"
    r"three products for one": "emulated fp32: three fp16 tensor-core products (3xFP16, 22-bit significand)",
    r"of one place|places? of (?:a|the) filter|several places": "pointwise (1x1) convolution; filter tap",
    r"relu'?s? signs|signs of relu|by signs|without signs|with signs|(?:its|their) signs": "ReLU bit mask",
    r"leaves? (?:the |their |its )?(?:batch )?statistics|statistics (?:of its result )?that (?:a )?convolutions? leaves?":
        "statistics in the epilogue",
    r"on (?:the|its|their) way (?:in|out|into|to)|on the way": "prologue, epilogue; in flight",
    r"profile that comes along|comes along|come along": "the bundled profile",
    r"shipped profile|profile as shipped": "the bundled profile",
    r"sums? of \d+ terms|terms? of (?:a|the) sums?|\d+ terms": "K, the length of the reduction",
    r"to the image\b(?! of)": "data gradient",
    r"gradients? of (?:a convolution's|their|the|its) images?": "data gradient",
    r"multiplying warp\w*|warps that multiply|copiers?|multipliers?": "consumer, producer warpgroup",
    r"waits meet|they meet\b|threads meet": "coalesced waits; merge, barrier",
    r"convoys?|copies travel together": "coalesced copies",
    r"the books|books know|books that": "ledger of live bytes, undo log",
    r"(?:makes?|making|made) room|room is made|less room|of the room|the room": "free memory, a smaller budget",
    r"taken back|takes? back": "reverted, rejected",
    r"(?:in|into|to) pieces": "split",
    r"ways that|the ways\b(?! to)": "variants, candidates",
    r"windows (?:that )?lie side by side": "non-overlapping transposed convolution",
    r"foretold|foretells?": "predicted",
    r"states at (?:home|the host)": "states in GPU memory; offloaded states",
    r"as asked|\basked:": "target",
}  # fmt: skip

# Phrases that are not yet replaced in an area. What is clean is removed here: a test says when.
PENDING: Mapping[str, frozenset[str]] = {
}

_SPACE = r"(?:\s+(?:(?:#+|//+|\*|>)[ \t]+)?)"
_PATTERNS = {phrase: re.compile(r"(?<![\w`/-])(?:" + phrase.replace(" ", _SPACE) + r")(?![\w`-])", re.IGNORECASE)
             for phrase in PHRASES}  # fmt: skip
_BY_SCRIPT = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)  # benchmarks/pictures.py writes these


@dataclass(frozen=True)
class Found:
    place: str
    line: int
    phrase: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.text!r}: say {PHRASES[self.phrase]!r}"


def _files(area: str) -> list[Path]:
    """The files of an area, sorted; the glossary is in none."""
    patterns = {
        "docs": ["docs/**/*.md", "CHANGELOG.md", "benchmarks/README.md"],
        "front": ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/**/README.md"],
        "mbc": ["mbc/**/*.py"],
        "templates": ["templates/**/*"],
    }[area]
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(found - {GLOSSARY})


def _search(place: str, text: str) -> Iterator[Found]:
    """Old phrases of a text, by line. What a script writes is judged in the script."""
    text = _BY_SCRIPT.sub(lambda match: "\n" * match.group().count("\n"), text)
    for phrase, pattern in _PATTERNS.items():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Found(place, line, phrase, " ".join(match.group().split()))


def _commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Commands whose whole output is read: every help text, and plans with and without a budget."""
    yield "mbc --help", ["--help"]
    for name in ("compile", "train", "show", "diff", "verify", "check", "fit", "profile", "bench", "gpus", "doctor"):
        yield f"mbc {name} --help", [name, "--help"]
    network, target = str(ROOT / "examples" / "01_digits" / "net.mbc"), ["--gpu", "h200", "--measure", "never"]
    yield "mbc show", ["show", network, "--gpu", "h200"]
    yield "mbc show within a budget", ["show", network, "--gpu", "h200", "--set", "memory.device=622MB"]
    yield "mbc show of a budget that is too small", ["show", network, "--gpu", "h200", "--set", "memory.device=619MB"]
    yield "mbc show --roofline", ["show", network, "--gpu", "h200", "--roofline"]
    yield "mbc compile", ["compile", network, *target, "--no-build", "--output", str(folder / "digits")]
    yield "mbc verify", ["verify", str(folder / "digits")]


def _found(area: str) -> list[Found]:
    return [found for path in _files(area)
            for found in _search(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))]  # fmt: skip


def _judge(area: str, found: list[Found]) -> None:
    pending = PENDING.get(area, frozenset())
    wrong = [str(one) for one in found if one.phrase not in pending]
    assert not wrong, "phrases that docs/glossary.md replaces:\n" + "\n".join(wrong)
    clean = pending - {one.phrase for one in found}
    assert not clean, f"replaced everywhere in {area}, remove from PENDING: {sorted(clean)}"


@pytest.mark.parametrize("area", ["docs", "front", "mbc", "templates"])
def test_texts_use_the_terms_of_the_glossary(area: str) -> None:
    assert _files(area)
    _judge(area, _found(area))


def test_commands_use_the_terms_of_the_glossary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Found] = []
    for name, command in _commands(tmp_path):
        try:
            main(command)
        except SystemExit:  # help texts end so
            pass
        written = capsys.readouterr()
        assert written.out or written.err, name
        found += _search(name, written.out + written.err)
    _judge("commands", found)


def test_a_phrase_is_found_across_a_line_break_and_with_its_line() -> None:
    (found,) = _search("x.py", "one\n# a value is made\n# again here\n")
    assert (found.line, found.text, PHRASES[found.phrase]) == (2, "made # again", "recompute, rematerialize")


def test_every_term_to_say_is_in_the_glossary() -> None:
    terms = GLOSSARY.read_text(encoding="utf-8").casefold()
    for say in ("recompute", "fused rematerialization", "offload", "depth-first execution in micro-batches", "live bytes",
                "concurrent stream", "best serial schedule", "fused operation", "emulated fp32", "filter tap",
                "relu bit mask", "statistics in the epilogue", "the bundled profile", "data gradient",
                "consumer warpgroup", "coalesced waits", "coalesced copies", "ledger of live bytes"):  # fmt: skip
        assert say.removeprefix("the ") in terms, say


if __name__ == "__main__":
    for name in sys.argv[1:] or ("docs", "front", "mbc", "templates"):
        for one in _found(name):
            print(one)

"""`mbc fmt` changes only indentation and blanks, and leaves a formatted source unchanged."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.frontend.format import format_source
from mbc.frontend.lower import Lowered
from mbc.frontend.parse import parse_tokens
from mbc.ir.text import network_text
from mbc.source import Source
from tests.frontend.reading import CASES, ROOT, lower_text
from tests.frontend.test_fuzz import QUIET, SOURCES, TOKENS
from tests.frontend.test_page import EXAMPLES

LAID_OUT = [*sorted((ROOT / "examples").rglob("*.mbc")), *sorted((CASES / "ok").glob("*.mbc"))]
CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus" / "sources").iterdir())
BLANKS = st.sampled_from([" ", "  ", "\t", "   \t", "\f"])


def laid_out(text: str) -> str:
    return format_source(Source("test.mbc", text))


def words(text: str) -> list[tuple[str, str]]:
    return [(token.type, token.value) for token in parse_tokens(Source("test.mbc", text)).tokens]


def comments(text: str) -> list[str]:
    """Return the comments of a text. No source has a `#` inside a string."""
    return [comment.rstrip() for comment in re.findall(r"#[^\r\n]*", text)]


def in_lines(text: str) -> list[str]:
    """Return the lines of a text without blanks and without empty lines."""
    return [line for line in (re.sub(r"[\s\ufeff]", "", line) for line in text.splitlines()) if line]


def meaning(lowered: Lowered) -> tuple[object, ...]:
    """Return the meaning of a source: all of its parts except places in its text."""
    rest = (getattr(lowered, field.name) for field in fields(lowered) if field.name != "network")
    return (network_text(lowered.network), *rest)


def judge(text: str) -> str:
    """Return the formatted text. Assert that words, comments and lines stay and that a second pass changes nothing."""
    formatted = laid_out(text)
    assert laid_out(formatted) == formatted
    assert words(formatted) == words(text)
    assert comments(formatted) == comments(text)
    assert in_lines(formatted) == in_lines(text)
    assert "\n\n\n" not in formatted and not re.search(r"[ \t]$", formatted, re.MULTILINE)
    return formatted


def test_an_untidy_source():
    untidy, tidy = ((CASES / "format" / f"{name}.txt").read_text(encoding="utf-8") for name in ("untidy", "tidy"))
    assert judge(untidy) == tidy


@pytest.mark.parametrize("path", LAID_OUT, ids=lambda path: path.stem)
def test_examples_are_laid_out(path: Path):
    text = path.read_text(encoding="utf-8")
    assert judge(text) == text


@pytest.mark.parametrize("path", LAID_OUT, ids=lambda path: path.stem)
def test_a_network_stays_the_same(path: Path):
    text = path.read_text(encoding="utf-8")
    without = re.sub(r"^[ ]+", "", text, flags=re.MULTILINE)  # as somebody may have typed it
    assert laid_out(without) == text
    network = "second" if "network second" in text else None
    same = [meaning(lower_text(one, network=network)) for one in (without, text)]
    assert same[0] == same[1]


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_page_of_the_language_is_laid_out(text: str):
    assert judge(text) == text


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_hostile_sources(path: Path):
    text = path.read_bytes().decode("utf-8", "replace")
    try:
        formatted = laid_out(text)
    except MbcError as error:
        assert error.code in ("MBC001", "MBC002", "MBC003", "MBC004")
    else:
        assert laid_out(formatted) == formatted


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("", ""),
        ("\n\n", ""),
        ("# only", "# only\n"),
        ("# a\n\n\n\n# b\n\n", "# a\n\n# b\n"),
        ("\ufeffnetwork a{}", "network a { }\n"),
        ("network a { }\r\n# x\r\n", "network a { }\n# x\n"),
        ("network a { }# b", "network a { }  # b\n"),
        ("block b on(x,y){return x}", "block b on (x, y) { return x }\n"),
    ],
)
def test_small_sources(text: str, formatted: str):
    assert laid_out(text) == formatted == laid_out(formatted)


@settings(QUIET, max_examples=25)
@given(st.data())
def test_blanks_do_not_change_the_layout(data: st.DataObject):
    source = data.draw(st.sampled_from([path.read_text(encoding="utf-8") for path in LAID_OUT]))
    parts = re.split(r"(#[^\n]*|[ ]+)", source)
    for _ in range(20):
        at = data.draw(st.integers(0, len(parts) // 2 - 1)) * 2 + 1
        if not parts[at].startswith("#"):
            parts[at] = data.draw(BLANKS)
    assert laid_out("".join(parts)) == source


@settings(QUIET, max_examples=60)
@given(st.data())
def test_any_line_breaks_and_comments(data: st.DataObject):
    """A line break inside a statement may be an error; a text that still parses keeps its meaning."""
    source = data.draw(st.sampled_from(SOURCES))
    parts = re.split(r"([ \n]+)", re.sub(r"#.*|\"[^\"]*\"", "", source))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(parts) // 2)) * 2 + 1
        if at < len(parts):
            parts[at] = data.draw(st.sampled_from(["\n", "\n\n\n", " # note\n", "\n# one\n  #two\n\n", "\n\f\n "]))
    try:
        judge("".join(parts))
    except MbcError as error:
        assert error.code in ("MBC001", "MBC002", "MBC003", "MBC004")


@QUIET
@given(st.lists(st.sampled_from([*TOKENS, "\n", "# c\n"]), max_size=40))
def test_any_words_of_the_language(parts: list[str]):
    try:
        formatted = laid_out(f"network a(batch = 2) {{ x = {' '.join(parts)} }}")
    except MbcError:
        return
    assert laid_out(formatted) == formatted

"""The bindings of names, in texts that parse and in texts that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbc.editor.complete import complete
from mbc.editor.scan import Word, definition, scan
from tests.frontend.reading import ROOT
from tests.frontend.test_fuzz import QUIET, SOURCES, TOKENS

# `^` marks the name to look up, `$` its binding.
DEFINED = [
    "block $b on x { return x } network n { y = x |> ^b }",
    "block b($c = 3) on x { return x |> conv(^c, 3) }",
    "block b(c) on $x { return ^x |> conv(c, 3) }",
    "block b(c) on (a, $x) { return ^x }",
    "block b($c) on x { return x } network n { y = x |> b(^c=3) }",
    "network n($c = 3, d = c) { e = ^c }",
    "network n(c = 3, $d = (1, 2)) { e = ^d }",
    "network n { input $image[2, 3] : float  x = ^image |> relu }",
    "network n { x = 1\n $x = x + 1\n y = ^x }",
    "network n { $x = 1\n x = (x, ^x)\n y = x }",
    "network n { a, $b = (1, 2)\n c = ^b }",
    "network n { for i, $j in (1, 2) { x = ^j } }",
    "network n { for i in range(3) { y = ^x } $x = 3 }",  # bound later only
    "network n { $x = 1\n if x == 1 { y = ^x } }",
    "network n { $x = 1\n y = a if b else ^x",  # not closed
    "network n { $x = 1 ; ? y = ^x }",
    "block b on x { x = 1 } network n { $x = 2\n y = ^x }",
    "network n { $x = 1\n metric x = ^x }",
    "network n { y = 1\n z = ^missing }",
    "network n { y = 1 # ^y\n }",
]


@pytest.mark.parametrize("marked", DEFINED)
def test_definitions(marked: str):
    at = marked.replace("$", "").index("^")
    text = marked.replace("$", "").replace("^", "")
    binding = definition(text, at)
    bound = marked.replace("^", "").find("$")
    assert (-1 if binding is None else binding.start) == bound


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.mbc")), ids=lambda path: path.stem)
def test_every_name_of_the_examples_is_found_or_means_something(path):
    text = path.read_text(encoding="utf-8")
    bound = [b.word for declaration in scan(text).declarations for b in declaration.bindings]
    assert bound
    for word in bound:
        assert isinstance(definition(text, word.start), Word)
    declared = [d.name.text for d in scan(text).declarations if d.name]
    assert [d.kind for d in scan(text).declarations].count("network") >= 1 and declared


@QUIET
@given(st.data())
def test_any_text_at_any_place(data: st.DataObject):
    source = data.draw(st.sampled_from([*SOURCES, ""]))
    more = data.draw(st.lists(st.sampled_from(TOKENS), max_size=8))
    text = source[: data.draw(st.integers(0, len(source)))] + " ".join(more)
    offset = data.draw(st.integers(0, len(text)))
    binding = definition(text, offset)
    assert binding is None or text[binding.start : binding.end] == binding.text
    labels = [offer.label for offer in complete(text, offset)]
    assert len(labels) == len(set(labels))


@QUIET
@given(st.text())
def test_any_characters(text: str):
    assert all(offer.label for offer in complete(text, len(text)))
    binding = definition(text, len(text) // 2)
    assert binding is None or text[binding.start : binding.end] == binding.text

"""Random texts: the front end returns a network or raises an MbcError, and nothing else."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.ops import LAYERS
from mbc.passes.check_graph import verify_network
from tests.frontend.reading import ROOT, lower_text, wrap

SOURCES = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests" / "cases").rglob("*.mbc"))]
SOURCES += [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("resnet.mbc", "unet.mbc")]
WORDS = st.sampled_from(["true", "false", "he", "bf16", "image", "relu", "(1, 2)"])
TENSORS = ["image", "(image, image)", "target", "(image, target)", "(image |> flatten)", "(image |> flatten, target)"]
TOKENS = sorted({t for s in SOURCES for t in re.findall(r"\w+|[^\w\s]+", s)})
QUIET = settings(max_examples=120, suppress_health_check=list(HealthCheck))  # pyright: ignore[reportArgumentType]


def answers(text: str, *pairs: str) -> None:
    """Lower the text. A network must be valid, and an error must name a place inside the text."""
    try:
        verify_network(lower_text(text, *pairs).network)
    except MbcError as error:
        assert error.code.startswith("MBC0")
        assert str(error)
        if error.span is not None and error.span.source.name == "test.mbc":
            assert 1 <= error.span.line <= max(1, len(text.splitlines()))


@QUIET
@given(st.text())
def test_any_text(text: str):
    answers(text)


@QUIET
@given(st.lists(st.sampled_from(TOKENS), max_size=60))
def test_any_words_of_the_language(words: list[str]):
    answers(f"network a(batch = 2) {{ input image[batch, 3, 8, 8] : float\n{' '.join(words)} }}")


@QUIET
@given(st.data())
def test_sources_with_a_mistake(data: st.DataObject):
    source = data.draw(st.sampled_from(SOURCES))
    parts = re.findall(r"\s+|\w+|[^\w\s]", source)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(parts) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "replace", "swap"]))
        if change == "drop" and len(parts) > 1:
            del parts[at]
        elif change == "double":
            parts.insert(at, parts[at])
        elif change == "swap":
            other = data.draw(st.integers(0, len(parts) - 1))
            parts[at], parts[other] = parts[other], parts[at]
        else:
            parts[at] = data.draw(st.sampled_from(TOKENS))
    # Limits are tested elsewhere; here a loop of 100,000 turns would only take time.
    text = re.sub(r"\d{4,}", "9", "".join(parts))
    answers(text)


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 5, 8, 9, 0.5, 1e-9, 1e9, 2**31 - 1, 2**31, 2**62])
SETTINGS = st.one_of(
    NUMBERS.map(str), st.lists(NUMBERS, max_size=4).map(lambda x: f"({', '.join(map(str, x))},)"), WORDS
)


@QUIET
@given(st.sampled_from(sorted(LAYERS)), st.lists(SETTINGS, max_size=8), st.sampled_from(TENSORS))
def test_any_settings_of_a_layer(layer: str, values: list[str], tensors: str):
    body = f"y = {tensors} |> {layer}({', '.join(values[: len(LAYERS[layer].parameters)])})"
    answers(wrap(body if not LAYERS[layer].loss else f"y = image\n loss {body[4:]}"))


@QUIET
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_setting(name: str, value: str):
    source = "network a(batch = 2) { }"
    answers(source, f"{name}={value}")
    answers(source, f"batch={value}")

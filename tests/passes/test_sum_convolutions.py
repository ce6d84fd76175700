"""Convolutions of large concatenations: sums of convolutions of the parts, with equal results."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.passes import sum_convolutions as passes
from tests.ir.execution import draw, step
from tests.passes.small import graph

JOINED = """
  a = image |> conv(4, 3, pad=1) |> relu
  b = image |> conv(6, 1)
  y = (a, b, image) |> concat |> conv(4, (3, 2), stride=(1, 2), pad=(2, 1), dilation=(2, 1), bias=true) |> relu
"""
ROW = 13 * 6 * 5  # elements of the concatenation


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_step_is_the_same(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graph(JOINED, precision)
    monkeypatch.setattr(passes, "MOST_ELEMENTS", ROW - 1)
    summed = graph(JOINED, precision)
    assert max(value.type.elements for value in summed.values.values() if value.per_sample) < 4 * ROW
    given = draw(plain, np.random.default_rng(5))
    actual, wanted = step(summed, given), step(plain, given)
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.03}[precision]
    for name in (*(after for _, after in plain.updates), *plain.outputs):
        largest = np.abs(wanted[name]).max(initial=0)
        np.testing.assert_allclose(actual[name], wanted[name], rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize(
    ("most", "layer"),
    [(ROW, "conv(4, 3)"), (0, "conv(13, 3, groups=13)"), (0, "relu |> conv(4, 1)"), (0, "maxpool(2)")],
)
def test_other_layers_stay(most: int, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_ELEMENTS", most)
    body = "  a = image |> conv(10, 1)\n  y = (a, image) |> concat |> " + layer
    assert "concat" in {op.kind for op in graph(body).train}

"""Sums over the axis of a stack: computed from the parts of the stack, with equal results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mbc.ir.graph import Network, TrainingGraph
from mbc.passes import training_step as training
from tests.ir.execution import draw, step
from tests.passes.small import graph

PARTS = """
  a = image |> conv(4, 3, pad=1) @a
  b = image |> conv(4, 1) @b |> relu
"""
SELECTED = (
    PARTS
    + """
  c = a |> conv(4, 1) @c
  s = (a, b, c) |> stack
  w = s |> sum(1) |> global_avgpool |> conv(12, 1) @w |> reshape((3, 4, 1, 1)) |> softmax
  y = s * w |> sum(1)
"""
)


def kinds(training: TrainingGraph) -> Counter[str]:
    return Counter(op.kind for op in training.train)


def of_five_axes(training: TrainingGraph) -> set[tuple[int, ...]]:
    """Return the shapes of values with more axes than images have."""
    return {value.type.shape for value in training.values.values() if len(value.type.shape) > 4}


def as_written(network: Network) -> Network:
    return network


def test_selective_kernels_stack_nothing():
    training = graph(SELECTED)
    counts = kinds(training)
    assert counts["broadcast_mul"] == 6 and counts["pixel_dot"] == 3
    assert not counts["reduce_sum"] + counts["expand"] + counts["broadcast"]
    assert of_five_axes(training) == {(4, 3, 4, 1, 1), (4, 1, 4, 1, 1)}  # weights and their parts


@pytest.mark.parametrize("body", [SELECTED, PARTS + "  y = (a, b) |> stack |> mean(1)"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_step_is_the_same(body: str, precision: str, monkeypatch: pytest.MonkeyPatch):
    by_parts = graph(body, precision)
    monkeypatch.setattr(training, "sum_parts", as_written)
    plain = graph(body, precision)
    assert kinds(by_parts)["reduce_sum"] < kinds(plain)["reduce_sum"]
    given = draw(plain, np.random.default_rng(5))
    actual, wanted = step(by_parts, given), step(plain, given)
    for _, after in plain.updates:
        np.testing.assert_allclose(actual[after], wanted[after], rtol=2e-5, atol=1e-6, err_msg=after)
    for output in plain.outputs:
        np.testing.assert_allclose(actual[output], wanted[output], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "  y = (a, b) |> stack(axis=2) |> sum(2)",
        "  y = (a, b) |> stack |> sum(1, keep=true)",
        "  y = (a, b) |> stack |> sum((1, 2))",
        "  y = (a |> reshape((2, 2, 6, 5)), b |> reshape((2, 2, 6, 5))) |> concat |> sum(1)",
        "  s = (a, b) |> stack\n  y = s * (a |> reshape((1, 4, 6, 5))) |> sum(1)",
        "  p = (a, b) |> stack\n  p = p * (p |> mean((2, 3, 4), keep=true))\n  y = p |> sum(1)",
        "  s = (a, b) |> stack\n  w = s |> mean((3, 4), keep=true)\n  p = s * w\n"
        "  y = (p |> sum(1) |> flatten) + (p |> amax(1) |> flatten)",
    ],
)
def test_other_sums_stay(body: str):
    training = graph(PARTS + body)
    assert kinds(training)["reduce_sum"] and of_five_axes(training)

"""Batch statistics of concatenations: computed from those of the parts if that reads less, with equal results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ir.types import DType, TensorType
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes, ShapeError
from mbc.passes import training_step as training
from tests.ir.execution import draw, step
from tests.passes.small import graph

DENSE = """
  x = image |> conv(6, 3, pad=1) @first
  for i in range(3) @layer { x = (x, x |> bn |> relu |> conv(2, 3, pad=1)) |> concat }
  y = x |> bn |> relu
"""


def kinds(training: TrainingGraph) -> Counter[str]:
    return Counter(op.kind for op in training.train)


def channels_read(training: TrainingGraph) -> list[int]:
    return [training.values[op.inputs[0]].type.shape[1] for op in training.train if op.kind == "batch_statistics"]


def test_statistics_of_each_channel_are_read_once():
    training = graph(DENSE)
    assert channels_read(training) == [6, 2, 2, 2]
    assert kinds(training)["concat_statistics"] == kinds(training)["batch_normalize"] - 1 == 3
    assert kinds(training)["update_running"] == 4


def test_a_part_is_read_where_it_is_computed():
    training = graph(DENSE)
    for before, op in zip(training.train, training.train[1:], strict=False):
        if op.kind == "batch_statistics":
            assert op.inputs[0] in before.outputs


def unshared(operations: Sequence[Operation], _: dict[str, Value]) -> list[Operation]:
    return list(operations)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_step_is_the_same(precision: str, monkeypatch: pytest.MonkeyPatch):
    shared = graph(DENSE, precision)
    monkeypatch.setattr(training, "statistics_by_part", unshared)
    plain = graph(DENSE, precision)
    assert kinds(plain)["concat_statistics"] == 0
    assert dict(shared.updates) == dict(plain.updates)
    given = draw(plain, np.random.default_rng(5))
    actual, wanted = step(shared, given), step(plain, given)
    for _, after in plain.updates:
        np.testing.assert_allclose(actual[after], wanted[after], rtol=1e-6, atol=1e-7, err_msg=after)


def test_normalised_twice_is_read_once():
    training = graph("  x = image |> conv(4, 3, pad=1)\n  y = (x |> bn) + (x |> bn |> relu)")
    assert channels_read(training) == [4]
    assert kinds(training)["update_running"] == 2


@pytest.mark.parametrize(
    ("body", "read", "joined"),
    [
        # Two parts that nobody has read: one launch over both.
        ("  y = (image |> conv(4, 1), image |> conv(2, 1)) |> concat |> bn", [6], 0),
        # An input, which nothing makes.
        ("  x = image |> conv(4, 1)\n  y = (x |> bn |> conv(7, 1)) + ((x, image) |> concat |> bn)", [4, 7], 0),
        # Known parts only, one of them twice.
        ("  x = image |> conv(4, 1)\n  y = (x |> bn |> conv(8, 1)) + ((x, x) |> concat |> bn)", [4], 1),
        # A concatenation in another one, and a part that is new and comes twice.
        (
            "  a = image |> conv(4, 1)\n  b = image |> conv(2, 1)\n  c = (b, a) |> concat\n"
            "  y = (a |> bn |> conv(8, 1)) + ((c, b) |> concat |> bn)",
            [4, 2],
            1,
        ),
        # Statistics of a part that are wanted later, too.
        (
            "  a = image |> conv(4, 1)\n  b = image |> conv(2, 1)\n"
            "  u = (a |> bn |> conv(6, 1)) + ((a, b) |> concat |> bn)\n  y = (u |> conv(2, 1)) + (b |> bn)",
            [4, 2],
            1,
        ),
    ],
)  # fmt: skip
def test_where(body: str, read: list[int], joined: int):
    training = graph(body)
    assert sorted(channels_read(training)) == sorted(read)
    assert kinds(training)["concat_statistics"] == joined


def test_pairs_of_different_lengths_are_no_statistics():
    four, two = TensorType((4,), DType.FP32), TensorType((2,), DType.FP32)
    shape = KINDS["concat_statistics"].shape
    assert shape(NoAttributes(), (four, four, two, two)) == (TensorType((6,), DType.FP32),) * 2
    for wrong in ((four, two), (four, four, two), (), (TensorType((4, 1), DType.FP32),) * 2):
        with pytest.raises(ShapeError, match="pairs of mean and variance"):
            shape(NoAttributes(), wrong)

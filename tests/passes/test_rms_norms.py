"""Root mean square normalisation becomes one operation where a source writes it out, with equal results."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mbc.ir.graph import Network, TrainingGraph
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.base import Call, ShapeError
from mbc.ops.rms_norm import RmsNorm
from mbc.passes import training_step as training
from tests.ir.execution import draw, step
from tests.passes.small import graph

WRITTEN = """
  x = image |> conv(4, 3, pad=1)
  r = x |> pow(2) |> mean(1, keep=true)
  r = r + 1e-3 |> pow(-0.5)
  y = x * r * parameter(4) @weight
"""


def kinds(training: TrainingGraph) -> Counter[str]:
    return Counter(op.kind for op in (*training.train, *training.infer))


def as_written(network: Network) -> Network:
    return network


def test_a_written_out_norm_is_one_operation_each_way():
    counts = kinds(graph(WRITTEN))
    assert counts["rms_norm"] == 2 and counts["rms_norm_backward"] == counts["rms_norm_backward_reduce"] == 1
    assert not counts["pow"] + counts["broadcast"] + counts["reduce_sum"] + counts["pow_backward"]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_step_is_the_same(precision: str, monkeypatch: pytest.MonkeyPatch):
    joined = graph(WRITTEN, precision)
    monkeypatch.setattr(training, "join_rms_norms", as_written)
    plain = graph(WRITTEN, precision)
    assert kinds(plain)["pow"] and not kinds(plain)["rms_norm"]
    given = draw(plain, np.random.default_rng(5))
    actual, wanted = step(joined, given), step(plain, given)
    tolerance = 1e-10 if precision == "fp64" else 2e-5
    assert {after for _, after in plain.updates} == {after for _, after in joined.updates}
    for _, after in plain.updates:
        np.testing.assert_allclose(actual[after], wanted[after], rtol=tolerance, atol=tolerance / 10, err_msg=after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pow(-0.5)", "pow(-1)"),
        ("pow(2)", "pow(3)"),
        ("mean(1, keep=true)", "sum(1, keep=true)"),
        ("mean(1, keep=true)", "mean((1, 2), keep=true)"),
        ("y = x * r", "y = (x |> relu) * r"),
        ("y = x * r * parameter(4) @weight", "y = x * r"),
        ("y = x * r * parameter(4) @weight", "z = x * r\n  y = z * parameter(4) @weight + z"),
        ("@weight", "@weight + (x * r)"),
        ("parameter(4) @weight", "(image |> conv(4, 1))"),
    ],
)
def test_other_products_stay(before: str, after: str):
    assert before in WRITTEN
    assert not kinds(graph(WRITTEN.replace(before, after)))["rms_norm"]


def test_rows_may_be_divided():
    training = graph(WRITTEN, "fp64")
    types = {name: value.type for name, value in training.values.items()}
    env = step(training, draw(training, np.random.default_rng(2)))
    for op in training.train:
        if not op.kind.startswith("rms_norm"):
            continue
        kind, gamma, parts = KINDS[op.kind], types[op.inputs[-1]].shape == (4,), []
        for rows in (slice(0, 1), slice(1, 4)):
            operands = [env[v][rows] for v in op.inputs[: len(op.inputs) - gamma]] + [env[op.inputs[-1]]] * gamma
            outputs = tuple(
                types[v] if kind.reduces else types[v].with_rows(rows.stop - rows.start) for v in op.outputs
            )
            assert kind.evaluate is not None
            parts.append(kind.evaluate(op.attributes, operands, Call(outputs, rows.start, 4, Precision.FP64)))
        for number, name in enumerate(op.outputs):
            pieces = [part[number] for part in parts]
            together = pieces[0] + pieces[1] if kind.reduces else np.concatenate(pieces)
            np.testing.assert_allclose(together, env[name], rtol=1e-12)


def test_shapes_that_do_not_fit():
    training = graph(WRITTEN)
    types = {name: value.type for name, value in training.values.items()}
    (forward,) = (op for op in training.train if op.kind == "rms_norm")
    x, gamma = (types[name] for name in forward.inputs)
    inverse = types[forward.outputs[1]]
    for kind, wrong in (
        ("rms_norm", (x, inverse)),
        ("rms_norm", (gamma, gamma)),
        ("rms_norm_backward", (x, x, gamma, gamma)),
        ("rms_norm_backward_reduce", (x, x, gamma)),
    ):
        with pytest.raises(ShapeError):
            KINDS[kind].shape(RmsNorm(1e-5), wrong)

"""ReLU's gradient before that of the pool after it: where this applies, and that it changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Array, Attributes, Call, NoAttributes
from mbc.ops.pooling import MaxPool
from tests.passes import small

WINDOWS = (
    ((2, 2), (2, 2), (0, 0, 0, 0)),
    ((3, 3), (2, 2), (1, 1, 1, 1)),
    ((3, 3), (1, 1), (1, 1, 1, 1)),
    ((2, 2), (3, 3), (0, 0, 0, 0)),
)


def run(kind: str, attributes: Attributes, *inputs: Array) -> tuple[Array, ...]:
    dtypes = {np.dtype(np.uint8): DType.UINT8}
    types = tuple(TensorType(x.shape, dtypes.get(x.dtype, DType.FP32)) for x in inputs)
    evaluate = KINDS[kind].evaluate
    assert evaluate is not None
    outputs = KINDS[kind].shape(attributes, types)
    return evaluate(attributes, inputs, Call(outputs, 0, inputs[0].shape[0], Precision.FP32))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("special", [None, np.nan, -np.inf, np.inf, -0.0])
def test_both_orders_give_the_same_bits(window: tuple[tuple[int, int], ...], special: float | None):
    random = np.random.default_rng(3)
    x = (np.round(random.standard_normal((2, 3, 9, 8)) * 2) / 2).astype(np.float32)  # of which many are equal
    if special is not None:
        x[random.random(x.shape) < 0.2] = special
    a = MaxPool((9, 8), *window, index=True)  # pyright: ignore[reportArgumentType]
    (y,) = run("relu", NoAttributes(), x)
    p, index = run("max_pool", a, y)
    dp = random.standard_normal(p.shape).astype(np.float32)
    (between,) = run("max_pool_backward", a, index, dp)
    (wanted,) = run("relu_backward", NoAttributes(), y, between)
    (behind,) = run("relu_backward", NoAttributes(), p, dp)
    (gradient,) = run("max_pool_backward", a, index, behind)
    assert gradient.tobytes() == wanted.tobytes()
    assert 0 < np.count_nonzero(gradient) < gradient.size


def graph(body: str) -> TrainingGraph:
    return small.graph(f"  x = image |> conv(4, 3, pad=1) @first\n{body}")


def makers(training: TrainingGraph) -> dict[str, Operation]:
    return {value: op for op in training.train for value in op.outputs}


def test_relus_output_is_not_read_backwards():
    training = graph("  y = x |> relu |> maxpool(2)")
    (forward,) = (op for op in training.train if op.kind == "relu")
    (backward,) = (op for op in training.train if op.kind == "relu_backward")
    assert [op.kind for op in training.train if forward.outputs[0] in op.inputs] == ["max_pool"]
    by = makers(training)
    assert by[backward.inputs[0]].kind == "max_pool"
    (gather,) = (op for op in training.train if op.kind == "max_pool_backward")
    assert gather.inputs[1] == backward.outputs[0]
    assert training.values[backward.outputs[0]].type == training.values[backward.inputs[0]].type


def test_branches_that_are_summed_share_a_gradient():
    branch = "(x |> conv(4, 3, pad=1) |> relu |> maxpool(2))"
    training = graph(f"  y = {branch} + {branch}")
    by = makers(training)
    backward = [op for op in training.train if op.kind == "relu_backward"]
    assert [by[op.inputs[0]].kind for op in backward] == ["max_pool"] * 2
    assert backward[0].inputs[1] == backward[1].inputs[1]


@pytest.mark.parametrize(
    "body",
    [
        "  r = x |> relu\n  y = (r |> maxpool(2), r |> avgpool(2)) |> concat",  # the gradient behind relu is a sum
        "  y = x |> gelu |> maxpool(2) |> relu",  # relu is behind the pool
    ],
)
def test_elsewhere_the_order_stays(body: str):
    training = graph(body)
    (backward,) = (op for op in training.train if op.kind == "relu_backward")
    assert makers(training)[backward.inputs[0]].kind == "relu"

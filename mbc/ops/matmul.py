"""Products of the matrices in the last two axes of tensors, one for each sample and index of the axes before these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.framework_calls import Calls
from mbc.ops.products import product
from mbc.ops.rounding import operand


@dataclass(frozen=True, slots=True)
class Matmul(Attributes):
    """Settings of a product: whether the first and the second matrix are transposed before they are multiplied."""

    transpose_a: bool = False
    transpose_b: bool = False


def sizes(a: Matmul, x: TensorType, y: TensorType) -> tuple[int, int, int]:
    """Return rows, columns and K of each product.

    Raises:
        ShapeError: The matrices cannot be multiplied.
    """
    m, k = x.shape[-2:][:: -1 if a.transpose_a else 1]
    n, depth = y.shape[-2:][:: 1 if a.transpose_b else -1]
    if k != depth:
        raise ShapeError(f"matrices of {m} x {k} and {depth} x {n} of {x} and {y} cannot be multiplied")
    return m, n, k


def _shape(a: Matmul, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, y = inputs
    if len(x.shape) < 3 or x.shape[:-2] != y.shape[:-2] or x.dtype != y.dtype:
        raise ShapeError(f"{x} and {y} do not hold equally many matrices of one type in their last two axes")
    m, n, _ = sizes(a, x, y)
    return (TensorType((*x.shape[:-2], m, n), x.dtype),)


def _evaluate(a: Matmul, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, y = (operand(v, call.precision) for v in inputs)
    x, y = (np.swapaxes(v, -1, -2) if turned else v for v, turned in ((x, a.transpose_a), (y, a.transpose_b)))
    return (product(x, y),)


def _gradient(g: Gradients, op: Operation, dz: str) -> tuple[str | None, ...]:
    """Return the gradients of op(X) op(Y): dX = dZ op(Y)^T, dY = op(X)^T dZ, transposed if the operand is."""
    x, y = op.inputs
    a = op.attributes
    assert isinstance(a, Matmul)
    dx = dy = None
    if g.needs(x):
        given = (Matmul(a.transpose_b, True), (y, dz)) if a.transpose_a else (Matmul(False, not a.transpose_b), (dz, y))
        (dx,) = g.emit("matmul", *given, x)
    if g.needs(y):
        given = (Matmul(True, a.transpose_a), (dz, x)) if a.transpose_b else (Matmul(not a.transpose_a), (x, dz))
        (dy,) = g.emit("matmul", *given, y)
    return dx, dy


def _flops(a: Matmul, inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...]) -> int:
    return 2 * outputs[0].elements * sizes(a, *inputs)[2]


_CALL = "(x.mT if transpose_a else x) @ (y.mT if transpose_b else y)"
OPS = (
    OpKind("matmul", Matmul, _shape, _evaluate, _gradient, divisible=True, flops=_flops, calls=Calls(_CALL, jax=_CALL)),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("matmul", Matmul(settings["transpose_a"], settings["transpose_b"]), inputs)[0]


LAYERS = (
    Layer(
        "matmul",
        (Parameter("transpose_a", "bool", False), Parameter("transpose_b", "bool", False)),
        _build,
        (2, 2),
        "Products of the matrices in the last two axes: (a, b) of [N, H, T, D] and [N, H, D, S] give [N, H, T, S].",
    ),
)

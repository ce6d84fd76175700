"""Sums and products of an image with one number for each of its channels, a gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mbc.ir.graph import Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, NoAttributes, OpKind, ShapeError
from mbc.ops.device import device, dot
from mbc.ops.framework_calls import Calls

NONE = NoAttributes()


def gate_shape(x: TensorType) -> tuple[int, ...]:
    """Return [N, C, 1, ...], the shape of a gate: one number for each channel of each image."""
    return (*x.shape[:2], *(1,) * (len(x.shape) - 2))


def _broadcast_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, gate = inputs
    if len(x.shape) < 3 or gate.shape != gate_shape(x):
        raise ShapeError(f"{gate} does not have one number for each channel of each image of {x}")
    if gate.dtype != x.dtype:
        raise ShapeError(f"the element types of {x} and {gate} differ")
    return (x,)


def _pixel_sum_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    first, *others = inputs
    if len(first.shape) < 3 or any(other != first for other in others):
        raise ShapeError(f"sums over pixels need images of one shape, but got {' and '.join(map(str, inputs))}")
    return (TensorType(gate_shape(first), first.dtype),)


def _pixel_sum(x: Array) -> tuple[Array, ...]:
    axes = tuple(range(2, x.ndim))
    return (np.sum(x, axis=axes, dtype=np.float64, keepdims=True).astype(x.dtype),)


def _mul_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, gate = op.inputs
    dgate = g.emit("pixel_dot", NONE, (x, dy), gate)[0] if g.needs(gate) else None
    dx = g.emit("broadcast_mul", NONE, (dy, gate), x)[0] if g.needs(x) else None
    return dx, dgate


def _add_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    gate = op.inputs[1]
    return dy, g.emit("pixel_sum", NONE, (dy,), gate)[0] if g.needs(gate) else None


def _sum(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _pixel_sum(inputs[0])


def _dot(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _pixel_sum(inputs[0] * inputs[1])


OPS = (
    OpKind(
        "broadcast_mul",
        NoAttributes,
        _broadcast_shape,
        lambda a, inputs, call: (inputs[0] * inputs[1],),
        _mul_gradient,
        divisible=True,
        in_place=((0, 0),),
        device=device("x, gate", "x * gate"),
        calls=Calls("x * y", jax="x * y", onnx="Mul(x, y)"),
    ),
    OpKind(
        "broadcast_add",
        NoAttributes,
        _broadcast_shape,
        lambda a, inputs, call: (inputs[0] + inputs[1],),
        _add_gradient,
        divisible=True,
        in_place=((0, 0),),
        device=device("x, gate", "x + gate"),
        calls=Calls("x + y", jax="x + y", onnx="Add(x, y)"),
    ),
    OpKind("pixel_sum", NoAttributes, _pixel_sum_shape, _sum, divisible=True),
    OpKind("pixel_dot", NoAttributes, _pixel_sum_shape, _dot, divisible=True, device=dot),
)

LAYERS: tuple[Layer, ...] = ()

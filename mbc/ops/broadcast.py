"""Sums and products of tensors: of one shape, or of an image with one number for each of its channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, NoAttributes, OpKind, ShapeError
from mbc.ops.shape import Unflatten

NONE = NoAttributes()


def _gate_shape(x: TensorType) -> tuple[int, ...]:
    """[N, C, 1, ...]: one number for each channel of each image."""
    return (*x.shape[:2], *(1,) * (len(x.shape) - 2))


def _broadcast_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, gate = inputs
    if len(x.shape) < 3 or gate.shape != _gate_shape(x):
        raise ShapeError(f"{gate} does not have one number for each channel of each image of {x}")
    if gate.dtype != x.dtype:
        raise ShapeError(f"the element types of {x} and {gate} differ")
    return (x,)


def _pixel_sum_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    first, *others = inputs
    if len(first.shape) < 3 or any(other != first for other in others):
        raise ShapeError(f"sums over pixels need images of one shape, but got {' and '.join(map(str, inputs))}")
    return (TensorType(_gate_shape(first), first.dtype),)


def _pixel_sum(x: Array) -> tuple[Array, ...]:
    axes = tuple(range(2, x.ndim))
    return (np.sum(x, axis=axes, dtype=np.float64, keepdims=True).astype(x.dtype),)


def _mul_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    x, gate = op.inputs
    if dy is None:
        return None, None
    dgate = g.emit("pixel_dot", NONE, (x, dy), gate)[0] if g.needs(gate) else None
    dx = g.emit("broadcast_mul", NONE, (dy, gate), x)[0] if g.needs(x) else None
    return dx, dgate


def _add_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    gate = op.inputs[1]
    if dy is None:
        return None, None
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
    ),
    OpKind(
        "broadcast_add",
        NoAttributes,
        _broadcast_shape,
        lambda a, inputs, call: (inputs[0] + inputs[1],),
        _add_gradient,
        divisible=True,
        in_place=((0, 0),),
    ),
    OpKind("pixel_sum", NoAttributes, _pixel_sum_shape, _sum, divisible=True),
    OpKind("pixel_dot", NoAttributes, _pixel_sum_shape, _dot, divisible=True),
)

# Appends an operation whose name ends with the last argument; returns its output.
Emit = Callable[[str, Attributes, tuple[str, ...], str], str]


def combine(kind: str, a: str, b: str, type_of: Callable[[str], TensorType], emit: Emit) -> str:
    """`add` or `mul` of two values; one may be a gate, [N, C] or [N, C, 1, 1], for the other's [N, C, H, W]."""
    left, right = type_of(a), type_of(b)
    if left.shape == right.shape:
        return emit(kind, NONE, (a, b), "")
    for x, gate in ((a, b), (b, a)):
        image, shape = type_of(x), type_of(gate).shape
        if len(image.shape) > 2 and shape in (image.shape[:2], _gate_shape(image)):
            if shape != _gate_shape(image):
                gate = emit("unflatten", Unflatten(_gate_shape(image)[1:]), (gate,), "gate")
            return emit(f"broadcast_{kind}", NONE, (x, gate), "")
    raise ShapeError(
        f"the shapes {left} and {right} differ, and neither is [N, C] or [N, C, 1, 1] of the other's [N, C, H, W]"
    )


def _chain(name: str, text: str) -> Layer:
    """A layer of two or more tensors, taken from left to right."""

    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        total = inputs[0]
        for number, other in enumerate(inputs[1:]):
            prefix = str(number) if len(inputs) > 2 else ""

            def emit(kind: str, attributes: Attributes, values: tuple[str, ...], suffix: str, of: str = prefix) -> str:
                return builder.emit(kind, attributes, values, of + suffix)[0]

            total = combine(name, total, other, builder.type, emit)
        return total

    return Layer(name, (), build, (2, None), text)


LAYERS = (
    _chain("add", "Sum of tensors of the same shape; [N, C] or [N, C, 1, 1] is added to each pixel of [N, C, H, W]."),
    _chain(
        "mul",
        "Product of tensors of the same shape, element by element; [N, C] or [N, C, 1, 1] multiplies each pixel of "
        "[N, C, H, W].",
    ),
)

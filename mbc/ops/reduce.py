"""Sums over axes: of a tensor, or of the product of two. They are the gradients of all broadcasts, and means.

`reduce_*` keep the rows; `row_reduce_*` also sum over the rows, in the type of parameter gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.activation import Scale
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.device import device, dot
from mbc.ops.framework_calls import Calls

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce(Attributes):
    """Settings of a sum.

    Attributes:
        axes: Axes of the sum, without axis 0 of the rows.
        shape: Shape of the result without rows: the other axes in their order, and any axes of one element.
        factor: Factor of the sum.
    """

    axes: tuple[int, ...]
    shape: Shape
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Expand(Attributes):
    """Settings of a sum's gradient: `factor` times each element, repeated along `axes`, to rows of `sample_shape`."""

    axes: tuple[int, ...]
    sample_shape: Shape
    factor: float = 1.0


def wide(shape: Shape) -> Shape:
    """Return the shape without axes of one element, which do not change the order of elements in memory."""
    return tuple(size for size in shape if size != 1)


def kept(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return the sizes of the axes that are not in `axes`."""
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def checked_axes(x: TensorType, axes: Sequence[int], what: str) -> tuple[int, ...]:
    """Return the axes in ascending order, with negative axes counted from the last.

    Args:
        x: Type of the tensor.
        axes: The axes.
        what: Operation that the message names.

    Raises:
        ShapeError: There is no axis, one is axis 0 (the rows), one does not exist, or one occurs twice.
    """
    rank = len(x.shape)
    ascending = sorted(axis + rank if axis < 0 else axis for axis in axes)
    if not ascending or len(set(ascending)) < len(ascending) or not 0 < ascending[0] <= ascending[-1] < rank:
        raise ShapeError(
            f"{what} takes different axes from 1 to {rank - 1} of {x}, or -1 for the last, but got "
            f"{', '.join(map(str, axes)) or 'none'}; axis 0 counts samples, which are independent"
        )
    return tuple(ascending)


def _operands(inputs: tuple[TensorType, ...]) -> TensorType:
    if any(x != inputs[0] for x in inputs):
        raise ShapeError(f"sums of products need tensors of one type, but got {' and '.join(map(str, inputs))}")
    return inputs[0]


def _shape(a: Reduce, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x = _operands(inputs)
    if checked_axes(x, a.axes, "a sum") != a.axes or wide(kept(x.shape, a.axes)[1:]) != wide(a.shape):
        raise ShapeError(f"the sum of {x} over axes {a.axes} does not have the shape {a.shape} per row")
    return (TensorType((x.shape[0], *a.shape), x.dtype),)


def _row_shape(a: Reduce, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x = _operands(inputs)
    if (a.axes and checked_axes(x, a.axes, "a sum") != a.axes) or wide(kept(x.shape, (0, *a.axes))) != wide(a.shape):
        raise ShapeError(f"the sum of {x} over rows and axes {a.axes} does not have the shape {a.shape}")
    return (TensorType(a.shape, master(x.dtype)),)


def _evaluate(a: Reduce, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _sum(a, a.axes, inputs, call)


def _row_evaluate(a: Reduce, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _sum(a, (0, *a.axes), inputs, call)


def _sum(a: Reduce, axes: tuple[int, ...], inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    product = inputs[0] if len(inputs) == 1 else inputs[0] * inputs[1]
    total = np.sum(product, axis=axes, dtype=np.float64) * a.factor
    return (np.asarray(total).reshape(call.outputs[0].shape).astype(inputs[0].dtype),)


def _expand_shape(a: Expand, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (dy,) = inputs
    x = TensorType((dy.shape[0], *a.sample_shape), dy.dtype)
    if checked_axes(x, a.axes, "an expansion") != a.axes or wide(kept(x.shape, a.axes)[1:]) != wide(dy.shape[1:]):
        raise ShapeError(f"{dy} is not a sum of {x} over axes {a.axes}")
    return (x,)


def _expand(a: Expand, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    shape = (dy.shape[0], *a.sample_shape)
    ones = tuple(1 if axis in a.axes else size for axis, size in enumerate(shape))
    return (np.broadcast_to(dy.reshape(ones) * dy.dtype.type(a.factor), shape).copy(),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    (x,) = op.inputs
    a = op.attributes
    assert isinstance(a, Reduce)
    return g.emit("expand", Expand(a.axes, g.type(x).shape[1:], a.factor), (dy,), x)


def _loss_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    """Return the gradients of a loss that is sum(x * y): y times the loss's weight for x, and x times it for y."""
    weight = g.weight(op.outputs[0])

    def gradient(x: str, factor: str) -> str | None:
        if not g.needs(x):
            return None
        return factor if weight == 1 else g.emit("scale", Scale(weight), (factor,), x)[0]

    x, y = op.inputs
    return gradient(x, y), gradient(y, x)


_SUM = "(x.sum(axes) * factor).reshape(len(x), *shape)"
OPS = (
    OpKind("reduce_sum", Reduce, _shape, _evaluate, _gradient, divisible=True, calls=Calls(_SUM, jax=_SUM)),
    OpKind("reduce_dot", Reduce, _shape, _evaluate, divisible=True, device=dot),
    *(
        OpKind(kind, Reduce, _row_shape, _row_evaluate, gradient, divisible=True, accumulates=True, reduces=True)
        for kind, gradient in (("row_reduce_sum", None), ("row_reduce_dot", _loss_gradient))
    ),
    OpKind("expand", Expand, _expand_shape, _expand, divisible=True, device=device("x", "factor * x", "factor")),
)


def reduced_shape(x: TensorType, axes: tuple[int, ...], keep: bool) -> Shape:
    """Return the shape of one row after a reduction over `axes`; with `keep`, these remain with one element."""
    return tuple(1 if axis in axes else x.shape[axis] for axis in range(1, len(x.shape)) if keep or axis not in axes)


def _layer(name: str, mean: bool, text: str) -> Layer:
    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        x = builder.type(inputs[0])
        axes = checked_axes(x, settings["axes"], name)
        factor = 1 / math.prod(x.shape[axis] for axis in axes) if mean else 1.0
        return builder.emit("reduce_sum", Reduce(axes, reduced_shape(x, axes, settings["keep"]), factor), inputs)[0]

    return Layer(name, AXES, build, help=text)


# Settings of every reduction in the language.
AXES = (Parameter("axes", "axes"), Parameter("keep", "bool", False))
LAYERS = (
    _layer(
        "sum",
        False,
        "Sum over axes, such as 1 or (2, 3) or -1 for the last. keep = true keeps these axes, with one element.",
    ),
    _layer(
        "mean",
        True,
        "Mean over axes, such as 1 or (2, 3) or -1 for the last. keep = true keeps these axes, with one element.",
    ),
)

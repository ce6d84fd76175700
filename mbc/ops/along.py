"""Operations along axes: softmax, its logarithm, and the largest element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.framework_calls import Calls
from mbc.ops.reduce import AXES, Shape, checked_axes, kept, reduced_shape, wide


@dataclass(frozen=True, slots=True)
class Softmax(Attributes):
    """Softmax over one axis other than that of the rows."""

    axis: int

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis, as a tuple."""
        return (self.axis,)


@dataclass(frozen=True, slots=True)
class Largest(Attributes):
    """The largest element over `axes`. `shape` is that of the result, without rows."""

    axes: tuple[int, ...]
    shape: Shape


def _same(a: Softmax, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x = inputs[0]
    if any(other != x for other in inputs) or checked_axes(x, a.axes, "softmax") != a.axes:
        raise ShapeError(f"{' and '.join(map(str, inputs))} have no softmax over axis {a.axis}")
    return (x,)


def _left(a: Largest, x: TensorType) -> TensorType:
    if checked_axes(x, a.axes, "amax") != a.axes or wide(kept(x.shape, a.axes)[1:]) != wide(a.shape):
        raise ShapeError(f"the largest of {x} over axes {a.axes} do not have the shape {a.shape} per row")
    return TensorType((x.shape[0], *a.shape), x.dtype)


def _largest_shape(a: Largest, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_left(a, inputs[0]),)


def _largest_backward_shape(a: Largest, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, y, dy = inputs
    if not y == dy == _left(a, x):
        raise ShapeError(f"{y} and gradient {dy} are not of the largest of {x} over axes {a.axes}")
    return (x,)


def _softmax(a: Softmax, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    powers = np.exp((x - x.max(axis=a.axis, keepdims=True)).astype(np.float64))
    return ((powers / powers.sum(axis=a.axis, keepdims=True)).astype(x.dtype),)


def _softmax_backward(a: Softmax, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    y, dy = inputs
    dot = np.sum(y * dy, axis=a.axis, keepdims=True, dtype=np.float64).astype(dy.dtype)
    return (y * (dy - dot),)


def _log_softmax(a: Softmax, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    shifted = (x - x.max(axis=a.axis, keepdims=True)).astype(np.float64)
    return ((shifted - np.log(np.exp(shifted).sum(axis=a.axis, keepdims=True))).astype(x.dtype),)


def _log_softmax_backward(a: Softmax, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    y, dy = inputs
    total = np.sum(dy, axis=a.axis, keepdims=True, dtype=np.float64).astype(dy.dtype)
    return (dy - np.exp(y) * total,)


def _largest(a: Largest, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    return (x.max(axis=a.axes).reshape(call.outputs[0].shape),)


def _largest_backward(a: Largest, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the gradient: equal largest elements share it, as with torch.amax."""
    x, y, dy = inputs
    ones = tuple(1 if axis in a.axes else size for axis, size in enumerate(x.shape))
    here = x == y.reshape(ones)
    count = np.maximum(here.sum(axis=a.axes, keepdims=True), 1).astype(x.dtype)
    return (np.where(here, dy.reshape(ones) / count, 0).astype(x.dtype),)


def _softmax_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit(f"{op.kind}_backward", op.attributes, (op.outputs[0], dy), *op.inputs)


def _largest_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit("amax_backward", op.attributes, (*op.inputs, op.outputs[0], dy), *op.inputs)


OPS = (
    OpKind(
        "softmax",
        Softmax,
        _same,
        _softmax,
        _softmax_gradient,
        divisible=True,
        in_place=((0, 0),),
        calls=Calls("F.softmax(x, axis)", jax="jax.nn.softmax(x, axis)", onnx="Softmax(x, axis=axis)"),
    ),
    OpKind("softmax_backward", Softmax, _same, _softmax_backward, divisible=True, in_place=((0, 1),)),
    OpKind(
        "log_softmax",
        Softmax,
        _same,
        _log_softmax,
        _softmax_gradient,
        divisible=True,
        in_place=((0, 0),),
        calls=Calls("F.log_softmax(x, axis)", jax="jax.nn.log_softmax(x, axis)", onnx="LogSoftmax(x, axis=axis)"),
    ),
    OpKind("log_softmax_backward", Softmax, _same, _log_softmax_backward, divisible=True, in_place=((0, 1),)),
    OpKind(
        "amax",
        Largest,
        _largest_shape,
        _largest,
        _largest_gradient,
        divisible=True,
        calls=Calls("x.amax(axes).reshape(len(x), *shape)", jax="x.max(axes).reshape(len(x), *shape)"),
    ),
    OpKind("amax_backward", Largest, _largest_backward_shape, _largest_backward, divisible=True, in_place=((0, 0),)),
)


def _build_softmax(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _emit_along(builder, "softmax", settings["axis"], inputs)


def _build_log_softmax(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _emit_along(builder, "log_softmax", settings["axis"], inputs)


def _emit_along(builder: LayerBuilder, kind: str, axis: int, inputs: tuple[str, ...]) -> str:
    (axis,) = checked_axes(builder.type(inputs[0]), (axis,), kind)
    return builder.emit(kind, Softmax(axis), inputs)[0]


def _build_largest(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    axes = checked_axes(x, settings["axes"], "amax")
    return builder.emit("amax", Largest(axes, reduced_shape(x, axes, settings["keep"])), inputs)[0]


LAYERS = (
    Layer(
        "softmax",
        (Parameter("axis", "int", 1),),
        _build_softmax,
        help="exp(x) over its sum along an axis. `softmax_cross_entropy` takes logits, without it.",
    ),
    Layer(
        "log_softmax",
        (Parameter("axis", "int", 1),),
        _build_log_softmax,
        help="The logarithm of softmax. `nll` takes it.",
    ),
    Layer(
        "amax",
        AXES,
        _build_largest,
        help="Largest element over axes, given as for `sum`; equal elements share the gradient.",
    ),
)

"""Operations that move elements without changing them: nearest upsampling, concatenation, flattening."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, NoAttributes, OpKind, ShapeError
from mbc.ops.framework_calls import Calls
from mbc.ops.window import Axes, spatial


@dataclass(frozen=True, slots=True)
class Upsample(Attributes):
    """Settings of nearest upsampling: every pixel becomes `factor` pixels along each spatial axis."""

    factor: Axes


@dataclass(frozen=True, slots=True)
class ChannelSlice(Attributes):
    """Settings of a slice: channels `start` … `start + count - 1`."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Unflatten(Attributes):
    """Settings of a reshape: `sample_shape` is the new shape of one row."""

    sample_shape: tuple[int, ...]


def _upsample_shape(a: Upsample, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    rows, channels, size = spatial(inputs[0], "upsample", len(a.factor))
    return (TensorType((rows, channels, *map(operator.mul, size, a.factor)), inputs[0].dtype),)


def _upsample_backward_shape(a: Upsample, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    rows, channels, size = spatial(inputs[0], "upsample", len(a.factor))
    if any(map(operator.mod, size, a.factor)):
        raise ShapeError(f"gradient {inputs[0]} is not a multiple of the factor {a.factor}")
    return (TensorType((rows, channels, *(n // k for n, k in zip(size, a.factor, strict=True))), inputs[0].dtype),)


def _concat_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    first = inputs[0]
    if len(first.shape) < 2:
        raise ShapeError(f"concat needs tensors with rows and channels, but got {first}")
    for other in inputs[1:]:
        if other.dtype != first.dtype or _without_channels(other) != _without_channels(first):
            rounded = len(other.shape) == len(first.shape) and _differ_by_one(first.shape[2:], other.shape[2:])
            hint = ": for a skip connection, the strides together must divide each size of the input" if rounded else ""
            raise ShapeError(f"{first} and {other} differ in more than their channels{hint}")
    channels = sum(x.shape[1] for x in inputs)
    return (TensorType((first.shape[0], channels, *first.shape[2:]), first.dtype),)


def _differ_by_one(first: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether a size that a stride rounded up, and upsampling did not restore, can be the only difference."""
    return first != other and all(abs(m - n) <= 1 for m, n in zip(first, other, strict=True))


def _without_channels(x: TensorType) -> tuple[int, ...]:
    return (*x.shape[:1], *x.shape[2:])


def _slice_shape(a: ChannelSlice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    if len(x.shape) < 2 or a.start < 0 or a.count < 1 or a.start + a.count > x.shape[1]:
        raise ShapeError(f"{x} has no channels {a.start} to {a.start + a.count}")
    return (TensorType((x.shape[0], a.count, *x.shape[2:]), x.dtype),)


def _flatten_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    return (TensorType((x.shape[0], math.prod(x.shape[1:])), x.dtype),)


def _unflatten_shape(a: Unflatten, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    if math.prod(x.shape[1:]) != math.prod(a.sample_shape):
        raise ShapeError(f"{x} cannot take the shape {a.sample_shape} per row")
    return (TensorType((x.shape[0], *a.sample_shape), x.dtype),)


def _upsample(a: Upsample, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    for axis, factor in enumerate(a.factor, 2):
        x = x.repeat(factor, axis=axis)
    return (x,)


def _upsample_backward(a: Upsample, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    blocks = itertools.chain(*zip(call.outputs[0].shape[2:], a.factor, strict=True))
    return (dy.reshape(*dy.shape[:2], *blocks).sum(axis=tuple(range(3, 3 + 2 * len(a.factor), 2))),)


def _concat(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (np.concatenate(inputs, axis=1),)


def _slice(a: ChannelSlice, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (inputs[0][:, a.start : a.start + a.count].copy(),)


def _reshape(a: Attributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (inputs[0].reshape(inputs[0].shape[0], *call.outputs[0].shape[1:]),)


def _upsample_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit("upsample_backward", op.attributes, (dy,), *op.inputs)


def _concat_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    counts = [g.type(x).shape[1] for x in op.inputs]
    starts = [0, *itertools.accumulate(counts)]
    parts: list[str | None] = [None] * len(counts)
    # The narrowest operand comes first (of equal ones the last): the new part of a concatenation that grows. Its
    # gradient can be extracted where the whole gradient is computed. The widest is read by the next operation.
    for i in sorted(range(len(counts)), key=lambda i: (counts[i], -i)):
        x = op.inputs[i]
        if g.needs(x):
            (parts[i],) = g.emit("channel_slice", ChannelSlice(starts[i], counts[i]), (dy,), x)
    return tuple(parts)


def _flatten_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    (x,) = op.inputs
    return g.emit("unflatten", Unflatten(g.type(x).shape[1:]), (dy,), x)


def _unflatten_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    (x,) = op.inputs
    if len(g.type(x).shape) == 2:
        return g.emit("flatten", NoAttributes(), (dy,), x)
    return g.emit("unflatten", Unflatten(g.type(x).shape[1:]), (dy,), x)


def in_planes(
    e: Expansion,
    op: Operation,
    planes: Attributes | None,
    lines: Callable[[int], Attributes | None],
    emit: Callable[[Attributes, str, str], str],
) -> tuple[str, ...]:
    """Return an operation along three axes as one along the last two and then one along the first.

    Kernels take at most two axes. The first of the two operations has the depth among the channels; the second one has
    height and width as one axis.

    Args:
        e: Writes the operations.
        op: The operation along three axes.
        planes: Attributes of the operation along the last two axes; None if it changes nothing.
        lines: Returns the attributes of the operation along the first axis for a number of pixels of a plane; None if
            it changes nothing.
        emit: Appends an operation of the kind, for its attributes, its input and its output.
    """
    (x,), (y, *_) = op.inputs, op.outputs
    _, channels, depth, *plane = e.type(x).shape
    if planes is not None:
        (x,) = e.emit("unflatten", Unflatten((channels * depth, *plane)), (x,), (f"{y}.planes",), f"{op.name}.planes")
        x = emit(planes, x, f"{y}.in_planes")
        plane = e.type(x).shape[2:]
    along = lines(math.prod(plane))
    if along is not None:
        view = Unflatten((channels, depth, math.prod(plane)))
        (x,) = e.emit("unflatten", view, (x,), (f"{y}.lines",), f"{op.name}.lines")
        x = emit(along, x, f"{y}.in_lines")
        depth = e.type(x).shape[2]
    return e.emit("unflatten", Unflatten((channels, depth, *plane)), (x,), op.outputs, op.name)


def appended(e: Expansion, op: Operation) -> Callable[[Attributes, str, str], str]:
    """Return a function that appends an operation of the kind of `op`, as `in_planes` needs it."""
    return lambda attributes, x, y: e.emit(op.kind, attributes, (x,), (y,), y)[0]


def _upsample_expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, Upsample)
    if len(a.factor) < 3:
        return e.emit(op.kind, a, op.inputs, op.outputs, op.name)
    first, *others = a.factor
    planes = None if set(others) == {1} else Upsample(tuple(others))
    return in_planes(e, op, planes, lambda _: None if first == 1 else Upsample((first, 1)), appended(e, op))


OPS = (
    OpKind("upsample", Upsample, _upsample_shape, _upsample, _upsample_gradient, _upsample_expand, divisible=True),
    OpKind("upsample_backward", Upsample, _upsample_backward_shape, _upsample_backward, divisible=True),
    OpKind(
        "concat",
        NoAttributes,
        _concat_shape,
        _concat,
        _concat_gradient,
        divisible=True,
        calls=Calls("torch.cat(xs, 1)", jax="jnp.concatenate(xs, 1)", onnx="Concat(*xs, axis=1)"),
    ),
    OpKind(
        "channel_slice",
        ChannelSlice,
        _slice_shape,
        _slice,
        divisible=True,
        reads=lambda a, inputs: (a.count / inputs[0].shape[1],),
    ),
    OpKind(
        "flatten",
        NoAttributes,
        _flatten_shape,
        _reshape,
        _flatten_gradient,
        divisible=True,
        view=True,
        calls=Calls("x.reshape(len(x), -1)", jax="x.reshape(len(x), -1)", onnx="Flatten(x, axis=1)"),
    ),
    OpKind(
        "unflatten",
        Unflatten,
        _unflatten_shape,
        _reshape,
        _unflatten_gradient,
        divisible=True,
        view=True,
        calls=Calls("x.reshape(len(x), *sample_shape)", jax="x.reshape(len(x), *sample_shape)"),
    ),
)


def _build_flatten(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("flatten", NoAttributes(), inputs)[0]


def _build_squeeze(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    if math.prod(x.shape[1:]) != 1:
        raise ShapeError(f"a sample of {x} has {math.prod(x.shape[1:])} elements, but squeeze takes one")
    return builder.emit("unflatten", Unflatten(()), inputs)[0]


LAYERS = (
    Layer("flatten", (), _build_flatten, help="[N, ...] becomes [N, features]."),
    Layer("squeeze", (), _build_squeeze, help="One number a sample, [N, 1, ...], becomes [N]."),
)

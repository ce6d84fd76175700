"""Max pooling, average pooling, and their global forms. Ceil mode and counting of padding follow PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbc.ir.graph import Operation
from mbc.ir.optional import optional
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.window import Axes, Window, by, by_axis, by_side, spatial

MOST_POSITIONS = 256  # positions in a window of max pooling, which one byte can number


@dataclass(frozen=True, slots=True)
class Pool(Window):
    """Settings of pooling along one, two or three spatial axes. Padding is never the maximum of a window."""

    ceil: bool = False

    @property
    def rounds_up(self) -> bool:
        """True if a last window may extend beyond the padded image."""
        return self.ceil


@dataclass(frozen=True, slots=True)
class MaxPool(Pool):
    """Max pooling; with `index`, also returns each maximum's position in its window (training graphs only).

    Attributes:
        index: Whether positions are returned.
        dilation: Distance of neighbouring positions of a window; empty: 1 along every axis.
    """

    index: bool = False
    dilation: tuple[int, ...] = optional(())

    @property
    def spacing(self) -> Axes:
        """Distance of neighbouring positions of a window."""
        return self.dilation or (1,) * len(self.kernel)


@dataclass(frozen=True, slots=True)
class AveragePool(Pool):
    """Average pooling. `count_pad`: the divisor counts padding (but not what ceil mode adds beyond it)."""

    count_pad: bool = True


def _check(a: Pool) -> None:
    a.check()
    outside = any(max(sides) >= span for *sides, span in zip(a.before, a.after, a.span, strict=True))
    if outside or any(_is_empty(a, axis) for axis, distance in enumerate(a.spacing) if distance > 1):
        raise ShapeError(f"pad {a.pad} leaves windows of {by(a.span)} without any pixel")


def _is_empty(a: Pool, axis: int) -> bool:
    """Return whether the positions of some dilated window leave out the whole image along an axis."""
    first = _first_along(a, axis)
    at = np.arange(len(first)) * a.stride[axis] - a.before[axis] + first * a.spacing[axis]
    return bool(np.any((first >= a.kernel[axis]) | (at >= a.size[axis])))


def _fit(a: Pool, x: TensorType) -> TensorType:
    _check(a)
    rows, channels, size = spatial(x, "pooling")
    if size != a.size:
        raise ShapeError(f"input {x} is not of the size {a.size} that the pooling is for")
    return TensorType((rows, channels, *a.output_size), x.dtype)


def _unfit(a: Pool, dy: TensorType) -> TensorType:
    rows, channels, size = spatial(dy, "pooling")
    if size != a.output_size:
        raise ShapeError(f"gradient {dy} does not fit pooling of an image of {a.size}")
    return TensorType((rows, channels, *a.size), dy.dtype)


def _max_shape(a: MaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y = _fit(a, inputs[0])
    if math.prod(a.kernel) > MOST_POSITIONS:
        raise ShapeError(
            f"a max-pool window of {by(a.kernel)} has more than the {MOST_POSITIONS} positions that a byte can number"
        )
    return (y, TensorType(y.shape, DType.UINT8)) if a.index else (y,)


def _max_backward_shape(a: MaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    index, dy = inputs
    if index != TensorType(dy.shape, DType.UINT8):
        raise ShapeError(f"index {index} does not belong to gradient {dy}")
    return (_unfit(a, dy),)


def _average_shape(a: AveragePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_fit(a, inputs[0]),)


def _average_backward_shape(a: AveragePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_unfit(a, inputs[0]),)


def padded_image(a: Pool, x: Array, fill: float) -> Array:
    """Return the image with padding of value `fill`, as large as the windows need."""
    if a.covered == a.size:
        return x
    padded = np.full((*x.shape[:2], *a.covered), fill, x.dtype)
    padded[a.inside] = x
    return padded


def _first_along(a: Pool, axis: int) -> Array:
    """Return the first position of each window along an axis that is not before the image."""
    outside = a.before[axis] - np.arange(a.output_size[axis]) * a.stride[axis]
    return np.maximum(-(-outside // a.spacing[axis]), 0)


def first_positions(a: Pool) -> Array:
    """Return the number of each window's first position that is not padding."""
    first = np.zeros((), np.int64)
    for axis, kernel in enumerate(a.kernel):
        first = first[..., None] * kernel + _first_along(a, axis)
    return first


def _max(a: MaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the maxima: the first of equal ones wins, and NaN counts as greater than every number.

    The last of several NaNs in a window wins here; in kernels, any one may win.
    """
    padded = padded_image(a, inputs[0], -np.inf)
    best = np.full((*padded.shape[:2], *a.output_size), -np.inf, padded.dtype)
    if not a.index:
        for _, at in a.positions():
            np.maximum(best, padded[at], out=best)
        return (best,)
    # The first position that is no padding is right even if the whole window is -inf.
    first = first_positions(a).astype(np.uint8)
    index = np.broadcast_to(first, best.shape).copy()
    for position, at in a.positions():
        seen = padded[at]
        better = ~(seen <= best)
        # A NaN compares false with everything, so only another NaN may replace a NaN.
        better &= (best == best) | (seen != seen)
        np.copyto(best, seen, where=better)
        np.copyto(index, np.uint8(position), where=better)
    return best, index


def _max_backward(a: MaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    index, dy = inputs
    padded = np.zeros((*dy.shape[:2], *a.covered), dy.dtype)
    for position, at in a.positions():
        padded[at] += np.where(index == position, dy, 0).astype(dy.dtype)
    return (padded[a.inside],)


def window_divisors(a: AveragePool) -> Array:
    """Return the divisor of each window's sum, of the output's size."""
    divisors: Array = np.ones((), np.int64)
    for axis, count in enumerate(a.output_size):
        start: Array = np.arange(count, dtype=np.int64) * a.stride[axis] - a.before[axis]
        low = -a.before[axis] if a.count_pad else 0
        high = a.size[axis] + (a.after[axis] if a.count_pad else 0)
        divisors = divisors[..., None] * (np.minimum(start + a.kernel[axis], high) - np.maximum(start, low))
    return divisors


def _is_global(a: AveragePool) -> bool:
    """Return whether one window covers the image."""
    return a.kernel == a.size and not any(a.pad)


def _average(a: AveragePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    if _is_global(a):
        return (np.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True, dtype=np.float64).astype(x.dtype),)
    padded = padded_image(a, x, 0)
    total = np.zeros((*x.shape[:2], *a.output_size), x.dtype)
    for _, at in a.positions():
        total += padded[at]
    return (total / window_divisors(a).astype(x.dtype),)


def _average_backward(a: AveragePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    share = dy / window_divisors(a).astype(dy.dtype)
    if _is_global(a):
        return (np.broadcast_to(share, (*dy.shape[:2], *a.size)).copy(),)
    padded = np.zeros((*dy.shape[:2], *a.covered), dy.dtype)
    for _, at in a.positions():
        padded[at] += share
    return (padded[a.inside],)


def max_expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    """Return the output of plain or adaptive max pooling, which also returns an index where a gradient is wanted."""
    index = training and e.needs(op.outputs[0])
    outputs = (*op.outputs, f"{op.outputs[0]}.index") if index else op.outputs
    return e.emit(op.kind, replace(op.attributes, index=index), op.inputs, outputs, op.name)[:1]


def max_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    """Return the data gradient of plain or adaptive max pooling."""
    return g.emit(f"{op.kind}_backward", op.attributes, (op.outputs[1], dy), *op.inputs)


def average_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    """Return the data gradient of plain or adaptive average pooling."""
    return g.emit(f"{op.kind}_backward", op.attributes, (dy,), *op.inputs)


OPS = (
    OpKind("max_pool", MaxPool, _max_shape, _max, max_gradient, max_expand, divisible=True),
    OpKind("max_pool_backward", MaxPool, _max_backward_shape, _max_backward, divisible=True),
    OpKind("avg_pool", AveragePool, _average_shape, _average, average_gradient, divisible=True),
    OpKind("avg_pool_backward", AveragePool, _average_backward_shape, _average_backward, divisible=True),
)


def _build(
    builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...], kind: type[Pool], **more: Any
) -> str:
    _, _, size = spatial(builder.type(inputs[0]), "pooling")
    kernel, stride = (by_axis(settings[name], len(size)) for name in ("kernel", "stride"))
    pad = by_side(settings["pad"], len(size))
    a = kind(size, kernel, stride if any(stride) else kernel, pad, settings["ceil"], **more)
    return builder.emit("max_pool" if kind is MaxPool else "avg_pool", a, inputs)[0]


def _build_max(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    dilation = by_axis(settings["dilation"], len(builder.type(inputs[0]).shape) - 2)
    return _build(builder, settings, inputs, MaxPool, dilation=dilation if set(dilation) != {1} else ())


def _build_average(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _build(builder, settings, inputs, AveragePool, count_pad=settings["count_pad"])


def _build_global(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    _, _, size = spatial(builder.type(inputs[0]), "global_avgpool")
    return builder.emit("avg_pool", AveragePool(size, size), inputs)[0]


_WINDOW = (Parameter("kernel", "spatial"), Parameter("stride", "spatial", 0), Parameter("pad", "sides", 0))

LAYERS = (
    Layer(
        "maxpool",
        (*_WINDOW, Parameter("ceil", "bool", False), Parameter("dilation", "spatial", 1)),
        _build_max,
        help="Largest of each window. stride = 0 (the default) means the kernel's size.",
    ),
    Layer(
        "avgpool",
        (*_WINDOW, Parameter("count_pad", "bool", True), Parameter("ceil", "bool", False)),
        _build_average,
        help="Mean of each window. stride = 0 (the default) means the kernel's size.",
    ),
    Layer(
        "global_avgpool",
        (),
        _build_global,
        help="Mean of each channel over all pixels: [N, C, H, W] becomes [N, C, 1, 1].",
    ),
)

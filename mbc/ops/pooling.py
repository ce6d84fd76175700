"""Max pooling, average pooling, and their global forms. Ceil mode and counting of padding follow PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.window import Pads, Pair, as_pads, as_pair, image, positive, window_counts


@dataclass(frozen=True, slots=True)
class Pool(Attributes):
    """Settings of pooling. `size` is that of the input, in pixels. Padding is never the maximum of a window."""

    size: Pair
    kernel: Pair
    stride: Pair
    pad: Pads = (0, 0, 0, 0)  # top, bottom, left, right
    ceil: bool = False

    @property
    def output_size(self) -> Pair:
        """Height and width of the result."""
        return window_counts(self.size, self.kernel, self.stride, self.pad, self.ceil)


@dataclass(frozen=True, slots=True)
class MaxPool(Pool):
    """Max pooling; with `index`, also returns each maximum's position in its window (training graphs only)."""

    index: bool = False


@dataclass(frozen=True, slots=True)
class AveragePool(Pool):
    """Average pooling. `count_pad`: the divisor counts padding (but not what ceil mode adds beyond it)."""

    count_pad: bool = True


def _check(a: Pool) -> None:
    positive("kernel", a.kernel)
    positive("stride", a.stride)
    positive("pad", a.pad, 0)
    for axis in (0, 1):
        if max(a.pad[2 * axis : 2 * axis + 2]) >= a.kernel[axis]:
            raise ShapeError(f"pad {a.pad} leaves windows of {a.kernel[0]} x {a.kernel[1]} without any pixel")


def _fit(a: Pool, x: TensorType) -> TensorType:
    _check(a)
    rows, channels, height, width = image(x, "pooling")
    if (height, width) != a.size:
        raise ShapeError(f"input {x} is not of the size {a.size} that the pooling is for")
    return TensorType((rows, channels, *a.output_size), x.dtype)


def _unfit(a: Pool, dy: TensorType) -> TensorType:
    rows, channels, height, width = image(dy, "pooling")
    if (height, width) != a.output_size:
        raise ShapeError(f"gradient {dy} does not fit pooling of an image of {a.size}")
    return TensorType((rows, channels, *a.size), dy.dtype)


def _max_shape(a: MaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y = _fit(a, inputs[0])
    if a.kernel[0] * a.kernel[1] > 256:
        raise ShapeError(
            f"a max-pool window of {a.kernel[0]} x {a.kernel[1]} has more than the 256 positions that a byte can number"
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


def padded_size(a: Pool) -> Pair:
    """Return the rows and columns that the windows cover, from the start of the leading padding."""
    p, q = a.output_size
    return (
        max((p - 1) * a.stride[0] + a.kernel[0], a.pad[0] + a.size[0]),
        max((q - 1) * a.stride[1] + a.kernel[1], a.pad[2] + a.size[1]),
    )


def window_positions(a: Pool) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Yield each position in the window by number, and the pixels of the padded image at this position."""
    p, q = a.output_size
    for i in range(a.kernel[0]):
        for j in range(a.kernel[1]):
            yield (
                i * a.kernel[1] + j,
                (
                    slice(None),
                    slice(None),
                    slice(i, i + a.stride[0] * (p - 1) + 1, a.stride[0]),
                    slice(j, j + a.stride[1] * (q - 1) + 1, a.stride[1]),
                ),
            )


def _inside(a: Pool) -> tuple[slice, ...]:
    """Return the image within the padded image."""
    top, left = a.pad[0], a.pad[2]
    return slice(None), slice(None), slice(top, top + a.size[0]), slice(left, left + a.size[1])


def padded_image(a: Pool, x: Array, fill: float) -> Array:
    """Return the image with padding of value `fill`, as large as the windows need."""
    extent = padded_size(a)
    if extent == a.size:
        return x
    padded = np.full((*x.shape[:2], *extent), fill, x.dtype)
    padded[_inside(a)] = x
    return padded


def _max(a: MaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the maxima: the first of equal ones wins, and NaN counts as greater than every number.

    The last of several NaNs in a window wins here; in kernels, any one may win.
    """
    padded = padded_image(a, inputs[0], -np.inf)
    p, q = a.output_size
    best = np.full((*padded.shape[:2], p, q), -np.inf, padded.dtype)
    if not a.index:
        for _, at in window_positions(a):
            np.maximum(best, padded[at], out=best)
        return (best,)
    # The first pixel of each window that is not padding, which is right even if the whole window is -inf.
    rows = np.maximum(a.pad[0] - np.arange(p) * a.stride[0], 0)
    columns = np.maximum(a.pad[2] - np.arange(q) * a.stride[1], 0)
    first = (rows[:, None] * a.kernel[1] + columns[None, :]).astype(np.uint8)
    index = np.broadcast_to(first, best.shape).copy()
    for position, at in window_positions(a):
        seen = padded[at]
        better = ~(seen <= best)
        # A NaN compares false with everything, so only another NaN may replace a NaN.
        better &= (best == best) | (seen != seen)
        np.copyto(best, seen, where=better)
        np.copyto(index, np.uint8(position), where=better)
    return best, index


def _max_backward(a: MaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    index, dy = inputs
    padded = np.zeros((*dy.shape[:2], *padded_size(a)), dy.dtype)
    for position, at in window_positions(a):
        padded[at] += np.where(index == position, dy, 0).astype(dy.dtype)
    return (padded[_inside(a)],)


def window_divisors(a: AveragePool) -> Array:
    """Return the divisor of each window's sum, [P, Q]."""
    p, q = a.output_size
    divisors: list[Array] = []
    for axis, count in ((0, p), (1, q)):
        start = np.arange(count) * a.stride[axis] - a.pad[2 * axis]
        low = -a.pad[2 * axis] if a.count_pad else 0
        high = a.size[axis] + (a.pad[2 * axis + 1] if a.count_pad else 0)
        divisors.append(np.minimum(start + a.kernel[axis], high) - np.maximum(start, low))
    return divisors[0][:, None] * divisors[1][None, :]


def _average(a: AveragePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    if a.kernel == a.size and a.output_size == (1, 1) and not any(a.pad):
        return (np.mean(x, axis=(2, 3), keepdims=True, dtype=np.float64).astype(x.dtype),)
    padded = padded_image(a, x, 0)
    total = np.zeros((*x.shape[:2], *a.output_size), x.dtype)
    for _, at in window_positions(a):
        total += padded[at]
    return (total / window_divisors(a).astype(x.dtype),)


def _average_backward(a: AveragePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    share = dy / window_divisors(a).astype(dy.dtype)
    if a.kernel == a.size and a.output_size == (1, 1) and not any(a.pad):
        return (np.broadcast_to(share, (*dy.shape[:2], *a.size)).copy(),)
    padded = np.zeros((*dy.shape[:2], *padded_size(a)), dy.dtype)
    for _, at in window_positions(a):
        padded[at] += share
    return (padded[_inside(a)],)


def _max_expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, MaxPool)
    if not (training and e.needs(op.outputs[0])):
        return e.emit("max_pool", a, op.inputs, op.outputs, op.name)
    indexed = MaxPool(a.size, a.kernel, a.stride, a.pad, a.ceil, index=True)
    y = op.outputs[0]
    return e.emit("max_pool", indexed, op.inputs, (y, f"{y}.index"), op.name)[:1]


def _max_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (x,) = op.inputs
    if dys[0] is None or not g.needs(x):
        return (None,)
    return (g.emit("max_pool_backward", op.attributes, (op.outputs[1], dys[0]), x)[0],)


def _average_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (x,) = op.inputs
    if dys[0] is None or not g.needs(x):
        return (None,)
    return (g.emit("avg_pool_backward", op.attributes, (dys[0],), x)[0],)


OPS = (
    OpKind("max_pool", MaxPool, _max_shape, _max, _max_gradient, _max_expand, divisible=True),
    OpKind("max_pool_backward", MaxPool, _max_backward_shape, _max_backward, divisible=True),
    OpKind("avg_pool", AveragePool, _average_shape, _average, _average_gradient, divisible=True),
    OpKind("avg_pool_backward", AveragePool, _average_backward_shape, _average_backward, divisible=True),
)


def _window(builder: LayerBuilder, settings: dict[str, Any], x: str) -> Pool:
    _, _, height, width = image(builder.type(x), "pooling")
    kernel = as_pair(settings["kernel"])
    stride = as_pair(settings["stride"])
    if stride == (0, 0):
        stride = kernel
    a = Pool((height, width), kernel, stride, as_pads(settings["pad"]), settings["ceil"])
    _check(a)
    return a


def _build_max(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    a = _window(builder, settings, inputs[0])
    return builder.emit("max_pool", MaxPool(a.size, a.kernel, a.stride, a.pad, a.ceil), inputs)[0]


def _build_average(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    a = _window(builder, settings, inputs[0])
    pool = AveragePool(a.size, a.kernel, a.stride, a.pad, a.ceil, settings["count_pad"])
    return builder.emit("avg_pool", pool, inputs)[0]


def _build_global(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    _, _, height, width = image(builder.type(inputs[0]), "global_avgpool")
    size = (height, width)
    return builder.emit("avg_pool", AveragePool(size, size, (1, 1)), inputs)[0]


_WINDOW = (
    Parameter("kernel", "pair"),
    Parameter("stride", "pair", 0),
    Parameter("pad", "pads", 0),
)

LAYERS = (
    Layer(
        "maxpool",
        (*_WINDOW, Parameter("ceil", "bool", False)),
        _build_max,
        help="Largest of each window. stride = 0 (the default) means the kernel's size.",
    ),
    Layer(
        "avgpool",
        (*_WINDOW, Parameter("count_pad", "bool", True), Parameter("ceil", "bool", False)),
        _build_average,
        help="Mean of each window. stride = 0 (the default) means the kernel's size.",
    ),
    Layer("global_avgpool", (), _build_global, help="Mean of each channel: [N, C, H, W] becomes [N, C, 1, 1]."),
)

"""Pooling to any size, with PyTorch's windows.

Along an axis of n pixels, window o of `out` reaches from floor(o n / out) to before ceil((o + 1) n / out). If out
divides n, all windows have one size, and plain pooling computes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.pooling import MOST_POSITIONS, AveragePool, MaxPool, average_gradient, max_expand, max_gradient
from mbc.ops.window import Axes, by, by_axis, positive, spatial


@dataclass(frozen=True, slots=True)
class AdaptivePool(Attributes):
    """Pooling from `size` to `output_size`, along one, two or three spatial axes."""

    size: Axes
    output_size: Axes

    def window(self, axis: int, o: int) -> tuple[int, int]:
        """Return the first pixel of window o along an axis, and the pixel after its last."""
        n, out = self.size[axis], self.output_size[axis]
        return o * n // out, -(-(o + 1) * n // out)

    def windows(self) -> Iterator[tuple[tuple[slice | int, ...], tuple[slice, ...]]]:
        """Yield the index of each element of the output, for all rows and channels, and that of its window's pixels."""
        whole = (slice(None), slice(None))
        for place in itertools.product(*map(range, self.output_size)):
            yield (*whole, *place), (*whole, *(slice(*self.window(axis, o)) for axis, o in enumerate(place)))

    @property
    def pixels(self) -> Array:
        """The number of each pixel of the image, row by row."""
        return np.arange(math.prod(self.size), dtype=np.int32).reshape(self.size)


@dataclass(frozen=True, slots=True)
class AdaptiveMaxPool(AdaptivePool):
    """Max pooling; with `index`, also returns the number of the pixel of each maximum (training graphs only)."""

    index: bool = False


def _fit(x: TensorType, before: Axes, after: Axes) -> TensorType:
    rows, channels, size = spatial(x, "adaptive pooling")
    if size != before or len(after) != len(size):
        raise ShapeError(f"{x} is not an image of {by(before)} that becomes one of {by(after)}")
    positive("size", (*before, *after))
    return TensorType((rows, channels, *after), x.dtype)


def _average_shape(a: AdaptivePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_fit(inputs[0], a.size, a.output_size),)


def _average_backward_shape(a: AdaptivePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_fit(inputs[0], a.output_size, a.size),)


def _max_shape(a: AdaptiveMaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y = _fit(inputs[0], a.size, a.output_size)
    if math.prod(a.size) >= 1 << 31:
        raise ShapeError(f"an image of {by(a.size)} has more pixels than an index of 32 bits can number")
    return (y, TensorType(y.shape, DType.INT32)) if a.index else (y,)


def _max_backward_shape(a: AdaptiveMaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    index, dy = inputs
    if index != TensorType(dy.shape, DType.INT32):
        raise ShapeError(f"index {index} does not belong to gradient {dy}")
    return (_fit(dy, a.output_size, a.size),)


def _average(a: AdaptivePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    y = np.empty((*x.shape[:2], *a.output_size), x.dtype)
    for at, pixels in a.windows():
        y[at] = x[pixels].mean(axis=tuple(range(2, x.ndim)), dtype=np.float64)
    return (y,)


def _average_backward(a: AdaptivePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    dx = np.zeros((*dy.shape[:2], *a.size), dy.dtype)
    axes = (slice(None), slice(None), *(None,) * len(a.size))
    for at, pixels in a.windows():
        count = math.prod(part.stop - part.start for part in pixels[2:])
        dx[pixels] += dy[at][axes] / dy.dtype.type(count)
    return (dx,)


def _max(a: AdaptiveMaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the maxima: the first of equal ones wins, and a NaN counts as greater than every number."""
    (x,) = inputs
    y = np.empty((*x.shape[:2], *a.output_size), x.dtype)
    index = np.empty(y.shape, np.int32)
    numbers = a.pixels
    for at, pixels in a.windows():
        flat = x[pixels].reshape(*x.shape[:2], -1)
        first = flat.argmax(axis=2)  # the first NaN, if there is one
        y[at] = np.take_along_axis(flat, first[..., None], axis=2)[..., 0]
        index[at] = numbers[pixels[2:]].reshape(-1)[first]
    return (y, index) if a.index else (y,)


def _max_backward(a: AdaptiveMaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    index, dy = inputs
    dx = np.zeros((*dy.shape[:2], *a.size), dy.dtype)
    numbers, axes = a.pixels, (slice(None), slice(None), *(None,) * len(a.size))
    for at, pixels in a.windows():
        here = index[at][axes] == numbers[pixels[2:]]
        dx[pixels] += np.where(here, dy[at][axes], 0).astype(dy.dtype)
    return (dx,)


OPS = (
    OpKind("adaptive_avg_pool", AdaptivePool, _average_shape, _average, average_gradient, divisible=True),
    OpKind("adaptive_avg_pool_backward", AdaptivePool, _average_backward_shape, _average_backward, divisible=True),
    OpKind("adaptive_max_pool", AdaptiveMaxPool, _max_shape, _max, max_gradient, max_expand, divisible=True),
    OpKind("adaptive_max_pool_backward", AdaptiveMaxPool, _max_backward_shape, _max_backward, divisible=True),
)


def _pooled(builder: LayerBuilder, x: str, setting: Any, largest: bool, what: str) -> str:
    _, _, size = spatial(builder.type(x), what)
    output = by_axis(setting, len(size))
    positive("size", output)
    kernel = tuple(n // count for n, count in zip(size, output, strict=True))
    divided = not any(n % count for n, count in zip(size, output, strict=True))
    if divided and not largest:
        return builder.emit("avg_pool", AveragePool(size, kernel, kernel), (x,))[0]
    if divided and math.prod(kernel) <= MOST_POSITIONS:
        return builder.emit("max_pool", MaxPool(size, kernel, kernel), (x,))[0]
    if largest:
        return builder.emit("adaptive_max_pool", AdaptiveMaxPool(size, output), (x,))[0]
    return builder.emit("adaptive_avg_pool", AdaptivePool(size, output), (x,))[0]


def _layer(name: str, largest: bool, text: str) -> Layer:
    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        return _pooled(builder, inputs[0], settings["size"], largest, name)

    return Layer(name, (Parameter("size", "spatial"),), build, help=text)


def _build_global_max(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _pooled(builder, inputs[0], 1, True, "global_maxpool")


LAYERS = (
    _layer("adaptive_avgpool", False, "Means of windows that cover the image; the result has this size."),
    _layer("adaptive_maxpool", True, "Largest of windows that cover the image; the result has this size."),
    Layer(
        "global_maxpool",
        (),
        _build_global_max,
        help="Largest of each channel over all pixels: [N, C, H, W] becomes [N, C, 1, 1].",
    ),
)

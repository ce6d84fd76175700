"""Pooling to any size, with PyTorch's windows.

Along an axis of n pixels, window o of `out` reaches from floor(o n / out) to before ceil((o + 1) n / out). If out
divides n, all windows have one size, and plain pooling computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.ops.window import Pair, as_pair, image, positive

MOST_POSITIONS = 256  # positions in a window of plain max pooling, which one byte can number


@dataclass(frozen=True, slots=True)
class AdaptivePool(Attributes):
    """Pooling from `size` to `output_size`, both (height, width)."""

    size: Pair
    output_size: Pair

    def window(self, axis: int, o: int) -> tuple[int, int]:
        """Return the first pixel of window o along an axis, and the pixel after its last."""
        n, out = self.size[axis], self.output_size[axis]
        return o * n // out, -(-(o + 1) * n // out)

    def windows(self) -> Iterator[tuple[Pair, tuple[slice, slice]]]:
        """Yield each element of the output and the pixels of its window."""
        for p in range(self.output_size[0]):
            for q in range(self.output_size[1]):
                yield (p, q), (slice(*self.window(0, p)), slice(*self.window(1, q)))


@dataclass(frozen=True, slots=True)
class AdaptiveMaxPool(AdaptivePool):
    """Max pooling; with `index`, also returns the pixel of each maximum, y * width + x (training graphs only)."""

    index: bool = False


def _fit(x: TensorType, before: Pair, after: Pair) -> TensorType:
    rows, channels, *size = image(x, "adaptive pooling")
    if tuple(size) != before:
        raise ShapeError(f"{x} is not an image of {before[0]} x {before[1]}")
    positive("size", (*before, *after))
    return TensorType((rows, channels, *after), x.dtype)


def _average_shape(a: AdaptivePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_fit(inputs[0], a.size, a.output_size),)


def _average_backward_shape(a: AdaptivePool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_fit(inputs[0], a.output_size, a.size),)


def _max_shape(a: AdaptiveMaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y = _fit(inputs[0], a.size, a.output_size)
    return (y, TensorType(y.shape, DType.INT32)) if a.index else (y,)


def _max_backward_shape(a: AdaptiveMaxPool, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    index, dy = inputs
    if index != TensorType(dy.shape, DType.INT32):
        raise ShapeError(f"index {index} does not belong to gradient {dy}")
    return (_fit(dy, a.output_size, a.size),)


def _average(a: AdaptivePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    y = np.empty((*x.shape[:2], *a.output_size), x.dtype)
    for (p, q), (rows, columns) in a.windows():
        y[:, :, p, q] = x[:, :, rows, columns].mean(axis=(2, 3), dtype=np.float64)
    return (y,)


def _average_backward(a: AdaptivePool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    dx = np.zeros((*dy.shape[:2], *a.size), dy.dtype)
    for (p, q), (rows, columns) in a.windows():
        count = (rows.stop - rows.start) * (columns.stop - columns.start)
        dx[:, :, rows, columns] += dy[:, :, p : p + 1, q : q + 1] / dy.dtype.type(count)
    return (dx,)


def _max(a: AdaptiveMaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the maxima: the first of equal ones wins, and a NaN counts as greater than every number."""
    (x,) = inputs
    y = np.empty((*x.shape[:2], *a.output_size), x.dtype)
    index = np.empty(y.shape, np.int32)
    for (p, q), (rows, columns) in a.windows():
        seen = x[:, :, rows, columns]
        width = seen.shape[3]
        flat = seen.reshape(*seen.shape[:2], -1)
        first = flat.argmax(axis=2)  # the first NaN, if there is one
        y[:, :, p, q] = np.take_along_axis(flat, first[..., None], axis=2)[..., 0]
        index[:, :, p, q] = (rows.start + first // width) * a.size[1] + columns.start + first % width
    return (y, index) if a.index else (y,)


def _max_backward(a: AdaptiveMaxPool, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    index, dy = inputs
    dx = np.zeros((*dy.shape[:2], *a.size), dy.dtype)
    pixels = np.arange(a.size[0] * a.size[1], dtype=np.int32).reshape(a.size)
    for (p, q), (rows, columns) in a.windows():
        here = index[:, :, p : p + 1, q : q + 1] == pixels[rows, columns]
        dx[:, :, rows, columns] += np.where(here, dy[:, :, p : p + 1, q : q + 1], 0).astype(dy.dtype)
    return (dx,)


def _average_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (x,) = op.inputs
    if dys[0] is None or not g.needs(x):
        return (None,)
    return g.emit("adaptive_avg_pool_backward", op.attributes, (dys[0],), x)


def _max_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (x,) = op.inputs
    if dys[0] is None or not g.needs(x):
        return (None,)
    return g.emit("adaptive_max_pool_backward", op.attributes, (op.outputs[1], dys[0]), x)


def _max_expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, AdaptiveMaxPool)
    if not (training and e.needs(op.outputs[0])):
        return e.emit(op.kind, a, op.inputs, op.outputs, op.name)
    y = op.outputs[0]
    return e.emit(op.kind, replace(a, index=True), op.inputs, (y, f"{y}.index"), op.name)[:1]


OPS = (
    OpKind("adaptive_avg_pool", AdaptivePool, _average_shape, _average, _average_gradient, divisible=True),
    OpKind("adaptive_avg_pool_backward", AdaptivePool, _average_backward_shape, _average_backward, divisible=True),
    OpKind("adaptive_max_pool", AdaptiveMaxPool, _max_shape, _max, _max_gradient, _max_expand, divisible=True),
    OpKind("adaptive_max_pool_backward", AdaptiveMaxPool, _max_backward_shape, _max_backward, divisible=True),
)


def _pooled(builder: LayerBuilder, x: str, output: Pair, largest: bool, what: str) -> str:
    _, _, height, width = image(builder.type(x), what)
    positive("size", output)
    size = (height, width)
    if height % output[0] or width % output[1]:
        if largest:
            return builder.emit("adaptive_max_pool", AdaptiveMaxPool(size, output), (x,))[0]
        return builder.emit("adaptive_avg_pool", AdaptivePool(size, output), (x,))[0]
    kernel = (height // output[0], width // output[1])
    if not largest:
        return builder.emit("avg_pool", AveragePool(size, kernel, kernel), (x,))[0]
    if kernel[0] * kernel[1] > MOST_POSITIONS:
        return builder.emit("adaptive_max_pool", AdaptiveMaxPool(size, output), (x,))[0]
    return builder.emit("max_pool", MaxPool(size, kernel, kernel), (x,))[0]


def _layer(name: str, largest: bool, text: str) -> Layer:
    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        return _pooled(builder, inputs[0], as_pair(settings["size"]), largest, name)

    return Layer(name, (Parameter("size", "pair"),), build, help=text)


def _build_global_max(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _pooled(builder, inputs[0], (1, 1), True, "global_maxpool")


LAYERS = (
    _layer("adaptive_avgpool", False, "Means of windows that cover the image; the result has (height, width) = size."),
    _layer("adaptive_maxpool", True, "Largest of windows that cover the image; the result has (height, width) = size."),
    Layer("global_maxpool", (), _build_global_max, help="Largest of each channel: [N, C, H, W] becomes [N, C, 1, 1]."),
)

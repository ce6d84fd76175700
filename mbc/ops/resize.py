"""Images in another size: nearest and linear along one to three spatial axes.

Positions are those of PyTorch with `align_corners=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.shape import Upsample, appended, in_planes
from mbc.ops.window import Axes, by, by_axis, positive, spatial

LINEAR = ("linear", "bilinear")  # the second one is the first one's name for two axes


@dataclass(frozen=True, slots=True)
class Resize(Attributes):
    """Settings of a resampling from `size` to `output_size`; `bilinear`: linear along each axis, else nearest."""

    size: Axes
    output_size: Axes
    bilinear: bool

    def taps(self, axis: int) -> tuple[Array, Array, Array]:
        """Return the two pixels around every output position along an axis, and the share of the second.

        The share is a quotient of whole numbers, so that a GPU computes the same bits.
        """
        size, output = self.size[axis], self.output_size[axis]
        position = np.arange(output, dtype=np.int64)
        if not self.bilinear:
            nearest = position * size // output
            return nearest, nearest, np.zeros(output)
        # (position + 1/2) * size / output - 1/2, but not less than 0, in units of 1 / (2 * output).
        at = np.maximum((2 * position + 1) * size - output, 0)
        first = at // (2 * output)
        return first, np.minimum(first + 1, size - 1), at % (2 * output) / (2 * output)


def _shape(a: Resize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_resized(inputs[0], a.size, a.output_size),)


def _backward_shape(a: Resize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_resized(inputs[0], a.output_size, a.size),)


def _resized(x: TensorType, before: Axes, after: Axes) -> TensorType:
    rows, channels, size = spatial(x, "resize")
    if size != before or len(after) != len(size):
        raise ShapeError(f"{x} is not an image of {by(before)} that becomes one of {by(after)}")
    return TensorType((rows, channels, *after), x.dtype)


def _resize(a: Resize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    for axis in range(len(a.size)):
        first, second, share = a.taps(axis)
        share = share.astype(x.dtype).reshape(-1, *(1,) * (len(a.size) - 1 - axis))
        low, high = x.take(first, axis=2 + axis), x.take(second, axis=2 + axis)
        x = np.where(share > 0, low * (1 - share) + high * share, low)
    return (x,)


def _resize_backward(a: Resize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    for axis in range(len(a.size)):
        dx = np.zeros((a.size[axis], *np.moveaxis(dy, 2 + axis, 0).shape[1:]), dy.dtype)
        for line, first, second, share in zip(np.moveaxis(dy, 2 + axis, 0), *a.taps(axis), strict=True):
            dx[first] += line * dy.dtype.type(1 - share)
            if share > 0:
                dx[second] += line * dy.dtype.type(share)
        dy = np.moveaxis(dx, 0, 2 + axis)
    return (np.ascontiguousarray(dy),)


def _gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    (x,) = op.inputs
    if dy is None or not g.needs(x):
        return (None,)
    return (g.emit("resize_backward", op.attributes, (dy,), x)[0],)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, Resize)
    if len(a.size) < 3:
        return e.emit(op.kind, a, op.inputs, op.outputs, op.name)
    (before, *sizes), (after, *outputs) = a.size, a.output_size
    planes = None if sizes == outputs else Resize(tuple(sizes), tuple(outputs), a.bilinear)

    def lines(pixels: int) -> Resize | None:
        return None if before == after else Resize((before, pixels), (after, pixels), a.bilinear)

    return in_planes(e, op, planes, lines, appended(e, op))


OPS = (
    OpKind("resize", Resize, _shape, _resize, _gradient, _expand, divisible=True),
    OpKind("resize_backward", Resize, _backward_shape, _resize_backward, divisible=True),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    _, _, size = spatial(builder.type(inputs[0]), "upsample")
    factor, output = (by_axis(settings[name], len(size)) for name in ("factor", "size"))
    mode = settings["mode"]
    if any(factor) == any(output):
        raise ShapeError("upsample takes either a factor, as in upsample(2), or a size, as in upsample(size=(14, 14))")
    if mode == "bilinear" and len(size) != 2:
        raise ShapeError(f"mode=bilinear is for two spatial axes, not those of {builder.type(inputs[0])}: write linear")
    if not any(output):
        positive("factor", factor)
        output = tuple(n * times for n, times in zip(size, factor, strict=True))
    positive("size", output)
    if mode not in LINEAR and not any(after % before for before, after in zip(size, output, strict=True)):
        factor = tuple(after // before for before, after in zip(size, output, strict=True))
        return builder.emit("upsample", Upsample(factor), inputs)[0]
    return builder.emit("resize", Resize(size, output, mode in LINEAR), inputs)[0]


LAYERS = (
    Layer(
        "upsample",
        (
            Parameter("factor", "spatial", 0),
            Parameter("size", "spatial", 0),
            Parameter("mode", "word", "nearest", ("nearest", *LINEAR)),
        ),
        _build,
        help="Resampling by a whole factor or to a size, as in PyTorch's interpolate with align_corners = false.",
    ),
)

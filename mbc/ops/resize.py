"""Images in another size along one to three spatial axes: nearest, linear, and along two axes bicubic.

Positions are those of PyTorch's `interpolate` in float64. They are quotients of whole numbers, so that a GPU computes
the same bits. Where a position lies on the border of two pixels, PyTorch in float32 sometimes rounds it and takes the
neighbouring pixel.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.optional import optional
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.shape import Upsample, appended, in_planes
from mbc.ops.window import Axes, by, by_axis, each_axis, positive, spatial

LINEAR = ("linear", "bilinear")  # the second one is the first one's name for two axes
EXACT, CUBIC = "nearest_exact", "bicubic"
# PyTorch leaves the factor out where an axis keeps its size, and nearest also where the size doubles.
KEPT: Mapping[str, tuple[int, ...]] = {"nearest": (1, 2), EXACT: (), CUBIC: ()}
_FINEST = 10**7  # largest divisor of a factor; nearer fractions would not change the rounded result
_A = -0.75  # coefficient of PyTorch's cubic (Keys, 1981)


@dataclass(frozen=True, slots=True)
class Resize(Attributes):
    """Settings of a resampling from `size` to `output_size`.

    Attributes:
        bilinear: Linear along each axis; else nearest, or what `method` says.
        method: `nearest_exact`, which rounds the centre of a pixel, or `bicubic`.
        corners: The centres of the outermost pixels are aligned, not the edges of the images.
        scale: For each axis a numerator and a denominator: pixels of the input for one of the output. Empty: those of
            `size` and `output_size`.
    """

    size: Axes
    output_size: Axes
    bilinear: bool
    method: str = optional("")
    corners: bool = optional(False)
    scale: tuple[int, ...] = optional(())

    @property
    def pixels(self) -> int:
        """Number of neighbouring pixels along an axis that a position reads."""
        return 4 if self.method == CUBIC else 1 + self.bilinear

    def positions(self, axis: int) -> tuple[int, int, int]:
        """Return step, offset and unit: position o of the output is pixel (step * o + offset) / unit of the input."""
        size, output = self.size[axis], self.output_size[axis]
        if self.corners:
            return (size - 1) * (output > 1), 0, max(output - 1, 1)
        across, pixels = self.scale[2 * axis : 2 * axis + 2] or (size, output)
        if self.pixels > 1:
            return 2 * across, across - pixels, 2 * pixels
        return (2 * across, across, 2 * pixels) if self.method == EXACT else (across, 0, pixels)

    def taps(self, axis: int, dtype: Any = np.float64) -> tuple[Array, Array]:
        """Return the pixels that every output position along an axis reads, and their weights: [pixels, output]."""
        step, offset, unit = self.positions(axis)
        at = step * np.arange(self.output_size[axis], dtype=np.int64) + offset
        first, rest = np.divmod(np.maximum(at, 0) if self.bilinear else at, unit)
        share = (rest / unit).astype(dtype)
        weights = [np.ones_like(share)]
        if self.bilinear:
            weights = [1 - share, share]
        elif self.method == CUBIC:
            weights = [_far(share + 1), _near(share), _near(1 - share), _far(2 - share)]
        reach = (np.arange(len(weights)) - (len(weights) - 1) // 2)[:, None]
        return np.clip(first + reach, 0, self.size[axis] - 1), np.stack(weights)

    def along(self, axes: slice, *kept: int) -> Resize | None:
        """Return the settings along some axes and a further one of `kept` pixels; None if they change nothing."""
        scale = tuple(zip(self.scale[::2], self.scale[1::2], strict=True))[axes]
        part = replace(
            self,
            size=(*self.size[axes], *kept),
            output_size=(*self.output_size[axes], *kept),
            scale=sum(scale, ()) + (1, 1) * len(kept) * bool(scale),
        )
        return None if part.size == part.output_size and all(a == b for a, b in scale) else part


def _near(x: Array) -> Array:
    """Return the weight of a pixel at most 1 away, by Keys' cubic."""
    return ((_A + 2) * x - (_A + 3)) * x * x + 1


def _far(x: Array) -> Array:
    """Return the weight of a pixel 1 to 2 away, by Keys' cubic."""
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A


def _shape(a: Resize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_resized(a, inputs[0], a.size, a.output_size),)


def _backward_shape(a: Resize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_resized(a, inputs[0], a.output_size, a.size),)


def _resized(a: Resize, x: TensorType, before: Axes, after: Axes) -> TensorType:
    rows, channels, size = spatial(x, "resize")
    if size != before or len(after) != len(size):
        raise ShapeError(f"{x} is not an image of {by(before)} that becomes one of {by(after)}")
    if a.method not in ("", EXACT, CUBIC) or (a.method and a.bilinear) or (a.corners and a.pixels == 1):
        raise ShapeError(f"there is no resampling {a.method} with bilinear {a.bilinear} and corners {a.corners}")
    if a.scale and (len(a.scale) != 2 * len(size) or min(a.scale) < 1):
        raise ShapeError(f"scale is {a.scale}, which are not two numbers above 0 for each axis of {by(size)}")
    for axis, n in enumerate(a.size):
        step, offset, unit = a.positions(axis)
        if step * (a.output_size[axis] - 1) + offset >= n * unit:
            raise ShapeError(f"a resampling by {a.scale} from {by(a.size)} to {by(a.output_size)} reads outside")
    return TensorType((rows, channels, *after), x.dtype)


def resampled(a: Resize, x: Array, axis: int, leading: int = 2) -> Array:
    """Return an array that is resized along one axis; `leading` axes come before those of the image."""
    pixels, weights = a.taps(axis, x.dtype)
    weights = weights.reshape(*weights.shape, *(1,) * (x.ndim - 1 - leading - axis))
    # An infinite pixel must not count if its weight is 0.
    parts = (np.where(w != 0, x.take(at, axis=leading + axis) * w, 0) for at, w in zip(pixels, weights, strict=True))
    return sum(parts, start=np.zeros((), x.dtype))


def _resize(a: Resize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    for axis in range(len(a.size)):
        x = resampled(a, x, axis)
    return (x,)


def _resize_backward(a: Resize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    for axis in range(len(a.size)):
        dx = np.zeros((a.size[axis], *np.moveaxis(dy, 2 + axis, 0).shape[1:]), dy.dtype)
        at, weights = a.taps(axis, dy.dtype)
        for line, pixels, shares in zip(np.moveaxis(dy, 2 + axis, 0), at.T, weights.T, strict=True):
            for pixel, share in zip(pixels, shares, strict=True):
                if share != 0:
                    dx[pixel] += line * share
        dy = np.moveaxis(dx, 0, 2 + axis)
    return (np.ascontiguousarray(dy),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit("resize_backward", op.attributes, (dy,), *op.inputs)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, Resize)
    if len(a.size) < 3:
        return e.emit(op.kind, a, op.inputs, op.outputs, op.name)
    return in_planes(e, op, a.along(slice(1, 3)), lambda pixels: a.along(slice(0, 1), pixels), appended(e, op))


OPS = (
    OpKind("resize", Resize, _shape, _resize, _gradient, _expand, divisible=True),
    OpKind("resize_backward", Resize, _backward_shape, _resize_backward, divisible=True),
)


def resampling(
    mode: str, size: Axes, output: Axes = (), factor: tuple[float, ...] = (), corners: bool = False
) -> Resize:
    """Return the settings of the layer `upsample` for a size, or for factors."""
    if factor:
        output = tuple(math.floor(n * times) for n, times in zip(size, factor, strict=True))
    scale = _scale(mode, size, factor) if factor and not corners else ()
    return Resize(size, output, mode in LINEAR, mode if mode in (EXACT, CUBIC) else "", corners, scale)


def _scale(mode: str, size: Axes, factor: tuple[float, ...]) -> Axes:
    """Return the setting `scale` for factors; empty where the sizes say as much."""
    parts = [Fraction(times).limit_denominator(_FINEST) for times in factor]
    sizes = [(n, math.floor(n * times)) for n, times in zip(size, factor, strict=True)]
    exact = [
        after == n * times or after in (n * k for k in KEPT.get(mode, (1,)))
        for (n, after), times in zip(sizes, factor, strict=True)
    ]
    pairs = zip(exact, sizes, parts, strict=True)
    pairs = (pair if whole else (part.denominator, part.numerator) for whole, pair, part in pairs)
    return () if all(exact) else tuple(itertools.chain(*pairs))


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, mode, corners = builder.type(inputs[0]), settings["mode"], settings["align_corners"]
    _, _, size = spatial(x, "upsample")
    factor, output = each_axis(settings["factor"], len(size)), by_axis(settings["size"], len(size))
    if any(factor) == any(output):
        raise ShapeError("upsample takes either a factor, as in upsample(2), or a size, as in upsample(size=(14, 14))")
    if mode in (LINEAR[1], CUBIC) and len(size) != 2:
        raise ShapeError(f"mode={mode} is for two spatial axes, not those of {x}: write linear")
    if corners and mode not in (*LINEAR, CUBIC):
        raise ShapeError(f"align_corners is for mode=linear and mode=bicubic, not for mode={mode}: leave it out")
    if any(factor) and min(factor) <= 0:
        raise ShapeError(f"factor is {factor[0] if len({*factor}) == 1 else factor}, but must be positive")
    a = resampling(mode, size, output, factor if any(factor) else (), corners)
    positive("size", a.output_size)
    if a.pixels == 1 and not a.scale and not any(map(operator.mod, a.output_size, size)):
        factors = tuple(after // before for before, after in zip(size, a.output_size, strict=True))
        return builder.emit("upsample", Upsample(factors), inputs)[0]
    return builder.emit("resize", a, inputs)[0]


LAYERS = (
    Layer(
        "upsample",
        (
            Parameter("factor", "factors", 0),
            Parameter("size", "spatial", 0),
            Parameter("mode", "word", "nearest", ("nearest", EXACT, *LINEAR, CUBIC)),
            Parameter("align_corners", "bool", False),
        ),
        _build,
        help="Resampling by a factor, such as 2 or 0.75, or to a size, as in PyTorch's interpolate.",
    ),
)

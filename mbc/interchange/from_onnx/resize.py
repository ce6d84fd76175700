"""Resize: the weight of each pixel of the input in each pixel of the result, axis by axis, as ONNX defines it.

If the weights are those of the language's `upsample`, the result is that layer. Otherwise the result is a product with
the matrix of the weights: a convolution with frozen filters of one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.program import Array
from mbc.ops.resize import CUBIC, EXACT, Resize, resampling
from mbc.ops.window import MOST_AXES

_HALF = Fraction(1, 2)
_LARGEST = 1 << 22  # most elements of a matrix of weights
_ROUNDED = Refused("rounding decides which of two pixels is nearest", "resize to a size, or by a whole factor")
_CONTRADICTION = "its size and its scale differ, and its coordinates depend on both"
# Operations of PyTorch, modes of `upsample`, and further arguments; the last two are for two axes.
_LAYERS: Sequence[tuple[str, str, Mapping[str, bool]]] = (
    ("upsample_nearest", "nearest", {}),
    ("_upsample_nearest_exact", EXACT, {}),
    ("upsample_{}", "linear", {"align_corners": False}),
    ("upsample_{}", "linear", {"align_corners": True}),
    ("upsample_bicubic", CUBIC, {"align_corners": False}),
    ("upsample_bicubic", CUBIC, {"align_corners": True}),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis that is resized: its sizes, the scale, and the part of the input that `tf_crop_and_resize` takes."""

    size: int
    output: int
    scale: Fraction
    roi: tuple[Fraction, Fraction] = (Fraction(0), Fraction(1))

    def origin(self, mode: str, x: int) -> Fraction:
        """Return the coordinate in the input of pixel `x` of the result.

        Raises:
            Refused: The mode is not supported, or the size and the scale contradict each other.
        """
        n, m, s = self.size, self.output, self.scale
        if mode == "pytorch_half_pixel" and m == 1:
            return Fraction(0)
        if mode in ("half_pixel", "pytorch_half_pixel"):
            return (x + _HALF) / s - _HALF
        if mode == "half_pixel_symmetric":
            return Fraction(n, 2) * (1 - m / (s * n)) + (x + _HALF) / s - _HALF
        if mode == "asymmetric":
            return x / s
        if mode == "tf_half_pixel_for_nn":
            return (x + _HALF) / s
        if s * n != m:
            raise Refused(_CONTRADICTION, "give it sizes, or scales that give whole sizes")
        if mode == "align_corners":
            return Fraction(x * (n - 1), m - 1) if m > 1 else Fraction(0)
        if mode == "tf_crop_and_resize":
            start, end = self.roi
            return (start + (x * (end - start) / (m - 1) if m > 1 else (end - start) / 2)) * (n - 1)
        raise Refused(f"its coordinates are those of {mode}", "use coordinate_transformation_mode='half_pixel'")


@dataclass(frozen=True, slots=True)
class Method:
    """How pixels are mixed: the attributes of the operator."""

    mode: str
    coordinates: str
    rounding: str
    cubic: float
    antialias: bool
    exclude_outside: bool

    def shares(self, axis: Axis) -> Array:
        """Return the matrix of weights [output, size].

        The row of a pixel outside of the input (`tf_crop_and_resize`) is 0.
        """
        matrix = np.zeros((axis.output, axis.size))
        for x in range(axis.output):
            at = axis.origin(self.coordinates, x)
            if self.coordinates == "tf_crop_and_resize" and not 0 <= at <= axis.size - 1:
                continue
            pixels, weights = self._taps(at, axis.scale)
            inside = (pixels >= 0) & (pixels < axis.size)
            if self.exclude_outside:
                weights = np.where(inside, weights, 0.0)
                total = weights.sum()
                weights = weights / (total if total else 1.0)
            np.add.at(matrix[x], pixels.clip(0, axis.size - 1), weights)
        return matrix

    def _taps(self, at: Fraction, scale: Fraction) -> tuple[Array, Array]:
        """Return the pixels around a coordinate, also pixels outside of the input, and their weights."""
        if self.mode == "nearest":
            return np.array([self._nearest(at)]), np.ones(1)
        reach = 1 if self.mode == "linear" else 2
        wide = min(scale, Fraction(1)) if self.antialias else Fraction(1)
        first = math.floor(at - reach / wide) + 1
        pixels = np.arange(first, math.ceil(at + reach / wide))
        weights = np.array([self._weight(abs(float((int(p) - at) * wide))) for p in pixels])
        return pixels, weights / weights.sum()

    def _nearest(self, at: Fraction) -> int:
        rounding = self.rounding
        if rounding == "round_prefer_floor":
            return math.ceil(at - _HALF)
        if rounding == "round_prefer_ceil":
            return math.floor(at + _HALF)
        return math.floor(at) if rounding == "floor" else math.ceil(at)

    def _weight(self, x: float) -> float:
        """Return the weight of a pixel at a distance, by a triangle or by Keys' cubic."""
        if self.mode == "linear":
            return max(1.0 - x, 0.0)
        a = self.cubic
        if x <= 1:
            return ((a + 2) * x - (a + 3)) * x * x + 1
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def _scales(op: Operator, axes: tuple[int, ...]) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """Return the scale of each axis twice: as shortest decimals, and as the exact numbers of the file."""
    before, after = op.sizes(), op.result
    policy = op.text("keep_aspect_ratio_policy", "stretch")
    given = op.constant(2, "'scales'")
    if given is not None and given.size:
        op.ignore("keep_aspect_ratio_policy")  # the policy is for sizes
        shortest = tuple(Fraction(str(value)) for value in given.reshape(-1))
        return shortest, tuple(Fraction(float(value)) for value in given.reshape(-1))
    sizes = op.ints("sizes", 3) or ()
    if policy == "stretch":
        scales = tuple(Fraction(after[axis], before[axis]) for axis in axes)
    else:
        choose = min if policy == "not_larger" else max
        scales = (choose(Fraction(size, before[axis]) for size, axis in zip(sizes, axes, strict=True)),) * len(axes)
    return scales, scales


def _axes(op: Operator) -> tuple[Mapping[int, Axis], Mapping[int, Axis]]:
    before, after = op.sizes(), op.result
    rank = len(before)
    axes = tuple(axis % rank for axis in op.ints("axes") or range(rank))
    roi = [Fraction(0)] * len(axes) + [Fraction(1)] * len(axes)
    if op.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        given = op.constant(1, "'roi'")
        if given is None or given.size != len(roi):
            raise Refused("its 'roi' is missing", "export the model again")
        roi = [Fraction(str(value)) for value in given.reshape(-1)]
    else:
        op.ignore(1, "extrapolation_value")  # only tf_crop_and_resize uses them
    regions = list(zip(roi[: len(axes)], roi[len(axes) :], strict=True))
    ways: list[Mapping[int, Axis]] = []
    for scales in _scales(op, axes):
        if len(scales) != len(axes) or min(scales) <= 0:
            raise Refused("its scales are not one above 0 for each axis", "export the model again")
        rows = zip(axes, scales, regions, strict=True)
        ways.append({axis: Axis(before[axis], after[axis], scale, region) for axis, scale, region in rows})
    return ways[0], ways[1]


def _resize(op: Operator) -> None:
    method = Method(
        op.text("mode", "nearest"), op.text("coordinate_transformation_mode", "half_pixel"),
        op.text("nearest_mode", "round_prefer_floor"), op.real("cubic_coeff_a", -0.75),
        bool(op.integer("antialias", 0)), bool(op.integer("exclude_outside", 0)),
    )  # fmt: skip
    shares = _all_shares(op, method)
    if 0 in shares:
        raise Refused("it resizes dimension 0, the samples", "keep the samples of a mini-batch apart")
    if _as_layer(op, shares):
        return
    x = Expression.of(op)
    for axis, matrix in shares.items():
        x = x.times_matrix(axis, matrix)
    _filled(op, x, shares).give()


def _filled(op: Operator, x: Expression, shares: Mapping[int, Array]) -> Expression:
    """Return the tensor with `extrapolation_value` at the pixels outside of the input."""
    number = op.real("extrapolation_value", 0.0)
    inside = np.ones((1,) * len(x.shape), bool)
    for axis, matrix in shares.items():
        inside = inside & matrix.any(1).reshape(-1, *(1,) * (len(x.shape) - axis - 1))
    return x if number == 0.0 or inside.all() else x + x.constant("outside", np.where(inside, 0.0, number))


def _all_shares(op: Operator, method: Method) -> dict[int, Array]:
    """Return the matrix of weights of each axis that changes.

    Raises:
        Refused: The mode is not supported, an axis is too long, or rounding would choose the nearest pixel.
    """
    if method.mode not in ("nearest", "linear", "cubic"):
        raise Refused(f"its mode is {method.mode}", "use mode='linear'")
    shares: dict[int, Array] = {}
    ways = _axes(op)
    for axis in ways[0]:
        if max(ways[0][axis].size, 1) * ways[0][axis].output > _LARGEST:
            raise Refused("its axes are too long", "resize smaller images")
        matrix, exact = (method.shares(way[axis]) for way in ways)
        if method.mode == "nearest" and not np.array_equal(matrix, exact):
            raise _ROUNDED
        if not np.array_equal(matrix, np.eye(len(matrix))):
            shares[axis] = matrix
    return shares


def _as_layer(op: Operator, shares: Mapping[int, Array]) -> bool:
    """Return whether the layer `upsample` has these weights; if it has, write the layer."""
    (before, after), scales = (op.sizes()[2:], op.result[2:]), _axes(op)[0]
    rank = len(before)
    if not 1 <= rank <= MOST_AXES or min(shares, default=2) < 2:
        return False
    factors = tuple(float(scales[axis].scale) if axis in scales else 1.0 for axis in range(2, 2 + rank))
    for layer, mode, more in _LAYERS[: 4 if rank != 2 else None]:
        by_size = resampling(mode, before, after, corners=any(more.values()))
        for a in (by_size, resampling(mode, before, factor=factors, corners=by_size.corners)):
            said = {"scale_factors": factors} if a.scale else {"output_size": after}
            if a.output_size == after and all(
                np.allclose(shares.get(axis, np.eye(n)), _matrix(a, axis - 2), atol=1e-6)
                for axis, n in enumerate(before, 2)
            ):
                name = layer.format(("", "linear", "bilinear", "trilinear")[rank])
                op.emit(f"aten.{name}{rank}d.vec", input=op.tensor(), **said, **more)
                return True
    return False


def _matrix(a: Resize, axis: int) -> Array:
    """Return the weights [output, size] of a layer."""
    matrix, (pixels, weights) = np.zeros((a.output_size[axis], a.size[axis])), a.taps(axis)
    np.add.at(matrix, (np.arange(len(matrix)), pixels), weights)
    return matrix


RULES: Mapping[str, Rule] = {"Resize": _resize}
NOT_TAKEN: Mapping[str, str] = {}

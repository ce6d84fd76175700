"""Operations that move elements of tensors: permutations of axes or their factors, slices, padding, splits.

Three index maps implement them: `rearrange` permutes factors of axes, `strided_slice` reads a window with one number
around the input, `pad` reads elements outside the input from inside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.optional import optional
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, NoAttributes, OpKind, ShapeError
from mbc.ops.framework_calls import Calls

Shape = tuple[int, ...]
PAD_MODES = ("replicate", "reflect")
WRAP = "wrap"


@dataclass(frozen=True, slots=True)
class Rearrange(Attributes):
    """A permutation of factors of axes.

    Each axis of a row is divided into `factors`, the outermost first. All factors are put into `order`. Then `merged`
    says how many consecutive factors become each axis of the result.
    """

    factors: tuple[Shape, ...]
    order: Shape
    merged: Shape

    @property
    def flat(self) -> Shape:
        """The factors of all axes."""
        return tuple(itertools.chain(*self.factors))

    @property
    def permuted(self) -> tuple[Shape, ...]:
        """The factors of each axis of the result."""
        sizes = iter([self.flat[i] for i in self.order])
        return tuple(tuple(itertools.islice(sizes, count)) for count in self.merged)

    @property
    def inverse(self) -> Rearrange:
        """The inverse permutation."""
        back = tuple(self.order.index(i) for i in range(len(self.order)))
        return Rearrange(self.permuted, back, tuple(map(len, self.factors)))


@dataclass(frozen=True, slots=True)
class StridedSlice(Attributes):
    """A slice of rows of `size`, in every axis.

    Element o of the result, of `count`, is element (start + step * o) / spread of the input if that is a whole number
    and inside, and `outside` otherwise. A slice has spread 1; its gradient spreads the elements over those that the
    slice skipped; padding starts before 0.
    """

    size: Shape
    start: Shape
    step: Shape
    spread: Shape
    count: Shape
    value: float = optional(0.0)
    infinite: int = optional(0)

    @property
    def outside(self) -> float:
        """The number around the input: `infinite` times infinity where that is not 0, else `value`."""
        return self.infinite * math.inf if self.infinite else self.value

    @property
    def adjoint(self) -> StridedSlice:
        """The slice that computes the gradient."""
        return StridedSlice(self.count, tuple(-s for s in self.start), self.spread, self.step, self.size)


@dataclass(frozen=True, slots=True)
class Pad(Attributes):
    """Padding of rows of `size` in every axis, by `before` and `after` elements.

    With replicate, the new elements are the outermost element; with reflect, they are the elements beside it, mirrored.
    With wrap, they are those of the other side. There `before` may also be the negative of `after`, and the elements go
    round.
    """

    mode: str
    size: Shape
    before: Shape
    after: Shape

    @property
    def rolls(self) -> bool:
        """True if the elements go round, and none is added."""
        return self.mode == WRAP and not any(map(sum, zip(self.before, self.after, strict=True)))

    def sources(self, axis: int) -> Array:
        """Return the element of the input for each element of the result along an axis."""
        n = self.size[axis]
        at = np.arange(n + self.before[axis] + self.after[axis]) - self.before[axis]
        if self.mode == WRAP:
            return at % n
        if self.mode == "replicate":
            return at.clip(0, n - 1)
        return n - 1 - abs(n - 1 - abs(at))


@dataclass(frozen=True, slots=True)
class Split(Attributes):
    """Settings of a split into parts of these numbers of channels."""

    sizes: Shape


def _row_of(x: TensorType, size: Shape, what: str) -> None:
    if x.shape[1:] != size:
        raise ShapeError(f"{what} is for rows of {size}, but got {x}")


def _rearrange_shape(a: Rearrange, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    _row_of(x, tuple(map(math.prod, a.factors)), "a permutation")
    if sorted(a.order) != list(range(len(a.flat))) or sum(a.merged) != len(a.flat):
        raise ShapeError(f"{a.order} is not an order of {len(a.flat)} factors that {a.merged} merges")
    return (TensorType((x.shape[0], *map(math.prod, a.permuted)), x.dtype),)


def _slice_shape(a: StridedSlice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    _row_of(x, a.size, "a slice")
    if {len(part) for part in (a.start, a.step, a.spread, a.count)} != {len(a.size)}:
        raise ShapeError(f"a slice of {x} does not have as many starts, steps and counts as a row has axes")
    if min((*a.step, *a.spread, *a.count), default=1) < 1:
        raise ShapeError(f"steps {a.step} and counts {a.count} of a slice must be positive")
    if not math.isfinite(a.value) or a.infinite not in (-1, 0, 1):
        raise ShapeError(f"around a slice there is no number {a.value}, infinite {a.infinite}")
    return (TensorType((x.shape[0], *a.count), x.dtype),)


def _padded(a: Pad, dtype_of: TensorType, rows: int) -> TensorType:
    if a.mode not in (*PAD_MODES, WRAP) or not len(a.size) == len(a.before) == len(a.after):
        raise ShapeError(f"there is no padding {a.mode} of {a.before} and {a.after}")
    for n, before, after in zip(a.size, a.before, a.after, strict=True):
        if a.rolls:
            if abs(before) >= n:
                raise ShapeError(f"{n} elements cannot go round by {before} and {after}")
            continue
        most = {"reflect": n - 1, WRAP: n}.get(a.mode, max(before, after))
        if min(before, after) < 0 or max(before, after) > most:
            mode = "circular" if a.mode == WRAP else a.mode
            raise ShapeError(f"{n} elements cannot be padded by {before} and {after} ({mode})")
    shape = tuple(map(sum, zip(a.size, a.before, a.after, strict=True)))
    return TensorType((rows, *shape), dtype_of.dtype)


def _pad_shape(a: Pad, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    _row_of(x, a.size, "padding")
    return (_padded(a, x, x.shape[0]),)


def _pad_backward_shape(a: Pad, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (dy,) = inputs
    if dy != _padded(a, dy, dy.shape[0]):
        raise ShapeError(f"gradient {dy} does not belong to rows of {a.size} padded by {a.before} and {a.after}")
    return (TensorType((dy.shape[0], *a.size), dy.dtype),)


def _split_shape(a: Split, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (x,) = inputs
    if len(x.shape) < 2 or min(a.sizes, default=0) < 1 or sum(a.sizes) != x.shape[1]:
        raise ShapeError(f"{x} cannot be split into parts of {', '.join(map(str, a.sizes))} channels")
    return tuple(TensorType((x.shape[0], size, *x.shape[2:]), x.dtype) for size in a.sizes)


def _rearrange(a: Rearrange, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    moved = x.reshape(x.shape[0], *a.flat).transpose(0, *(1 + i for i in a.order))
    return (moved.reshape(x.shape[0], *map(math.prod, a.permuted)),)


def _slice(a: StridedSlice, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    for axis, (start, step, spread, count) in enumerate(zip(a.start, a.step, a.spread, a.count, strict=True), 1):
        at, rest = np.divmod(start + step * np.arange(count), spread)
        inside = (rest == 0) & (at >= 0) & (at < x.shape[axis])
        shape = (-1, *(1,) * (x.ndim - 1 - axis))
        x = np.where(inside.reshape(shape), x.take(np.where(inside, at, 0), axis=axis), a.outside).astype(x.dtype)
    return (x,)


def _pad(a: Pad, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    for axis in range(len(a.size)):
        x = x.take(a.sources(axis), axis=axis + 1)
    return (x,)


def _pad_backward(a: Pad, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    for axis, size in enumerate(a.size):
        moved = np.moveaxis(dy, axis + 1, 0)
        dx = np.zeros((size, *moved.shape[1:]), dy.dtype)
        np.add.at(dx, a.sources(axis), moved)
        dy = np.moveaxis(dx, 0, axis + 1)
    return (np.ascontiguousarray(dy),)


def _split(a: Split, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    ends = tuple(itertools.accumulate(a.sizes))
    return tuple(inputs[0][:, end - size : end].copy() for size, end in zip(a.sizes, ends, strict=True))


def _rearrange_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    assert isinstance(op.attributes, Rearrange)
    return g.emit("rearrange", op.attributes.inverse, (dy,), *op.inputs)


def _slice_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    assert isinstance(op.attributes, StridedSlice)
    return g.emit("strided_slice", op.attributes.adjoint, (dy,), *op.inputs)


def _pad_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, Pad)
    if a.rolls:  # the gradient rolls back
        return g.emit("pad", Pad(WRAP, a.size, a.after, a.before), (dy,), *op.inputs)
    return g.emit("pad_backward", op.attributes, (dy,), *op.inputs)


def _split_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a, (x,) = op.attributes, op.inputs
    assert isinstance(a, Split)
    dys = [g.of_output(y) for y in op.outputs]
    gradients = [dy for dy in dys if dy is not None]
    if len(gradients) == len(dys):
        return g.emit("concat", NoAttributes(), gradients, x)
    # Parts on which nothing depends have the gradient zero.
    total, start = "", 0
    for number, (part_dy, size) in enumerate(zip(dys, a.sizes, strict=True)):
        if part_dy is not None:
            last = all(later is None for later in dys[number + 1 :])
            part = channels(g.type(x).shape[1:], start, size).adjoint
            (wide,) = g.emit("strided_slice", part, (part_dy,), *((x,) if last and not total else ()))
            total = g.emit("add", NoAttributes(), (total, wide), *((x,) if last else ()))[0] if total else wide
        start += size
    return (total,)


def channels(size: Shape, start: int, count: int, axis: int = 0, step: int = 1) -> StridedSlice:
    """Return a slice along one axis of rows of this size."""

    def of(value: int, others: Sequence[int]) -> Shape:
        return tuple(value if number == axis else other for number, other in enumerate(others))

    ones = (1,) * len(size)
    return StridedSlice(size, of(start, (0,) * len(size)), of(step, ones), ones, of(count, size))


OPS = (
    OpKind("rearrange", Rearrange, _rearrange_shape, _rearrange, _rearrange_gradient, divisible=True),
    OpKind(
        "strided_slice",
        StridedSlice,
        _slice_shape,
        _slice,
        _slice_gradient,
        divisible=True,
        reads=lambda a, inputs: (min(1.0, math.prod(a.count) / math.prod(a.size)),),
    ),
    OpKind("pad", Pad, _pad_shape, _pad, _pad_gradient, divisible=True),
    OpKind("pad_backward", Pad, _pad_backward_shape, _pad_backward, divisible=True),
    OpKind(
        "split", Split, _split_shape, _split, _split_gradient, divisible=True, calls=Calls("torch.split(x, sizes, 1)")
    ),
)
LAYERS: tuple[Layer, ...] = ()

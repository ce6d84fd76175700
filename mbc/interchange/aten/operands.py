"""What stands for a tensor of the program while it is translated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mbc.interchange.program import Array, Held


class Refused(Exception):
    """An operation that cannot be taken: why, and what would do instead."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis: index i of the axis has index i // stride % size of the factor."""

    axis: int
    stride: int
    size: int


Axes = tuple[tuple[Atom, ...], ...]


class Order(Enum):
    """Views that keep all elements and need no numbers to say how.

    `FLAT` regards [N, C, H, W] as [N, C * H * W], `CHANNELS_LAST` as [N, H, W, C]; `GATE` regards [N, C] as
    [N, C, 1, 1].
    """

    PLAIN = "plain"
    FLAT = "flat"
    CHANNELS_LAST = "channels_last"
    GATE = "gate"


PLAIN, FLAT, CHANNELS_LAST, GATE = Order.PLAIN, Order.FLAT, Order.CHANNELS_LAST, Order.GATE


@dataclass(frozen=True, slots=True)
class Padded:
    """The view of an image with zeros, or another number, around it: `pad` is (top, bottom, left, right)."""

    pad: tuple[int, int, int, int]
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Expanded:
    """The view of a tensor repeated up to `shape`, which operators do by themselves."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factored:
    """The view of a tensor by the factors of its axes, in any order (`mbc.interchange.aten.factors`).

    `picks` are factors of which one element each is taken; all elements are multiplied by `factor`.
    """

    axes: Axes
    picks: tuple[tuple[Atom, int], ...] = ()
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(atom.size for atom in axis) for axis in self.axes)


View = Order | Padded | Expanded | Factored


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor of the network: value number, the value's own shape, and how the program regards it.

    A view costs nothing until a layer needs the bytes so. It is one immutable thing: a rule carries it on whole, or
    replaces it whole.
    """

    value: int
    shape: tuple[int, ...]
    view: View = PLAIN

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape that the program sees."""
        if isinstance(self.view, Expanded | Factored):
            return self.view.shape
        if isinstance(self.view, Padded):
            top, bottom, left, right = self.view.pad
            return (*self.shape[:2], self.shape[2] + top + bottom, self.shape[3] + left + right)
        if self.view is FLAT:
            return (self.shape[0], math.prod(self.shape[1:]))
        if self.view is CHANNELS_LAST:
            return (self.shape[0], *self.shape[2:], self.shape[1])
        return (*self.shape, 1, 1) if self.view is GATE else self.shape

    @property
    def is_pending(self) -> bool:
        """Whether the view stands for work that is still to be done: zeros around, repetition, parts, a factor."""
        if isinstance(self.view, Factored):
            return bool(self.view.picks) or self.view.factor != 1.0
        return isinstance(self.view, Padded | Expanded)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant, regarded in some shape."""

    held: Held
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A parameter times a number: the gains of standardised filters."""

    weight: Weight
    factor: float


@dataclass(frozen=True, slots=True)
class Computed:
    """What is computed of parameters alone: the value [1, *shape] (`mbc.interchange.aten.parameters`)."""

    value: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Standardized:
    """Filters, regarded in some shape: each less its mean and over its deviation, with `eps` added to the variance, and
    times its `gain`."""

    weight: Weight
    shape: tuple[int, ...]
    eps: float
    gain: Scaled | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Numbers that do not depend on the input. With `weight`, the array holds indices into the flattened parameter."""

    array: Array
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Products of query and key, [N * windows, heads, T, S], that become attention once they are multiplied by the
    values: never computed by themselves. `bias`: what was added. `shares`: softmax was taken."""

    query: Activation
    key: Activation
    shape: tuple[int, ...]
    bias: tuple[Known, ...] = ()
    shares: bool = False


@dataclass(frozen=True, slots=True)
class Noise:
    """Random ones and zeros, one with probability `keep`, times `scale`: a part of stochastic depth.

    `source` names the tensor of the program that was drawn.
    """

    source: str
    shape: tuple[int, ...]
    keep: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Unknown:
    """What an operation gave that could not be taken: whatever depends on it is passed over."""


@dataclass(frozen=True, slots=True)
class Untaken:
    """A result that nothing can use, such as the positions of maxima: why, and what would do instead."""

    reason: str
    remedy: str


UNKNOWN = Unknown()
Operand = Activation | Weight | Computed | Scaled | Standardized | Known | Scores | Noise | Unknown | Untaken
Result = Operand | tuple[Operand, ...]


def shape_of(operand: Operand | None) -> tuple[int, ...] | None:
    """Return the shape that the program sees of an operand; None for what stands for no tensor."""
    if isinstance(operand, Activation):
        return operand.seen
    if isinstance(operand, Known):
        return operand.array.shape
    if isinstance(operand, Scaled):
        return operand.weight.shape
    return None if operand is None or isinstance(operand, Unknown | Untaken) else operand.shape


SLICE_ARGUMENTS = ("start", "end", "step")


def indices_of(size: int, start: int | None, end: int | None, step: int | None) -> range:
    """Return the indices that a slice takes along a dimension of `size` elements; None stands for what is left out."""
    return range(*slice(start, end, step).indices(size))


def as_setting(values: Sequence[int]) -> int | tuple[int, ...]:
    """Equal numbers as one."""
    return values[0] if len(set(values)) == 1 else tuple(values)

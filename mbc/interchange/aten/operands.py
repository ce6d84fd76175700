"""What stands for a tensor of the program while it is translated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mbc.interchange.program import Array, Held


class Refused(Exception):
    """An operation that cannot be taken: why, and what would do instead."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


PLAIN, FLAT, CHANNELS_LAST, PADDED, GATE, EXPANDED = "plain", "flat", "channels_last", "padded", "gate", "expanded"
FACTORED = "factored"


@dataclass(frozen=True, slots=True)
class Atom:
    """A factor of an axis: index i of the axis has index i // stride % size of it."""

    axis: int
    stride: int
    size: int


Axes = tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor of the network, and how the program regards it, which costs nothing until somebody needs its bytes so:

    `flat` [N, C, H, W] as [N, C * H * W]; `channels_last` as [N, H, W, C]; `padded` with zeros around each image
    (`pad`: top, bottom, left, right); `gate` [N, C] as [N, C, 1, 1]; `expanded` repeated up to the shape `wide`, which
    operators do by themselves; `factored` with the factors of its axes in any order, as `axes` says, of which `picks`
    are one element each, and times `factor` (`mbc.interchange.aten.factors`).
    """

    value: int
    shape: tuple[int, ...]
    view: str = PLAIN
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    wide: tuple[int, ...] = ()
    axes: Axes = ()
    picks: tuple[tuple[Atom, int], ...] = ()
    factor: float = 1.0

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape that the program sees."""
        if self.view == FLAT:
            return (self.shape[0], math.prod(self.shape[1:]))
        if self.view == CHANNELS_LAST:
            return (self.shape[0], *self.shape[2:], self.shape[1])
        if self.view == PADDED:
            top, bottom, left, right = self.pad
            return (*self.shape[:2], self.shape[2] + top + bottom, self.shape[3] + left + right)
        if self.view == GATE:
            return (*self.shape, 1, 1)
        if self.view == FACTORED:
            return tuple(math.prod(atom.size for atom in axis) for axis in self.axes)
        return self.wide if self.view == EXPANDED else self.shape


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
class Standardized:
    """Filters, regarded in some shape: each less its mean and over its deviation, with `eps` added to the variance, and
    times its `gain`."""

    weight: Weight
    shape: tuple[int, ...]
    eps: float
    gain: Scaled | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Numbers that do not depend on the input: an array; or, of a parameter (`weight`), for each element its place in
    the parameter's flat tensor."""

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
    """Random ones and zeros, one with probability `keep`, times `scale`: a part of stochastic depth."""

    shape: tuple[int, ...]
    keep: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Unknown:
    """What an operation gave that could not be taken: whatever depends on it is passed over."""


UNKNOWN = Unknown()
Operand = Activation | Weight | Scaled | Standardized | Known | Scores | Noise | Unknown
Result = Operand | tuple[Operand, ...]


def as_setting(values: Sequence[int]) -> int | tuple[int, ...]:
    """Equal numbers as one."""
    return values[0] if len(set(values)) == 1 else tuple(values)

"""The error of an output of a launch, in units of the error that one roundoff causes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mbc.equivalence.float64 import Arithmetic, Array
from mbc.equivalence.rounding_model import ROUNDOFFS, UNDERFLOW, Meant, is_floating, spread
from mbc.ir.types import DType

MOST_ROUNDOFFS = 8.0  # limit for a whole output, in L2
MOST_ELEMENT_ROUNDOFFS = (
    64.0  # limit for the worst element: of 100 million elements a few have six times the usual error
)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The error of one output.

    Attributes:
        value: The output's name.
        dtype: The type that the output is stored in.
        elements: The number of elements.
        roundoffs: The L2 distance from the exact output, divided by the L2 distance that one roundoff causes.
        element: The error of the worst element, divided by the error that one roundoff causes there.
        wrong: The number of elements that no rounding explains (bits, positions, integers, infinities).
        differing: The number of elements that differ from the exact ones, right or wrong.
        relative: The L2 distance from the exact output, divided by its L2 norm.
    """

    value: str
    dtype: DType
    elements: int
    roundoffs: float
    element: float
    wrong: int
    differing: int
    relative: float

    @property
    def passed(self) -> bool:
        """True if no measure exceeds its limit."""
        return self.badness <= 1.0

    @property
    def badness(self) -> float:
        """The largest measure divided by its limit; an output with at most 1 passes."""
        if self.wrong:
            return math.inf
        return max(self.roundoffs / MOST_ROUNDOFFS, self.element / MOST_ELEMENT_ROUNDOFFS)


@dataclass
class Tally:
    """Adds up the error of an output that is compared in parts."""

    value: str
    dtype: DType
    _elements: int = 0
    _error: float = 0.0  # sum of squares
    _roundoff: float = 0.0
    _exact: float = 0.0
    _worst: float = 0.0
    _wrong: int = 0
    _differing: int = 0
    _parts: list[str] = field(default_factory=list[str])

    def add(self, arithmetic: Arithmetic, computed: Array, meant: Meant) -> None:
        """Compare some rows of the output, in canonical order and as they are read again from memory."""
        self._elements += math.prod(computed.shape)
        if not is_floating(computed):
            difference = computed ^ meant.exact
            self._differing += int((difference != 0).sum())
            for shaken in meant.shaken:
                difference = difference & ~(shaken ^ meant.exact)  # ignore bits that rounding may change
            self._wrong += int((difference != 0).sum())
            return
        stored = arithmetic.stored(meant.exact, self.dtype)
        usual = arithmetic.finite(stored)
        same = (computed == stored) | ((computed != computed) & (stored != stored))
        self._wrong += int(((usual != arithmetic.finite(computed)) | (~usual & ~same)).sum())
        self._differing += int((~same).sum())
        usual = usual & arithmetic.finite(computed)
        exact = arithmetic.where(usual, meant.exact, 0.0)
        error = arithmetic.where(usual, computed, 0.0) - exact
        # The rounding of an output when it is stored, for elements that are rounded.
        rounds = (stored != meant.exact) & usual
        squares = rounds * ((ROUNDOFFS[self.dtype] * exact) ** 2 + UNDERFLOW[self.dtype] ** 2)
        inside = 0.0 * exact
        for shaken in meant.shaken:
            moved = arithmetic.where(usual & arithmetic.finite(shaken), shaken, exact) - exact
            inside = inside + moved * moved / len(meant.shaken)
        squares = squares + inside
        self._error += float((error * error).sum())
        self._roundoff += float(squares.sum())
        self._exact += float((exact * exact).sum())
        around = squares**0.5 + spread(inside**0.5)
        off = abs(error) > 0
        if bool((off & (around == 0)).any()):
            self._worst = math.inf
        else:
            self._worst = max(self._worst, float((abs(error) / arithmetic.where(off, around, 1.0)).max()))

    @property
    def deviation(self) -> Deviation:
        """The error of all parts."""
        return Deviation(
            self.value, self.dtype, self._elements, _ratio(self._error, self._roundoff), self._worst, self._wrong,
            self._differing, _ratio(self._error, self._exact),
        )  # fmt: skip


def _ratio(error: float, of: float) -> float:
    """Return the ratio of the roots of two sums of squares."""
    return math.sqrt(error / of) if of else (math.inf if error else 0.0)

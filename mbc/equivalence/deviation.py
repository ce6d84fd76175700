"""How far an output of a launch is from what it must be, in units of what one roundoff does to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mbc.equivalence.float64 import Arithmetic, Array
from mbc.equivalence.rounding_model import ROUNDOFFS, UNDERFLOW, Meant, is_floating, spread
from mbc.ir.types import DType

MOST_ROUNDOFFS = 8.0  # of an output as a whole, in L2
MOST_ELEMENT_ROUNDOFFS = 64.0  # of its worst element: a few of a hundred million are six times as far off as most are


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of one output. `roundoffs`: L2 distance from what is exact over that of one roundoff; `element`: of the worst
    element, over one roundoff where it is; `wrong`: elements that no rounding explains (bits, positions, whole numbers,
    infinities); `differing`: those that are not the exact ones, right or wrong."""

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
        return self.badness <= 1.0

    @property
    def badness(self) -> float:
        """The worst of its measures over its limit; at most 1 passes."""
        if self.wrong:
            return math.inf
        return max(self.roundoffs / MOST_ROUNDOFFS, self.element / MOST_ELEMENT_ROUNDOFFS)


@dataclass
class Tally:
    """Adds up an output that is compared in parts."""

    value: str
    dtype: DType
    _elements: int = 0
    _error: float = 0.0  # squares
    _roundoff: float = 0.0
    _exact: float = 0.0
    _worst: float = 0.0
    _wrong: int = 0
    _differing: int = 0
    _parts: list[str] = field(default_factory=list[str])

    def add(self, arithmetic: Arithmetic, found: Array, meant: Meant) -> None:
        """Compare some rows, canonical, as they are read again."""
        self._elements += math.prod(found.shape)
        if not is_floating(found):
            difference = found ^ meant.exact
            self._differing += int((difference != 0).sum())
            for shaken in meant.shaken:
                difference = difference & ~(shaken ^ meant.exact)  # bits that could come out otherwise
            self._wrong += int((difference != 0).sum())
            return
        stored = arithmetic.stored(meant.exact, self.dtype)
        usual = arithmetic.finite(stored)
        same = (found == stored) | ((found != found) & (stored != stored))
        self._wrong += int(((usual != arithmetic.finite(found)) | (~usual & ~same)).sum())
        self._differing += int((~same).sum())
        usual = usual & arithmetic.finite(found)
        exact = arithmetic.where(usual, meant.exact, 0.0)
        error = arithmetic.where(usual, found, 0.0) - exact
        # What an output is rounded by when it is stored, where it is at all.
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
        return Deviation(
            self.value, self.dtype, self._elements, _ratio(self._error, self._roundoff), self._worst, self._wrong,
            self._differing, _ratio(self._error, self._exact),
        )  # fmt: skip


def _ratio(error: float, of: float) -> float:
    """Of the roots of two sums of squares."""
    return math.sqrt(error / of) if of else (math.inf if error else 0.0)

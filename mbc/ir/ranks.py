"""How a mini-batch is shared by ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from mbc.errors import MbcError
from mbc.ir.graph import Ranks

Kind = TypeVar("Kind", bound=Hashable)


def share_rows(batch: int, size: int) -> tuple[Ranks, ...]:
    """The rows of each of `size` ranks, as even as can be, the first ranks having one more: a `Ranks` for each number
    of rows. MBC280 where a rank would have none."""
    return grouped(even_rows(batch, size), ("",) * size)


def even_rows(batch: int, size: int) -> tuple[int, ...]:
    """Of each rank. MBC280 where one would have none."""
    least, more = divmod(batch, size)
    if least == 0:
        raise MbcError(
            "MBC280",
            f"a mini-batch of {batch} cannot be shared by {size} GPUs: each needs one row or more",
            "raise batch, which counts the rows of all GPUs together, or take fewer GPUs",
        )
    return (least + 1,) * more + (least,) * (size - more)


def grouped(rows: Sequence[int], kinds: Sequence[Hashable]) -> tuple[Ranks, ...]:
    """A `Ranks` for each kind of GPU and number of rows, in the order of their first ranks."""
    each = list(zip(kinds, rows, strict=True))
    groups = (tuple(rank for rank, own in enumerate(each) if own == one) for one in dict.fromkeys(each))
    return tuple(Ranks(tuple(rows), members) for members in groups)


def rows_by_speed(batch: int, kinds: Sequence[Kind], step_us: Callable[[Kind, int], float]) -> tuple[int, ...]:
    """The rows of each rank, whose GPUs are of these kinds, with which the slowest is soonest done.

    `step_us(kind, rows)` is the time of a step; infinite where so many rows do not fit. It is asked for few numbers of
    rows: shares are chosen by the times known so far, and straight lines between them; those chosen are asked for, and
    in the end those with one row moved from the slowest rank to another. MBC280 where a rank would have no row, MBC284
    where all GPUs together hold too few.
    """
    curves = {kind: _Curve(kind, step_us) for kind in kinds}
    best = _Shares(even_rows(batch, len(kinds)), math.inf)
    wanted = [best.rows]
    while wanted:
        for rows in wanted:
            slowest_us = max(curves[kind].asked(own) for kind, own in zip(kinds, rows, strict=True))
            best = min(best, _Shares(rows, slowest_us), key=lambda shares: shares.slowest_us)
        chosen = _shared(batch, [curves[kind] for kind in kinds])
        wanted = [rows for rows in (chosen, *_moved(best, kinds, curves)) if not _known(rows, kinds, curves)]
        wanted = wanted[:1] if chosen in wanted else wanted
    return best.rows


@dataclass(frozen=True, slots=True)
class _Shares:
    rows: tuple[int, ...]
    slowest_us: float


class _Curve(Generic[Kind]):
    """The time of a step over its rows, of one kind of GPU. `known`: by rows."""

    def __init__(self, kind: Kind, step_us: Callable[[Kind, int], float]) -> None:
        self.known: dict[int, float] = {}
        self._kind, self._step_us = kind, step_us

    def asked(self, rows: int) -> float:
        if rows not in self.known:
            self.known[rows] = self._step_us(self._kind, rows)
        return self.known[rows]

    @property
    def fits(self) -> int:
        """Rows that are known to fit."""
        return max((r for r, us in self.known.items() if math.isfinite(us)), default=0)

    @property
    def fails(self) -> float:
        """Rows that are known not to."""
        return min((r for r, us in self.known.items() if math.isinf(us)), default=math.inf)

    def us(self, rows: int) -> float:
        """Known, or on the line between or beyond the two nearest known; never less than that of fewer rows. Infinite
        from half-way on between what fits and what does not."""
        if math.isfinite(self.fails) and rows > max(self.fits, (self.fits + self.fails) // 2):
            return math.inf
        points = sorted((r, us) for r, us in self.known.items() if math.isfinite(us))
        points = points if len(points) > 1 else [(0, 0.0), *(points or [(1, 1.0)])]
        at = next((i for i, (r, _) in enumerate(points) if r >= rows), len(points) - 1)
        (r0, us0), (r1, us1) = points[max(at, 1) - 1 : max(at, 1) + 1]
        line_us = us0 + (us1 - us0) * (rows - r0) / (r1 - r0)
        return max([line_us, 0.0, *(us for r, us in points if r <= rows)])


def _shared(batch: int, curves: Sequence[_Curve[Kind]]) -> tuple[int, ...]:
    """One row after another to the rank that is soonest done with it, which is best where times never fall."""
    rows = [1] * len(curves)
    queue = [(curve.us(2), rank) for rank, curve in enumerate(curves)]
    heapify(queue)
    while sum(rows) < batch:
        us, rank = heappop(queue)
        if math.isinf(us):
            # All are full: of one it may not be known how full.
            unsure = next((curve for curve in curves if curve.fails - curve.fits > 1), None)
            if unsure is None:
                raise MbcError(
                    "MBC284",
                    f"the {len(curves)} GPUs hold {sum(c.fits for c in curves)} of {batch} rows, within their memory",
                    "lower batch, raise the memory that the plan may take, or take more GPUs",
                )
            unsure.asked(int(unsure.fits + unsure.fails) // 2)
            return _shared(batch, curves)
        rows[rank] += 1
        heappush(queue, (curves[rank].us(rows[rank] + 1), rank))
    return tuple(rows)


def _moved(best: _Shares, kinds: Sequence[Kind], curves: Mapping[Kind, _Curve[Kind]]) -> Iterator[tuple[int, ...]]:
    """One row from the slowest rank to one of each other kind."""
    if math.isinf(best.slowest_us):
        return
    times_us = [curves[kind].asked(own) for kind, own in zip(kinds, best.rows, strict=True)]
    slowest = times_us.index(best.slowest_us)
    if best.rows[slowest] == 1:
        return
    for kind in dict.fromkeys(kinds):
        if kind != kinds[slowest]:
            to = min((rank for rank, own in enumerate(kinds) if own == kind), key=lambda rank: best.rows[rank])
            yield tuple(own + (rank == to) - (rank == slowest) for rank, own in enumerate(best.rows))


def _known(rows: Sequence[int], kinds: Sequence[Kind], curves: Mapping[Kind, _Curve[Kind]]) -> bool:
    return all(own in curves[kind].known for kind, own in zip(kinds, rows, strict=True))

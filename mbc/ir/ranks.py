"""How a mini-batch is shared by ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, TypeVar

from mbc.errors import MbcError
from mbc.ir.graph import Ranks

Kind = TypeVar("Kind", bound=Hashable)
MEASURED_WITHIN = 0.25  # of a rank's rows: how far from the best share measured rows are tried


def share_rows(batch: int, size: int) -> tuple[Ranks, ...]:
    """The rows of each of `size` ranks, as even as can be, the first ranks having one more: a `Ranks` for each number
    of rows. MBC280 where a rank would have none."""
    return grouped(even_rows(batch, size), ("",) * size)


def even_rows(batch: int, size: int) -> tuple[int, ...]:
    """The rows of each of `size` ranks, as even as can be. MBC280 where one would have none."""
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


def rows_by_speed(
    batch: int,
    kinds: Sequence[Kind],
    step_us: Callable[[Kind, int], float],
    measured: Callable[[Kind], Collection[int]] = lambda kind: (),
) -> tuple[int, ...]:
    """The rows of each rank, whose GPUs are of these kinds, with which the slowest is soonest done.

    `step_us(kind, rows)` is the time of a step; infinite where so many rows do not fit. It is called for few numbers of
    rows: shares are balanced by the times known so far, and straight lines between them, and then tried, until none is
    new. In the end one row is moved from the slowest rank to another, and ranks of a kind get the nearest numbers of
    rows for which its kernels are `measured`: times that are estimated between these lie on no line with them. MBC280
    where a rank would have no row, MBC284 where no share was found that fits all ranks.
    """
    curves = {kind: _Curve(kind, step_us) for kind in kinds}
    own = [curves[kind] for kind in kinds]
    tried: dict[tuple[int, ...], float] = {}
    best = even_rows(batch, len(kinds))
    wanted = [best]
    while wanted:
        for rows in wanted:
            tried[rows] = max(curve.step_us(count) for curve, count in zip(own, rows, strict=True))
        best = min(tried, key=lambda rows: tried[rows])
        balanced = _balanced(batch, own)
        if balanced is not None and balanced not in tried:
            wanted = [balanced]
        else:
            near = chain(_one_row_moved(best, kinds, own), _at_measured(best, kinds, own, measured))
            wanted = [rows for rows in dict.fromkeys(near) if rows not in tried]
    if math.isinf(tried[best]):
        held = ", ".join(f"{curve.most_fitting_rows} on rank {rank}" for rank, curve in enumerate(own))
        raise MbcError(
            "MBC284",
            f"no share of {batch} rows was found that fits {len(kinds)} GPUs; most rows found to fit are {held}",
            "lower batch, raise the memory that the plan may take, or take more GPUs",
        )
    return best


class _Curve(Generic[Kind]):
    """The time of a step over its rows, of one kind of GPU."""

    def __init__(self, kind: Kind, step_us: Callable[[Kind, int], float]) -> None:
        self._kind, self._step_us = kind, step_us
        self._known_us: dict[int, float] = {}

    def step_us(self, rows: int) -> float:
        if rows not in self._known_us:
            self._known_us[rows] = self._step_us(self._kind, rows)
        return self._known_us[rows]

    @property
    def most_fitting_rows(self) -> int:
        return max((rows for rows, us in self._known_us.items() if math.isfinite(us)), default=0)

    @property
    def fewest_refused_rows(self) -> float:
        return min((rows for rows, us in self._known_us.items() if math.isinf(us)), default=math.inf)

    @property
    def is_limit_known(self) -> bool:
        """Whether no number of rows lies between those that fit and those that do not."""
        return self.fewest_refused_rows - self.most_fitting_rows <= 1

    def bisect_limit(self) -> None:
        self.step_us(int(self.most_fitting_rows + self.fewest_refused_rows) // 2)

    def interpolated_us(self, rows: int) -> float:
        """Known, or on the line between or beyond the two nearest known; never less than that of fewer rows. Infinite
        from half-way on between what fits and what does not."""
        fits, refused = self.most_fitting_rows, self.fewest_refused_rows
        if math.isfinite(refused) and rows > max(fits, (fits + refused) // 2):
            return math.inf
        points = sorted((known, us) for known, us in self._known_us.items() if math.isfinite(us))
        points = points if len(points) > 1 else [(0, 0.0), *(points or [(1, 1.0)])]
        at = next((i for i, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
        (rows0, us0), (rows1, us1) = points[max(at, 1) - 1 : max(at, 1) + 1]
        line_us = us0 + (us1 - us0) * (rows - rows0) / (rows1 - rows0)
        return max([line_us, 0.0, *(us for known, us in points if known <= rows)])


def _balanced(batch: int, curves: Sequence[_Curve[Kind]]) -> tuple[int, ...] | None:
    """One row after another to the rank that is soonest done with it, which is best where times never fall. None where
    all are full."""
    rows = [1] * len(curves)
    queue = [(curve.interpolated_us(2), rank) for rank, curve in enumerate(curves)]
    heapify(queue)
    while sum(rows) < batch:
        us, rank = heappop(queue)
        if math.isinf(us):
            unsure = next((curve for curve in curves if not curve.is_limit_known), None)
            if unsure is None:
                return None
            unsure.bisect_limit()
            return _balanced(batch, curves)
        rows[rank] += 1
        heappush(queue, (curves[rank].interpolated_us(rows[rank] + 1), rank))
    return tuple(rows)


def _one_row_moved(
    best: tuple[int, ...], kinds: Sequence[Kind], curves: Sequence[_Curve[Kind]]
) -> Iterator[tuple[int, ...]]:
    """From the slowest rank to one of each other kind."""
    times_us = [curve.step_us(rows) for curve, rows in zip(curves, best, strict=True)]
    slowest = times_us.index(max(times_us))
    if best[slowest] == 1 or math.isinf(times_us[slowest]):
        return
    for kind in dict.fromkeys(kinds):
        if kind != kinds[slowest]:
            to = min((rank for rank, own in enumerate(kinds) if own == kind), key=lambda rank: best[rank])
            yield tuple(rows + (rank == to) - (rank == slowest) for rank, rows in enumerate(best))


def _at_measured(
    best: tuple[int, ...],
    kinds: Sequence[Kind],
    curves: Sequence[_Curve[Kind]],
    measured: Callable[[Kind], Collection[int]],
) -> Iterator[tuple[int, ...]]:
    """With the nearest measured numbers of rows, fewer and more, on the ranks of one kind, the rest dealt to others."""
    for kind in dict.fromkeys(kinds):
        others = [curve for curve, other in zip(curves, kinds, strict=True) if other != kind]
        own = max(rows for rows, other in zip(best, kinds, strict=True) if other == kind)
        near = [rows for rows in measured(kind) if abs(rows - own) <= MEASURED_WITHIN * own]
        for rows in {*sorted(r for r in near if r < own)[-1:], *sorted(r for r in near if r > own)[:1]}:
            left = sum(best) - rows * (len(kinds) - len(others))
            dealt = _balanced(left, others) if 0 < len(others) <= left else None
            if dealt is not None:
                of_others = iter(dealt)
                yield tuple(rows if other == kind else next(of_others) for other in kinds)

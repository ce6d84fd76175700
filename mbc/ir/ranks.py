"""The division of a mini-batch's rows between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, TypeVar

from mbc.errors import MbcError
from mbc.ir.graph import Ranks

Kind = TypeVar("Kind", bound=Hashable)
MEASURED_WITHIN = 0.25  # measured numbers of rows are tried within this share of a rank's rows


def share_rows(batch: int, size: int) -> tuple[Ranks, ...]:
    """Return a `Ranks` for each number of rows, where `size` ranks have rows as equal as possible.

    The first ranks have one row more if `size` does not divide `batch`.

    Raises:
        MbcError: MBC280 if a rank would have no row.
    """
    return grouped(even_rows(batch, size), ("",) * size)


def even_rows(batch: int, size: int) -> tuple[int, ...]:
    """Return the rows of each of `size` ranks, as equal as possible.

    Raises:
        MbcError: MBC280 if a rank would have no row.
    """
    least, more = divmod(batch, size)
    if least == 0:
        raise MbcError(
            "MBC280",
            f"a mini-batch of {batch} cannot be shared by {size} GPUs: each needs one row or more",
            "raise batch, which counts the rows of all GPUs together, or take fewer GPUs",
        )
    return (least + 1,) * more + (least,) * (size - more)


def grouped(rows: Sequence[int], kinds: Sequence[Hashable]) -> tuple[Ranks, ...]:
    """Return a `Ranks` for each kind of GPU and number of rows, in the order of their first ranks."""
    each = list(zip(kinds, rows, strict=True))
    groups = (tuple(rank for rank, own in enumerate(each) if own == one) for one in dict.fromkeys(each))
    return tuple(Ranks(tuple(rows), members) for members in groups)


def rows_by_speed(
    batch: int,
    kinds: Sequence[Kind],
    step_us: Callable[[Kind, int], float],
    measured: Callable[[Kind], Collection[int]] = lambda kind: (),
) -> tuple[int, ...]:
    """Return the rows of each rank with which the slowest rank finishes soonest.

    Shares are balanced by the times so far and straight lines between them, and then tried, until no new share appears.
    In the end one row is moved from the slowest rank to another. Ranks of a kind also try the nearest numbers of rows
    for which kernels were measured, because estimated times between these do not lie on straight lines with them.

    Args:
        batch: Rows of the mini-batch.
        kinds: The kind of GPU of each rank.
        step_us: Returns the time of a step for a kind and a number of rows; infinite if so many rows do not fit. It is
            called for few numbers of rows.
        measured: Returns the numbers of rows for which a kind's kernels were measured.

    Raises:
        MbcError: MBC280 if a rank would have no row, MBC284 if no share was found that fits all ranks.
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
            f"no share of {batch} rows was found that fits {len(kinds)} GPUs; the most rows that fit are {held}",
            "lower batch, raise the memory that the plan may use, or use more GPUs",
        )
    return best


class _Curve(Generic[Kind]):
    """The time of a step by its rows, for one kind of GPU."""

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
        """True if the largest number of rows that fits is known."""
        return self.fewest_refused_rows - self.most_fitting_rows <= 1

    def bisect_limit(self) -> None:
        self.step_us(int(self.most_fitting_rows + self.fewest_refused_rows) // 2)

    def interpolated_us(self, rows: int) -> float:
        """Return the time of a number of rows, measured or on the line through the two nearest measured times.

        The time is never less than that of fewer rows. It is infinite above the middle between the largest number of
        rows that fits and the smallest number that does not fit.
        """
        fits, refused = self.most_fitting_rows, self.fewest_refused_rows
        if math.isfinite(refused) and rows > max(fits, (fits + refused) // 2):
            return math.inf
        points = sorted((known_rows, us) for known_rows, us in self._known_us.items() if math.isfinite(us))
        points = points if len(points) > 1 else [(0, 0.0), *(points or [(1, 1.0)])]
        at = next((i for i, (known_rows, _) in enumerate(points) if known_rows >= rows), len(points) - 1)
        (rows0, us0), (rows1, us1) = points[max(at, 1) - 1 : max(at, 1) + 1]
        line_us = us0 + (us1 - us0) * (rows - rows0) / (rows1 - rows0)
        return max([line_us, 0.0, *(us for known_rows, us in points if known_rows <= rows)])


def _balanced(batch: int, curves: Sequence[_Curve[Kind]]) -> tuple[int, ...] | None:
    """Return the rows of each rank; None if all ranks are full before all rows are given.

    One row after another is given to the rank that finishes it soonest. This is the best share if times never fall with
    more rows.
    """
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
    """Yield the shares with one row moved from the slowest rank to a rank of each other kind."""
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
    """Yield shares in which the ranks of one kind have a measured number of rows, and others share the rest."""
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

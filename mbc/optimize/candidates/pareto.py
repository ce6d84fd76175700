"""The Pareto front of the divisions of one operation into micro-batches.

None of them is both slower and larger in workspace than another. A division is a number of kernel calls, each on some
of the rows: their times add up, and the workspace is that of the call that needs most, because one call starts after
another. This is micro-cuDNN's problem (Oyama, Ben-Nun, Hoefler and Matsuoka, "Accelerating deep learning frameworks
with micro-batches", 2018); here it is solved for every workspace at once. Calls are admitted in the order of their
workspace into an unbounded knapsack over rows: `fastest[n]` is the least time for n rows of the calls admitted so far,
and each improvement at the whole mini-batch is a point of the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mbc.kernels.base import Candidate
from mbc.optimize import effort

_ROUNDING = 1 + 1e-9  # ratio of two sums of the same times that were added in different orders
_FEW_ROWS = 8  # below this number of rows a call of NumPy costs more than it saves


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One kernel call of a division."""

    rows: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Point:
    """One division of an operation, micro-batches in order.

    Attributes:
        workspace_bytes: Workspace of the micro-batch that needs most.
        time_us: Sum of all calls. The first micro-batch of an accumulated output overwrites, the others accumulate.
        micro_batches: The calls in order.
    """

    workspace_bytes: int
    time_us: float
    micro_batches: tuple[MicroBatch, ...]


_Cost = Callable[[Candidate], float]
ParetoFront = tuple[Point, ...]  # workspace ascending, time descending, both strictly


def accumulating_us(candidate: Candidate) -> float:
    """Return the time of a call that adds to its output; infinite if the kernel cannot add."""
    if not candidate.accumulates:
        return math.inf
    return candidate.accumulate_us or candidate.time_us


def pareto_front(offers: Mapping[int, Sequence[Candidate]], rows: int, accumulates: bool) -> ParetoFront:
    """Return the exact front for `rows` rows.

    Args:
        offers: The candidates of a micro-batch, by its rows.
        rows: Rows of the mini-batch.
        accumulates: Whether the results of micro-batches are added up (filter gradients), so that all but one of the
            calls must be able to accumulate.
    """
    step = math.gcd(rows, *offers)
    if step > 1:  # the knapsack counts in the largest step that all sizes are multiples of
        scaled = pareto_front({n // step: candidates for n, candidates in offers.items()}, rows // step, accumulates)
        return tuple(
            replace(p, micro_batches=tuple(MicroBatch(s.rows * step, s.candidate) for s in p.micro_batches))
            for p in scaled
        )
    if not accumulates:
        calls = _Calls.of(offers, lambda candidate: candidate.time_us)
        return tuple(_front(calls, calls, rows, accumulates=False))
    accumulating = _Calls.of({n: candidates for n, candidates in offers.items() if n < rows}, accumulating_us)
    return tuple(_front(_Calls.of(offers, lambda candidate: candidate.time_us), accumulating, rows, accumulates=True))


def fixed_division(
    offers: Mapping[int, Sequence[Candidate]], division: Sequence[int], accumulates: bool
) -> ParetoFront:
    """Return the front of one given division: each micro-batch takes the fastest call within the same workspace."""
    front: list[Point] = []
    for workspace_bytes in sorted({c.workspace_bytes for n in set(division) for c in offers.get(n, ())}):
        micro_batches: list[MicroBatch] = []
        time_us = 0.0
        for number, n in enumerate(division):

            def cost(candidate: Candidate, adds: bool = accumulates and number > 0) -> float:
                return accumulating_us(candidate) if adds else candidate.time_us

            within = (c for c in offers.get(n, ()) if c.workspace_bytes <= workspace_bytes)
            best = min(within, key=cost, default=None)
            if best is None:
                time_us = math.inf
                break
            micro_batches.append(MicroBatch(n, best))
            time_us += cost(best)
        if math.isfinite(time_us) and (not front or time_us < front[-1].time_us):
            front.append(Point(max(s.candidate.workspace_bytes for s in micro_batches), time_us, tuple(micro_batches)))
    return tuple(front)


def worthwhile(front: ParetoFront, undivided: ParetoFront) -> ParetoFront:
    """Return the front without divisions that gain next to nothing over one call with no more workspace.

    Args:
        front: All divisions.
        undivided: Calls of the whole mini-batch.
    """

    def gains(point: Point) -> bool:
        alone_us = min((w.time_us for w in undivided if w.workspace_bytes <= point.workspace_bytes), default=math.inf)
        return point.time_us * effort.DIVISION_GAIN < alone_us

    kept: list[Point] = []
    divided = [point for point in front if len(point.micro_batches) > 1 and gains(point)]
    for point in sorted((*undivided, *divided), key=lambda p: (p.workspace_bytes, p.time_us)):
        if not kept or point.time_us < kept[-1].time_us:
            kept.append(point)
    return tuple(kept)


@dataclass(frozen=True)
class _Calls:
    """Calls in the order of their workspace. No call is dominated by another call with as many rows."""

    workspaces: NDArray[np.int64]
    rows: NDArray[np.int64]
    times_us: NDArray[np.float64]
    candidates: tuple[Candidate, ...]

    @staticmethod
    def of(offers: Mapping[int, Sequence[Candidate]], cost: _Cost) -> _Calls:
        """Return the calls of all sizes that are not dominated."""
        kept: list[tuple[int, int, float, Candidate]] = []
        for rows, candidates in offers.items():
            best_us = math.inf
            for time_us, candidate in sorted(
                ((cost(c), c) for c in candidates), key=lambda pair: (pair[1].workspace_bytes, pair[0])
            ):
                if time_us < best_us:
                    best_us = time_us
                    kept.append((candidate.workspace_bytes, rows, time_us, candidate))
        kept.sort(key=lambda call: call[:3])
        return _Calls(
            np.array([call[0] for call in kept], np.int64),
            np.array([call[1] for call in kept], np.int64),
            np.array([call[2] for call in kept], np.float64),
            tuple(call[3] for call in kept),
        )

    def within(self, workspace_bytes: int) -> int:
        """Return the number of calls that need no more workspace."""
        return int(np.searchsorted(self.workspaces, workspace_bytes, side="right"))


def _front(first: _Calls, more: _Calls, rows: int, accumulates: bool) -> list[Point]:
    """Return the points of the front, workspace ascending.

    Args:
        first: Calls that may come first, if the operation accumulates.
        more: Calls that may follow, or all calls if the operation does not accumulate.
        rows: Rows of the mini-batch.
        accumulates: Whether results of micro-batches are added up.
    """
    front: list[Point] = []
    best_us = math.inf
    fastest = np.full(rows + 1, math.inf)
    fastest[0] = 0.0
    admitted = 0
    for workspace_bytes in np.union1d(first.workspaces, more.workspaces):
        until = more.within(workspace_bytes)
        for k in range(admitted, until):
            _admit(fastest, int(more.rows[k]), float(more.times_us[k]))
        admitted = until
        if accumulates:
            count = first.within(workspace_bytes)
            totals = first.times_us[:count] + fastest[rows - first.rows[:count]]
            start = int(np.argmin(totals)) if count else -1
            total_us = float(totals[start]) if count else math.inf
        else:
            start, total_us = -1, float(fastest[rows])
        if total_us * _ROUNDING < best_us:
            best_us = total_us
            micro_batches = [] if start < 0 else [MicroBatch(int(first.rows[start]), first.candidates[start])]
            micro_batches += _backtrack(fastest, more, until, rows - sum(s.rows for s in micro_batches))
            front.append(Point(max(s.candidate.workspace_bytes for s in micro_batches), total_us, tuple(micro_batches)))
    return front


def _admit(fastest: NDArray[np.float64], rows: int, time_us: float) -> None:
    """Admit one more call, which may occur any number of times."""
    if time_us >= fastest[rows]:
        return  # the calls admitted before are as fast for as many rows
    if rows < _FEW_ROWS:
        values: list[float] = fastest.tolist()
        for i in range(rows, len(values)):
            with_one_more_us = values[i - rows] + time_us
            if with_one_more_us < values[i]:
                values[i] = with_one_more_us
        fastest[:] = values
        return
    for low in range(rows, len(fastest), rows):
        part = fastest[low : low + rows]
        np.minimum(part, fastest[low - rows : low - rows + len(part)] + time_us, out=part)


def _backtrack(fastest: NDArray[np.float64], calls: _Calls, admitted: int, rows: int) -> list[MicroBatch]:
    """Return calls that make up `fastest[rows]`, the largest first."""
    sizes, times = calls.rows[:admitted], calls.times_us[:admitted]
    micro_batches: list[MicroBatch] = []
    while rows:
        fits = np.flatnonzero(sizes <= rows)
        reaching = fits[fastest[rows - sizes[fits]] + times[fits] <= fastest[rows] * _ROUNDING]
        k = int(reaching[np.argmax(sizes[reaching])])
        micro_batches.append(MicroBatch(int(sizes[k]), calls.candidates[k]))
        rows -= int(sizes[k])
    return sorted(micro_batches, key=lambda s: -s.rows)

"""The least additional time of fused rematerialization (`mbc.optimize.remat.fused_remat`), for the lower bound within a
budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.ops.fused import names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.remat.fused_remat import fused_remats_of


@dataclass(frozen=True, slots=True)
class JointRemat:
    """Two values that the launch of the reductions of this name recomputes as well, in `more_us` more."""

    first: str
    last: str
    sums: str
    more_us: float


@dataclass(frozen=True, slots=True)
class FusedRematCosts:
    """`by_sums`: of a value, additional microseconds of each launch of reductions that recomputes it, by itself or with
    another."""

    by_sums: Mapping[str, Mapping[str, float]]
    both: Sequence[JointRemat]

    @property
    def pairs(self) -> Sequence[JointRemat]:
        """Those whose first value is recomputed together with one last value only: they have one joint price."""
        times = Counter(both.first for both in self.both)
        return tuple(both for both in self.both if times[both.first] == 1)

    def again_us(self, values: Iterable[str], apart_us: float) -> float:
        """The least time to recompute the values of one operation, `apart_us` by launches of their own. Together with
        another value they take what the joint launch takes more: both prices together are at most that launch's."""
        return min((apart_us, *(min(self.least_us(value), self.beside_us(value)) for value in values)))

    def pair_us(self, both: JointRemat, first_apart_us: float, last_apart_us: float) -> tuple[float, float, float]:
        """The same of the first value, the last one, and both: only where both are absent they share a launch. Else at
        most one of them is recomputed with these reductions."""
        first_us = min(first_apart_us, self.least_us(both.first))
        last_us = min(last_apart_us, self.least_us(both.last))
        first_elsewhere_us = min(first_apart_us, self.least_us(both.first, without=both.sums))
        last_elsewhere_us = min(last_apart_us, self.least_us(both.last, without=both.sums))
        both_us = min(both.more_us, first_elsewhere_us + last_us, first_us + last_elsewhere_us)
        return first_us, last_us, both_us

    def least_us(self, value: str, without: str = "") -> float:
        """By any reductions but those of this name; infinite where there are none."""
        return min((us for sums, us in self.by_sums.get(value, {}).items() if sums != without), default=math.inf)

    def beside_us(self, value: str) -> float:
        """Together with another value that pays for its own launch."""
        shared = (both for both in self.both if both.first == value)
        return min((both.more_us - self.by_sums[both.last][both.sums] for both in shared), default=math.inf)


def fused_remat_costs(table: CandidateTable, launches: Iterable[Operation]) -> FusedRematCosts:
    """`launches`: all that a step may be made of, without a limit."""
    sums: dict[str, list[Operation]] = {}
    for launch in launches:
        sums.setdefault(names_of(launch)[-1], []).append(launch)
    by_sums: dict[str, dict[str, float]] = {}
    found: dict[tuple[str, ...], JointRemat] = {}
    for fused_remat in fused_remats_of(table):
        name = names_of(fused_remat.operation)[-1]
        more_us = _more_us(table, fused_remat.operation, tuple(filter(fused_remat.stands_for, sums.get(name, ()))))
        if more_us == math.inf:
            continue
        for value in fused_remat.values:
            known = by_sums.setdefault(value, {})
            known[name] = min(known.get(name, math.inf), more_us)
        if len(fused_remat.values) > 1:
            first, last = fused_remat.values
            both = JointRemat(first, last, name, more_us)
            found[fused_remat.values] = min(found.get(fused_remat.values, both), both, key=lambda both: both.more_us)
    return FusedRematCosts(by_sums, tuple(found.values()))


def _more_us(table: CandidateTable, fused_remat: Operation, standing: Sequence[Operation]) -> float:
    """The least additional time of a launch over the one that it replaces: any of `standing` in the same layouts, since
    in others the step without a limit would be another one. Infinite where there is none."""
    found = math.inf
    for candidate in table.offered(fused_remat):
        layouts = _layouts(fused_remat, candidate)
        times_us = (
            other.time_us
            for launch in standing
            for other in table.offered(launch)
            if all(layouts.get(name, layout) == layout for name, layout in _layouts(launch, other).items())
        )
        found = min(found, max(0.0, candidate.time_us - min(times_us, default=-math.inf)))
    return found


def _layouts(launch: Operation, candidate: Candidate) -> Mapping[str, Layout]:
    return dict(zip((*launch.inputs, *launch.outputs), candidate.layouts, strict=True))

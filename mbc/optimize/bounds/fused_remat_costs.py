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
    """Two values that the launch of the reductions of this name recomputes as well, in `more_us` additional time."""

    first: str
    last: str
    reductions: str
    more_us: float


@dataclass(frozen=True, slots=True)
class FusedRematCosts:
    """`by_sums`: of a value, additional microseconds of each launch of reductions that recomputes it, by itself or with
    another."""

    by_reductions: Mapping[str, Mapping[str, float]]
    joint: Sequence[JointRemat]

    @property
    def pairs(self) -> Sequence[JointRemat]:
        """Those whose first value is recomputed jointly with one other value only: they have one joint price."""
        times = Counter(joint.first for joint in self.joint)
        return tuple(joint for joint in self.joint if times[joint.first] == 1)

    def recompute_us(self, values: Iterable[str], own_launch_us: float) -> float:
        """The least time to recompute the values of one operation, `apart_us` by launches of their own. Jointly with
        another value they take the additional time of the joint launch: both prices together are at most that
        launch's."""
        return min((own_launch_us, *(min(self.least_us(value), self.joint_us(value)) for value in values)))

    def pair_us(self, joint: JointRemat, first_own_us: float, last_own_us: float) -> tuple[float, float, float]:
        """The same of the first value, the last one, and both: they share a launch only where both are absent;
        otherwise these reductions recompute one of them at most."""
        first_us = min(first_own_us, self.least_us(joint.first))
        last_us = min(last_own_us, self.least_us(joint.last))
        first_elsewhere_us = min(first_own_us, self.least_us(joint.first, without=joint.reductions))
        last_elsewhere_us = min(last_own_us, self.least_us(joint.last, without=joint.reductions))
        both_us = min(joint.more_us, first_elsewhere_us + last_us, first_us + last_elsewhere_us)
        return first_us, last_us, both_us

    def least_us(self, value: str, without: str = "") -> float:
        """By any reductions but those of this name; infinite where there are none."""
        return min(
            (us for reductions, us in self.by_reductions.get(value, {}).items() if reductions != without),
            default=math.inf,
        )

    def joint_us(self, value: str) -> float:
        """The least additional time jointly with another value, whose own price is subtracted."""
        shared = (joint for joint in self.joint if joint.first == value)
        return min(
            (joint.more_us - self.by_reductions[joint.last][joint.reductions] for joint in shared), default=math.inf
        )


def fused_remat_costs(table: CandidateTable, launches: Iterable[Operation]) -> FusedRematCosts:
    """`launches`: all that a step without a limit may contain."""
    reductions: dict[str, list[Operation]] = {}
    for launch in launches:
        reductions.setdefault(names_of(launch)[-1], []).append(launch)
    by_reductions: dict[str, dict[str, float]] = {}
    found: dict[tuple[str, ...], JointRemat] = {}
    for fused_remat in fused_remats_of(table):
        name = names_of(fused_remat.operation)[-1]
        more_us = _more_us(
            table, fused_remat.operation, tuple(filter(fused_remat.can_replace, reductions.get(name, ())))
        )
        if more_us == math.inf:
            continue
        for value in fused_remat.values:
            known = by_reductions.setdefault(value, {})
            known[name] = min(known.get(name, math.inf), more_us)
        if len(fused_remat.values) > 1:
            first, last = fused_remat.values
            joint = JointRemat(first, last, name, more_us)
            found[fused_remat.values] = min(
                found.get(fused_remat.values, joint), joint, key=lambda joint: joint.more_us
            )
    return FusedRematCosts(by_reductions, tuple(found.values()))


def _more_us(table: CandidateTable, fused_remat: Operation, replaced: Sequence[Operation]) -> float:
    """The least additional time of a launch over the one that it replaces: any of `replaced` in the same layouts: with
    others the step without a limit would be a different one. Infinite where there is none."""
    found = math.inf
    for candidate in table.offered(fused_remat):
        layouts = _layouts(fused_remat, candidate)
        times_us = (
            other.time_us
            for launch in replaced
            for other in table.offered(launch)
            if all(layouts.get(name, layout) == layout for name, layout in _layouts(launch, other).items())
        )
        found = min(found, max(0.0, candidate.time_us - min(times_us, default=-math.inf)))
    return found


def _layouts(launch: Operation, candidate: Candidate) -> Mapping[str, Layout]:
    return dict(zip((*launch.inputs, *launch.outputs), candidate.layouts, strict=True))

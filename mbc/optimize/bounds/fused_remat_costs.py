"""The least additional time of fused rematerialization, for the lower bound within a budget.

`mbc.optimize.remat.fused_remat` describes the technique.
"""

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
    """Two values that one launch of reductions can recompute together, and its additional time.

    Attributes:
        first: The value that is computed first.
        last: The value that is computed from it.
        reductions: Name of the operation whose launch recomputes them.
        more_us: Additional microseconds of that launch.
    """

    first: str
    last: str
    reductions: str
    more_us: float


@dataclass(frozen=True, slots=True)
class FusedRematCosts:
    """Additional times of the launches that recompute values.

    Attributes:
        by_reductions: For each value, additional microseconds of every launch of reductions that recomputes it, by
            itself or with another value.
        joint: Pairs of values that one launch recomputes.
    """

    by_reductions: Mapping[str, Mapping[str, float]]
    joint: Sequence[JointRemat]

    @property
    def pairs(self) -> Sequence[JointRemat]:
        """Pairs in which the first value is recomputed jointly with no other value. They have one joint price."""
        times = Counter(joint.first for joint in self.joint)
        return tuple(joint for joint in self.joint if times[joint.first] == 1)

    def recompute_us(self, values: Iterable[str], own_launch_us: float) -> float:
        """Return the least time to recompute the values of one operation.

        If a value is recomputed jointly with another value, its price is the additional time of the joint launch less
        the price of the other value. So both prices together are at most that launch's time.

        Args:
            values: Names of the operation's outputs.
            own_launch_us: Time to recompute them by launches of their own.
        """
        return min((own_launch_us, *(min(self.least_us(value), self.joint_us(value)) for value in values)))

    def pair_us(self, joint: JointRemat, first_own_us: float, last_own_us: float) -> tuple[float, float, float]:
        """Return the costs of recomputing the first value, the last value, and both.

        The two share a launch only where both are absent. Otherwise these reductions recompute one of them at most.

        Args:
            joint: The two values.
            first_own_us: Time to recompute the first value by launches of its own.
            last_own_us: Time to recompute the last value by launches of its own.
        """
        first_us = min(first_own_us, self.least_us(joint.first))
        last_us = min(last_own_us, self.least_us(joint.last))
        first_elsewhere_us = min(first_own_us, self.least_us(joint.first, without=joint.reductions))
        last_elsewhere_us = min(last_own_us, self.least_us(joint.last, without=joint.reductions))
        both_us = min(joint.more_us, first_elsewhere_us + last_us, first_us + last_elsewhere_us)
        return first_us, last_us, both_us

    def least_us(self, value: str, without: str = "") -> float:
        """Return the least additional time by any reductions except those named `without`; infinite without any."""
        return min(
            (us for reductions, us in self.by_reductions.get(value, {}).items() if reductions != without),
            default=math.inf,
        )

    def joint_us(self, value: str) -> float:
        """Return the least additional time jointly with another value, less the price of that other value."""
        shared = (joint for joint in self.joint if joint.first == value)
        return min(
            (joint.more_us - self.by_reductions[joint.last][joint.reductions] for joint in shared), default=math.inf
        )


def fused_remat_costs(table: CandidateTable, launches: Iterable[Operation]) -> FusedRematCosts:
    """Return the additional times of fused rematerialization in a step.

    Args:
        table: Candidates of the step.
        launches: All launches that a step without a limit may contain.
    """
    reductions: dict[str, list[Operation]] = {}
    for launch in launches:
        reductions.setdefault(names_of(launch)[-1], []).append(launch)
    by_reductions: dict[str, dict[str, float]] = {}
    joints: dict[tuple[str, ...], JointRemat] = {}
    for fused_remat in fused_remats_of(table):
        name = names_of(fused_remat.operation)[-1]
        more_us = _more_us(
            table, fused_remat.operation, tuple(filter(fused_remat.can_replace, reductions.get(name, ())))
        )
        if more_us == math.inf:
            continue
        for value in fused_remat.values:
            times_us = by_reductions.setdefault(value, {})
            times_us[name] = min(times_us.get(name, math.inf), more_us)
        if len(fused_remat.values) > 1:
            first, last = fused_remat.values
            joint = JointRemat(first, last, name, more_us)
            joints[fused_remat.values] = min(
                joints.get(fused_remat.values, joint), joint, key=lambda joint: joint.more_us
            )
    return FusedRematCosts(by_reductions, tuple(joints.values()))


def _more_us(table: CandidateTable, fused_remat: Operation, replaced: Sequence[Operation]) -> float:
    """Return the least additional time of a launch over the one that it replaces; infinite if it cannot run.

    The replaced launch is any of `replaced` with the same layouts: with other layouts, the step without a limit would
    be a different one.
    """
    least_us = math.inf
    for candidate in table.offered(fused_remat):
        layouts = _layouts(fused_remat, candidate)
        times_us = (
            other.time_us
            for launch in replaced
            for other in table.offered(launch)
            if all(layouts.get(name, layout) == layout for name, layout in _layouts(launch, other).items())
        )
        least_us = min(least_us, max(0.0, candidate.time_us - min(times_us, default=-math.inf)))
    return least_us


def _layouts(launch: Operation, candidate: Candidate) -> Mapping[str, Layout]:
    return dict(zip((*launch.inputs, *launch.outputs), candidate.layouts, strict=True))

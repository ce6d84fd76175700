"""The gain of a larger budget, estimated from a plan alone.

The estimate asks which absent values would fit, and how much faster the launches would be without recomputing and
copying these values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.plan.techniques import Offloaded, Recomputed
from mbc.report.html.facts import Facts
from mbc.report.timeline import time_with


@dataclass(frozen=True, slots=True)
class Absent:
    """Values that one technique keeps out of the arena for a while, and the cost to kernels."""

    of: Recomputed | Offloaded
    values: tuple[str, ...]
    cost_us: float

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values."""
        return self.of.saved_bytes


def absent_values(facts: Facts) -> list[Absent]:
    """Return all absent values, those with the highest cost per byte first."""
    absent = [Absent(one, one.outputs, one.time_us) for one in facts.techniques.recomputed]
    absent += [Absent(one, (one.value,), facts.costs.of(one)) for one in facts.techniques.offloaded]
    return sorted(absent, key=lambda one: -one.cost_us / max(1, one.saved_bytes))


def kept_with(facts: Facts, absent: Sequence[Absent], more_bytes: int) -> list[Absent]:
    """Choose absent values, in the given order, that would fit at every launch with `more_bytes` more of budget."""
    live = np.array(facts.curve.total_bytes, dtype=np.int64)
    limit = facts.plan.arena_budget_bytes + more_bytes
    kept: list[Absent] = []
    for one in absent:
        during = live[slice(*one.of.absent)]
        if during.max(initial=0) + one.saved_bytes <= limit:
            during += one.saved_bytes
            kept.append(one)
    return kept


def time_saved(facts: Facts, kept: Sequence[Absent]) -> float:
    """Return how much faster the program is without recomputing and copying these values, in microseconds."""
    launches = facts.program.launches
    times_us: dict[int, float] = {}
    for one in kept:
        alone_us = sum(launches[i].work.time_us for i in one.of.launches)
        rest = 1 - one.of.time_us / alone_us if alone_us else 1.0  # only a part of a fused launch is recomputing
        for i in one.of.launches:
            times_us[i] = max(0.0, times_us.get(i, launches[i].work.time_us) - (1 - rest) * launches[i].work.time_us)
    return facts.times.total_us - time_with(facts.device, facts.plan, facts.program, times_us)

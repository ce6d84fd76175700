"""What a larger budget would buy, estimated from a plan alone: which absent values would fit, and how much shorter the
same launches would be without recomputing and copying these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.plan.techniques import Offloaded, Recomputed
from mbc.report.html.facts import Facts
from mbc.report.timeline import time_with


@dataclass(frozen=True, slots=True)
class Absent:
    """Values that are out of the arena for a while, by one technique, and what that costs the kernels."""

    of: Recomputed | Offloaded
    values: tuple[str, ...]
    cost_us: float

    @property
    def saved_bytes(self) -> int:
        return self.of.saved_bytes


def absent_values(facts: Facts) -> list[Absent]:
    """All, those that cost most time a byte first."""
    found = [Absent(one, one.outputs, one.time_us) for one in facts.techniques.recomputed]
    found += [Absent(one, (one.value,), facts.costs.of(one)) for one in facts.techniques.offloaded]
    return sorted(found, key=lambda one: -one.cost_us / max(1, one.saved_bytes))


def kept_with(facts: Facts, absent: Sequence[Absent], more_bytes: int) -> list[Absent]:
    """Those that would fit at every launch, taken in this order, if the budget left `more_bytes` more."""
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
    """Microseconds of the program that it takes less without recomputing and copying these values."""
    launches = facts.program.launches
    times_us: dict[int, float] = {}
    for one in kept:
        alone_us = sum(launches[i].work.time_us for i in one.of.launches)
        rest = 1 - one.of.time_us / alone_us if alone_us else 1.0  # of a fused launch a part is recomputing
        for i in one.of.launches:
            times_us[i] = max(0.0, times_us.get(i, launches[i].work.time_us) - (1 - rest) * launches[i].work.time_us)
    return facts.times.total_us - time_with(facts.device, facts.plan, facts.program, times_us)

"""Bytes of the arena by kind, launch by launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from mbc.plan.live import Kind, kinds_of_values, stays
from mbc.plan.model import Plan, Program


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """`bytes_by_kind[kind][i]` is taken while launch i runs. All kinds are there, also those without a byte."""

    bytes_by_kind: Mapping[Kind, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.bytes_by_kind.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes)

    @property
    def peak_launch(self) -> int:
        """The first launch at which most bytes are taken."""
        total = self.total_bytes
        return total.index(max(total))

    def at(self, launch: int) -> Mapping[Kind, int]:
        """Bytes by kind at one launch, without those that have none."""
        return {kind: taken[launch] for kind, taken in self.bytes_by_kind.items() if taken[launch]}


def memory_curve(plan: Plan, program: Program) -> MemoryCurve:
    """Bytes of the arena by kind over the launches of one program, sizes rounded up to the alignment."""
    kinds = kinds_of_values(plan.graph)
    count = max(1, len(program.launches))
    changes = {kind: [0] * (count + 1) for kind in Kind}
    for stay in stays(plan, program):
        # The bytes are for one member until the next one takes them over.
        ends = (*stay.since[1:], stay.stop)
        starts = (stay.start, *stay.since[1:])
        for member, start, stop in zip(stay.members, starts, ends, strict=True):
            value = plan.buffers[member].value
            kind = Kind.WORKSPACE if value is None else kinds[value]
            changes[kind][start] += stay.size_bytes
            changes[kind][stop] -= stay.size_bytes
    return MemoryCurve({kind: tuple(accumulate(change[:-1])) for kind, change in changes.items()})

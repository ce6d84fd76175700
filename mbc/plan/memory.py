"""Bytes of the arena by kind, launch by launch, and those of the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from mbc.plan.live import Kind, kinds_of_values, lifetimes, rounded, stays
from mbc.plan.model import Plan, Program, Space


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


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of the arena that one value (None: workspace) holds, from launch `start` to before launch `stop`."""

    value: str | None
    kind: Kind
    size_bytes: int
    start: int
    stop: int


def taken_at(plan: Plan, program: Program, launch: int) -> tuple[Taken, ...]:
    """What takes the arena while a launch runs, the largest first."""
    kinds = kinds_of_values(plan.graph)
    found: list[Taken] = []
    for stay in stays(plan, program):
        if stay.start <= launch < stay.stop:
            # The bytes belong to the last member that was touched by then.
            member = [m for m, since in zip(stay.members, stay.since, strict=True) if since <= launch or since == 0]
            value = plan.buffers[member[-1] if member else stay.members[0]].value
            kind = Kind.WORKSPACE if value is None else kinds[value]
            found.append(Taken(value, kind, stay.size_bytes, stay.start, stay.stop))
    return tuple(sorted(found, key=lambda taken: (-taken.size_bytes, taken.start, taken.value or "")))


def host_curve(plan: Plan, program: Program) -> tuple[int, ...]:
    """Bytes of host memory that hold something while each launch runs, sizes rounded up to the alignment."""
    count = max(1, len(program.launches))
    changes = [0] * (count + 1)
    for buffer, (start, stop) in lifetimes(program).items():
        if plan.buffers[buffer].space is Space.HOST:
            changes[start] += rounded(plan.buffers[buffer].size_bytes)
            changes[stop] -= rounded(plan.buffers[buffer].size_bytes)
    return tuple(accumulate(changes[:-1]))

"""Bytes of the arena by kind, launch by launch, and those outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mbc.plan.live import Held, Kind, held_in, lifetimes, rounded
from mbc.plan.model import Plan, Program, Space


@dataclass(frozen=True)
class MemoryCurve:
    """`bytes_by_kind[kind][i]` is live while launch i runs. All kinds are there, also those without a byte."""

    bytes_by_kind: Mapping[Kind, tuple[int, ...]]

    @cached_property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.bytes_by_kind.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes)

    @cached_property
    def peak_launch(self) -> int:
        """The first launch at the peak of live bytes."""
        total = self.total_bytes
        return total.index(max(total))

    def at(self, launch: int) -> Mapping[Kind, int]:
        """Bytes by kind at one launch, without those that have none."""
        return {kind: taken[launch] for kind, taken in self.bytes_by_kind.items() if taken[launch]}


def memory_curve(plan: Plan, program: Program, known: Held | None = None) -> MemoryCurve:
    """Bytes of the arena by kind over the launches of one program, sizes rounded up to the alignment."""
    held = held_in(plan, program) if known is None else known
    count = max(1, len(program.launches))
    changes = {kind: [0] * (count + 1) for kind in Kind}
    for live_range in held.ranges:
        for member, start, stop in live_range.stays:
            value = plan.buffers[member].value
            change = changes[Kind.WORKSPACE if value is None else held.kinds[value]]
            change[start] += live_range.size_bytes
            change[stop] -= live_range.size_bytes
    return MemoryCurve({kind: tuple(accumulate(change[:-1])) for kind, change in changes.items()})


@dataclass(frozen=True, slots=True)
class LiveValue:
    """Bytes of the arena that one value (None: workspace) holds, from launch `start` to before launch `stop`."""

    value: str | None
    kind: Kind
    size_bytes: int
    start: int
    stop: int


def live_values_at(plan: Plan, program: Program, launch: int, known: Held | None = None) -> tuple[LiveValue, ...]:
    """The values that are live in the arena while a launch runs, the largest first."""
    held = held_in(plan, program) if known is None else known
    found: list[LiveValue] = []
    for live_range in held.ranges:
        if live_range.start <= launch < live_range.stop:
            # The bytes belong to the last member that was touched by then.
            member = [
                m
                for m, since in zip(live_range.members, live_range.since, strict=True)
                if since <= launch or since == 0
            ]
            value = plan.buffers[member[-1] if member else live_range.members[0]].value
            kind = Kind.WORKSPACE if value is None else held.kinds[value]
            found.append(LiveValue(value, kind, live_range.size_bytes, live_range.start, live_range.stop))
    return tuple(sorted(found, key=lambda taken: (-taken.size_bytes, taken.start, taken.value or "")))


def outside_curve(plan: Plan, program: Program, space: Space) -> tuple[int, ...]:
    """Bytes of host memory, or a peer's, that hold something while each launch runs, sizes rounded up to the
    alignment."""
    count = max(1, len(program.launches))
    changes = [0] * (count + 1)
    for buffer, (start, stop) in lifetimes(program).items():
        if plan.buffers[buffer].space is space:
            changes[start] += rounded(plan.buffers[buffer].size_bytes)
            changes[stop] -= rounded(plan.buffers[buffer].size_bytes)
    return tuple(accumulate(changes[:-1]))

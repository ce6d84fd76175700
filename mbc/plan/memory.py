"""Bytes of the arena by kind, launch by launch, and bytes outside the arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mbc.hardware.streams import Space
from mbc.plan.live import Held, Kind, held_in, lifetimes, rounded
from mbc.plan.model import Plan, Program


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes of the arena by kind over the launches of a program.

    `bytes_by_kind[kind][i]` is live while launch i runs. All kinds are present, also those without a byte.
    """

    bytes_by_kind: Mapping[Kind, tuple[int, ...]]

    @cached_property
    def total_bytes(self) -> tuple[int, ...]:
        """Live bytes of all kinds at each launch."""
        return tuple(map(sum, zip(*self.bytes_by_kind.values(), strict=True)))

    @property
    def peak_bytes(self) -> int:
        """Peak live bytes."""
        return max(self.total_bytes)

    @cached_property
    def peak_launch(self) -> int:
        """The first launch at the peak of live bytes."""
        total = self.total_bytes
        return total.index(max(total))

    def at(self, launch: int) -> Mapping[Kind, int]:
        """Return the bytes by kind at one launch, without kinds that have none."""
        return {kind: taken[launch] for kind, taken in self.bytes_by_kind.items() if taken[launch]}


def memory_curve(plan: Plan, program: Program, held: Held | None = None) -> MemoryCurve:
    """Return the bytes of the arena by kind over the launches of one program, sizes rounded up to the alignment.

    Args:
        plan: The plan.
        program: One of its programs.
        held: The result of `held_in(plan, program)`, if the caller has it.
    """
    held = held_in(plan, program) if held is None else held
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


def live_values_at(plan: Plan, program: Program, launch: int, held: Held | None = None) -> tuple[LiveValue, ...]:
    """Return the values that are live in the arena while a launch runs, the largest first.

    Args:
        plan: The plan.
        program: One of its programs.
        launch: Index of the launch.
        held: The result of `held_in(plan, program)`, if the caller has it.
    """
    held = held_in(plan, program) if held is None else held
    live_values: list[LiveValue] = []
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
            live_values.append(LiveValue(value, kind, live_range.size_bytes, live_range.start, live_range.stop))
    return tuple(sorted(live_values, key=lambda taken: (-taken.size_bytes, taken.start, taken.value or "")))


def outside_curve(plan: Plan, program: Program, space: Space) -> tuple[int, ...]:
    """Return the live bytes of `space`, host or peer, while each launch runs, sizes rounded up to the alignment."""
    count = max(1, len(program.launches))
    changes = [0] * (count + 1)
    for buffer, (start, stop) in lifetimes(program).items():
        if plan.buffers[buffer].space is space:
            changes[start] += rounded(plan.buffers[buffer].size_bytes)
            changes[stop] -= rounded(plan.buffers[buffer].size_bytes)
    return tuple(accumulate(changes[:-1]))

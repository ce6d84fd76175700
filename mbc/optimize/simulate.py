"""The predicted time of a program: each stream runs its launches in order and stops for its waits."""

from __future__ import annotations

from collections.abc import Sequence

from mbc.plan.model import Program, Stream


def simulate(program: Program, times_us: Sequence[float] | None = None) -> float:
    """Microseconds from the first launch to the end of the last. `times_us`: of each launch, in place of its own."""
    if times_us is None:
        times_us = [launch.work.time_us for launch in program.launches]
    if not program.waits:
        busy: dict[Stream, float] = {}
        for launch, time_us in zip(program.launches, times_us, strict=True):
            busy[launch.stream] = busy.get(launch.stream, 0.0) + time_us
        return max(busy.values(), default=0.0)
    waits: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waits.setdefault(later, []).append(earlier)
    ends: list[float] = []
    free: dict[Stream, float] = {}
    for i, launch in enumerate(program.launches):
        start = max([free.get(launch.stream, 0.0), *(ends[j] for j in waits.get(i, ()))])
        ends.append(start + times_us[i])
        free[launch.stream] = ends[-1]
    return max(ends, default=0.0)


def measured_share(program: Program) -> float:
    """The part of the summed launch times that was measured, 0 to 1."""
    total = sum(launch.work.time_us for launch in program.launches)
    measured = sum(launch.work.time_us for launch in program.launches if launch.work.measured)
    return measured / total if total else 0.0

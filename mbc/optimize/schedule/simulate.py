"""The predicted time of a program: each stream runs its launches in order and stalls at its waits.

Concurrent launches slow down one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import COPY_STREAMS, STREAM_FROM, STREAM_TO, Space, Stream
from mbc.hardware.transfers import Slowdown
from mbc.plan.model import Copy, Program

_IDLE_US = 1e-9  # a launch with less time left has ended: this absorbs rounding


@dataclass(frozen=True, slots=True)
class LinkContention:
    """The effect of copies over one link.

    Attributes:
        slowdowns: Slowdown of each kernel while the copies run; unused for other launches.
        out: Time of a copy from the GPU while the other direction is busy, relative to that alone.
        back: Time of a copy to the GPU while the other direction is busy, relative to that alone.
        beside: Time of a copy while another link is busy, relative to that alone.
    """

    slowdowns: tuple[Slowdown, ...]
    out: float
    back: float
    beside: float = 1.0


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdowns of concurrent launches by one another.

    Attributes:
        links: Contention of copies, by the space at their other end.
        fills: Share of the GPU that each kernel fills, 0 to 1: two concurrent kernels whose shares exceed 1 slow down.
        wait_us: Additional time of a kernel that waits for one of the other stream of kernels.
        copy_wait_us: Additional time of a kernel at either end of a wait for a copy.
        beside_collective: Slowdown of each kernel while a collective runs; empty if none does.
        collective: Slowdown of a collective while each kernel runs.
    """

    links: Mapping[Space, LinkContention]
    fills: tuple[float, ...]
    wait_us: float = 0.0
    copy_wait_us: float = 0.0
    beside_collective: tuple[float, ...] = ()
    collective: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of all launches, in microseconds from the start of the program.

    Attributes:
        starts_us: Start of each launch.
        ends_us: End of each launch.
        stalls_us: Time before each launch for which its stream was idle, that is, waited for launches of other streams.
        synchronise_us: Additional time of each launch because it is at an end of a wait between two streams.
    """

    starts_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    stalls_us: tuple[float, ...]
    synchronise_us: tuple[float, ...]

    @property
    def total_us(self) -> float:
        """End of the last launch."""
        return max(self.ends_us, default=0.0)


def simulate(program: Program, times_us: Sequence[float] | None = None, contention: Contention | None = None) -> float:
    """Return the microseconds from the first launch to the end of the last.

    Args:
        program: The program.
        times_us: Time of each launch alone, in the place of its own.
        contention: How launches slow down one another; None: they do not.
    """
    if not program.waits and contention is None:
        busy: dict[Stream, float] = {}
        for launch, time_us in zip(program.launches, _alone(program, times_us), strict=True):
            busy[launch.stream] = busy.get(launch.stream, 0.0) + time_us
        return max(busy.values(), default=0.0)
    return timeline(program, times_us, contention).total_us


def timeline(
    program: Program, times_us: Sequence[float] | None = None, contention: Contention | None = None
) -> Timeline:
    """Return when each launch runs; arguments as for `simulate`."""
    alone_us = _alone(program, times_us)
    waits: dict[int, list[int]] = {}
    for earlier, later in program.waits:
        waits.setdefault(later, []).append(earlier)
    if contention is None or all(launch.stream is Stream.COMPUTE for launch in program.launches):
        return _undisturbed(program, alone_us, waits)
    return _disturbed(program, alone_us, waits, contention)


def _alone(program: Program, times_us: Sequence[float] | None) -> Sequence[float]:
    return [launch.work.time_us for launch in program.launches] if times_us is None else times_us


def _undisturbed(program: Program, alone_us: Sequence[float], waits: dict[int, list[int]]) -> Timeline:
    starts: list[float] = []
    ends: list[float] = []
    stalls: list[float] = []
    free: dict[Stream, float] = {}
    for i, launch in enumerate(program.launches):
        ready = free.get(launch.stream, 0.0)
        starts.append(max([ready, *(ends[j] for j in waits.get(i, ()))]))
        stalls.append(starts[-1] - ready)
        ends.append(starts[-1] + alone_us[i])
        free[launch.stream] = ends[-1]
    return Timeline(tuple(starts), tuple(ends), tuple(stalls), (0.0,) * len(starts))


def _disturbed(
    program: Program, alone_us: Sequence[float], waits: dict[int, list[int]], contention: Contention
) -> Timeline:
    """Return the timeline where running launches progress at the rate that contention with one another allows.

    The rates change when a launch ends.
    """
    count = len(program.launches)
    waiting_us = _waiting_us(program, contention)
    alone_us = [time + wait for time, wait in zip(alone_us, waiting_us, strict=True)]
    queues = {stream: deque[int]() for stream in Stream}
    for i, launch in enumerate(program.launches):
        queues[launch.stream].append(i)
    starts, stalls = [0.0] * count, [0.0] * count
    ends: list[float | None] = [None] * count
    free = dict.fromkeys(Stream, 0.0)
    running: dict[Stream, int] = {}
    left_us: dict[Stream, float] = {}
    now = 0.0
    while running or any(queues.values()):
        for stream, queue in queues.items():
            if stream in running or not queue or any(ends[j] is None for j in waits.get(queue[0], ())):
                continue
            i = queue.popleft()
            starts[i], stalls[i] = now, now - free[stream]
            running[stream], left_us[stream] = i, alone_us[i]
        if not running:
            raise ValueError("launches wait for each other")
        slower = _slower(running, contention)
        passed = min(left_us[stream] * slower[stream] for stream in running)
        now += passed
        for stream in tuple(running):
            left_us[stream] -= passed / slower[stream]
            if left_us[stream] <= _IDLE_US:
                ends[running.pop(stream)] = free[stream] = now
    done = tuple(end for end in ends if end is not None)
    return Timeline(tuple(starts), done, tuple(stalls), tuple(waiting_us))


def _waiting_us(program: Program, contention: Contention) -> list[float]:
    """Return the additional time of each launch at an end of a wait between two streams."""
    waiting_us = [0.0] * len(program.launches)
    for earlier, later in program.waits:
        first, second = program.launches[earlier].stream, program.launches[later].stream
        if first in COPY_STREAMS:
            if second is Stream.COMPUTE:
                waiting_us[later] = max(waiting_us[later], contention.copy_wait_us)
        elif second in COPY_STREAMS:
            if first is Stream.COMPUTE:
                waiting_us[earlier] = max(waiting_us[earlier], contention.copy_wait_us)
        elif first is not second:
            waiting_us[later] = max(waiting_us[later], contention.wait_us)
    return waiting_us


def _slower(running: dict[Stream, int], contention: Contention) -> dict[Stream, float]:
    """Return the slowdown of each running launch relative to running alone."""
    slowdowns = dict.fromkeys(running, 1.0)
    busy = {space: (STREAM_TO[space] in running, STREAM_FROM[space] in running) for space in contention.links}
    busy = {space: lanes for space, lanes in busy.items() if any(lanes)}
    for space, lanes in busy.items():
        link, beside = contention.links[space], contention.links[space].beside if len(busy) > 1 else 1.0
        slowdowns[STREAM_TO[space]] = beside * (link.out if all(lanes) else 1.0)
        slowdowns[STREAM_FROM[space]] = beside * (link.back if all(lanes) else 1.0)
    kernels = [stream for stream in (Stream.COMPUTE, Stream.CONCURRENT) if stream in running]
    crowd = max(1.0, sum(contention.fills[running[stream]] for stream in kernels)) if len(kernels) > 1 else 1.0
    for stream in kernels:
        slowdowns[stream] = crowd
        for space, (out, back) in busy.items():
            slowdown = contention.links[space].slowdowns[running[stream]]
            slowdowns[stream] *= slowdown.both if out and back else slowdown.out if out else slowdown.back
        if Stream.COLLECTIVE in running and contention.beside_collective:
            slowdowns[stream] *= contention.beside_collective[running[stream]]
    if Stream.COLLECTIVE in running:
        slower = [contention.collective[running[stream]] for stream in kernels if contention.collective]
        slowdowns[Stream.COLLECTIVE] = max(slower, default=1.0)
    return slowdowns


def measured_share(program: Program) -> float:
    """Return the part of the summed times of kernels that was measured, 0 to 1.

    Copies do not count: they run beside kernels, and their links are measured. A step is an estimate where its kernels
    are estimated.
    """
    kernels = [launch.work for launch in program.launches if not isinstance(launch.work, Copy)]
    total = sum(kernel.time_us for kernel in kernels)
    return sum(kernel.time_us for kernel in kernels if kernel.measured) / total if total else 0.0

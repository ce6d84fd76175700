"""The predicted timeline of a program, and the cost of its copies to the compute stream.

Kernels wait for copies, take longer at either end of a wait for a copy (decision 020), and are slower beside copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import COPY_STREAMS, Stream
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.simulate import Timeline, simulate, timeline
from mbc.plan.model import Copy, Plan, Program
from mbc.plan.techniques import Offloaded
from mbc.report.devices import device_of
from mbc.units import show_time

_SHOWN_US = 0.005  # shorter times would be shown as 0.00 us


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of the compute stream: `time_us` before `launch`, for the end of the copy `cause`."""

    launch: int
    cause: int
    time_us: float


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """The time that copies add to a program.

    Attributes:
        copies: Number of copies.
        total_us: Time that the program would be faster without copies, in microseconds.
        stall_us: Part of it in which the compute stream waits for copies.
        synchronised: Number of kernels at an end of a wait for a copy.
        synchronise_us: Part of `total_us` that these kernels take longer.
        by_copy: Both parts by the launch of the copy; copies that synchronise with one kernel share its cost.
    """

    copies: int
    total_us: float
    stall_us: float
    synchronised: int
    synchronise_us: float
    by_copy: Mapping[int, float]

    def of(self, offloaded: Offloaded) -> float:
        """Return the cost of the copies of one value, in microseconds."""
        return sum(self.by_copy.get(launch, 0.0) for launch in offloaded.launches)

    def text(self, share: str = "") -> str:
        """Format the cost in one sentence, with `share` in parentheses.

        For example: `the 14 copies cost about 140.0 us (2.1 %): 20 kernels take 7.00 us longer each to synchronise with
        them`.
        """
        parts: list[str] = []
        if self.synchronised:
            each = show_time(self.synchronise_us / self.synchronised)
            parts.append(f"{self.synchronised} kernels take {each} longer each to synchronise with them")
        if self.stall_us > _SHOWN_US:
            parts.append(f"kernels wait {show_time(self.stall_us)} for them")
        slower_us = self.total_us - self.stall_us - self.synchronise_us
        if slower_us > _SHOWN_US:
            parts.append(f"kernels are {show_time(slower_us)} slower while they run")
        reasons = f": {', '.join(parts)}" if parts else ""
        return (
            f"the {self.copies} copies cost about {show_time(self.total_us)}{f' ({share})' if share else ''}{reasons}"
        )


def predicted_timeline(plan: Plan, program: Program) -> Timeline:
    """Return when each launch runs, with the effect of copies on concurrent kernels where the GPU is known."""
    return timeline_on(device_of(plan), plan, program)


def timeline_on(device: DeviceSpec | None, plan: Plan, program: Program) -> Timeline:
    """Return the timeline for a given `device_of` the plan."""
    return timeline(
        program, contention=None if device is None else contention(program, plan.graph, plan.buffers, device)
    )


def stalls(program: Program, times: Timeline) -> tuple[Stall, ...]:
    """Return every stall of the compute stream that ends with a copy, in order.

    The cause of a stall is the copy that ends last. Waits for kernels of the concurrent stream are not stalls, since
    these kernels are work of the step.
    """
    causes: dict[int, int] = {}
    for earlier, later in program.waits:
        if later not in causes or times.ends_us[earlier] > times.ends_us[causes[later]]:
            causes[later] = earlier
    return tuple(
        Stall(i, causes[i], times.stalls_us[i])
        for i, launch in enumerate(program.launches)
        if launch.stream is Stream.COMPUTE and i in causes and times.stalls_us[i] > 0
        if isinstance(program.launches[causes[i]].work, Copy)
    )


def copy_costs(device: DeviceSpec | None, plan: Plan, program: Program, times: Timeline) -> CopyCosts:
    """Return the cost of the copies of a program with this predicted timeline."""
    copies = [i for i, launch in enumerate(program.launches) if launch.stream in COPY_STREAMS]
    if not copies:
        return CopyCosts(0, 0.0, 0.0, 0, 0.0, {})
    beside: dict[int, set[int]] = {}  # copies that each kernel of the compute stream synchronises with
    for pair in program.waits:
        for copy, kernel in (pair, pair[::-1]):
            streams = program.launches[copy].stream, program.launches[kernel].stream
            if streams[0] in COPY_STREAMS and streams[1] is Stream.COMPUTE and times.synchronise_us[kernel]:
                beside.setdefault(kernel, set()).add(copy)
    stalled = stalls(program, times)
    by_copy = dict.fromkeys(copies, 0.0)
    for kernel, shared in beside.items():
        for copy in shared:
            by_copy[copy] += times.synchronise_us[kernel] / len(shared)
    for stall in stalled:
        by_copy[stall.cause] = by_copy.get(stall.cause, 0.0) + stall.time_us
    return CopyCosts(
        len(copies),
        max(0.0, times.total_us - time_with(device, plan, program, dict.fromkeys(copies, 0.0))),
        sum(stall.time_us for stall in stalled),
        len(beside),
        sum(times.synchronise_us[kernel] for kernel in beside),
        by_copy,
    )


def time_with(device: DeviceSpec | None, plan: Plan, program: Program, times_us: Mapping[int, float]) -> float:
    """Return the time of a program if some launches took other times alone, in microseconds.

    A copy that takes no time is left out, with all waits that involve it.
    """
    gone = {i for i, time_us in times_us.items() if not time_us and program.launches[i].stream in COPY_STREAMS}
    changed = replace(program, waits=tuple(pair for pair in program.waits if gone.isdisjoint(pair)))
    alone_us = [times_us.get(i, launch.work.time_us) for i, launch in enumerate(program.launches)]
    serial = all(launch.stream is Stream.COMPUTE or i in gone for i, launch in enumerate(program.launches))
    # Without copies, kernels of one stream add up, which is faster to compute for a deep network.
    slowed = None if device is None or serial else contention(changed, plan.graph, plan.buffers, device)
    return simulate(changed, alone_us, slowed)

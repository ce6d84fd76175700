"""The predicted timeline of a program, and what its copies cost the compute stream by it: kernels wait until a copy has
ended, take longer at either end of a wait for a copy (decision 020), and are slower while copies run."""

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

_SHOWN_US = 0.005  # what is less is shown as 0.00 us


@dataclass(frozen=True, slots=True)
class Stall:
    """The compute stream waits `time_us` before `launch` for the end of `cause`, a copy."""

    launch: int
    cause: int
    time_us: float


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """How much longer a program takes for its copies, `total_us`, and of that: `stall_us`, for which the compute stream
    waits until copies have ended, and `synchronise_us`, which `synchronised` of its kernels take longer because they
    are at an end of a wait for a copy. `by_copy`: these two by the launch of the copy; copies that synchronise with
    one kernel share it."""

    copies: int
    total_us: float
    stall_us: float
    synchronised: int
    synchronise_us: float
    by_copy: Mapping[int, float]

    def of(self, offloaded: Offloaded) -> float:
        """Of the copies of one value."""
        return sum(self.by_copy.get(launch, 0.0) for launch in offloaded.launches)

    def text(self, share: str = "") -> str:
        """`the 14 copies cost about 140.0 us (2.1 %): 20 kernels take 7.00 us longer each to synchronise with them`;
        `share` is what stands in parentheses."""
        parts: list[str] = []
        if self.synchronised:
            each = show_time(self.synchronise_us / self.synchronised)
            parts.append(f"{self.synchronised} kernels take {each} longer each to synchronise with them")
        if self.stall_us > _SHOWN_US:
            parts.append(f"kernels wait {show_time(self.stall_us)} for them")
        slower_us = self.total_us - self.stall_us - self.synchronise_us
        if slower_us > _SHOWN_US:
            parts.append(f"kernels are {show_time(slower_us)} slower while they run")
        told = f": {', '.join(parts)}" if parts else ""
        return f"the {self.copies} copies cost about {show_time(self.total_us)}{f' ({share})' if share else ''}{told}"


def predicted_timeline(plan: Plan, program: Program) -> Timeline:
    """When each launch runs, with what copies cost the kernels that run concurrently where the GPU is a known one."""
    return timeline_on(device_of(plan), plan, program)


def timeline_on(device: DeviceSpec | None, plan: Plan, program: Program) -> Timeline:
    """The same where `device_of` the plan is known already."""
    return timeline(
        program, contention=None if device is None else contention(program, plan.graph, plan.buffers, device)
    )


def stalls(program: Program, times: Timeline) -> tuple[Stall, ...]:
    """Every stall of the compute stream, in order, for which a copy is to blame: it ends last of what is waited for.
    Waiting for kernels of the concurrent stream is none, since these are work of the step."""
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
    """Of a program with this predicted timeline."""
    copies = [i for i, launch in enumerate(program.launches) if launch.stream in COPY_STREAMS]
    if not copies:
        return CopyCosts(0, 0.0, 0.0, 0, 0.0, {})
    beside: dict[int, set[int]] = {}  # copies that each kernel of the compute stream synchronises with
    for pair in program.waits:
        for copy, kernel in (pair, pair[::-1]):
            streams = program.launches[copy].stream, program.launches[kernel].stream
            if streams[0] in COPY_STREAMS and streams[1] is Stream.COMPUTE and times.synchronise_us[kernel]:
                beside.setdefault(kernel, set()).add(copy)
    found = stalls(program, times)
    by_copy = dict.fromkeys(copies, 0.0)
    for kernel, shared in beside.items():
        for copy in shared:
            by_copy[copy] += times.synchronise_us[kernel] / len(shared)
    for stall in found:
        by_copy[stall.cause] = by_copy.get(stall.cause, 0.0) + stall.time_us
    return CopyCosts(
        len(copies),
        max(0.0, times.total_us - time_with(device, plan, program, dict.fromkeys(copies, 0.0))),
        sum(stall.time_us for stall in found),
        len(beside),
        sum(times.synchronise_us[kernel] for kernel in beside),
        by_copy,
    )


def time_with(device: DeviceSpec | None, plan: Plan, program: Program, times_us: Mapping[int, float]) -> float:
    """Microseconds of a program if some launches took other times alone; a copy that takes none is left out, with all
    waits for it and of it."""
    gone = {i for i, time_us in times_us.items() if not time_us and program.launches[i].stream in COPY_STREAMS}
    changed = replace(program, waits=tuple(pair for pair in program.waits if gone.isdisjoint(pair)))
    alone_us = [times_us.get(i, launch.work.time_us) for i, launch in enumerate(program.launches)]
    serial = all(launch.stream is Stream.COMPUTE or i in gone for i, launch in enumerate(program.launches))
    # Kernels of one stream without copies are a sum: of a deep network that is found faster.
    found = None if device is None or serial else contention(changed, plan.graph, plan.buffers, device)
    return simulate(changed, alone_us, found)

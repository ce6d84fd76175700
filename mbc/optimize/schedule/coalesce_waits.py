"""Coalesced waits: kernels wait for copies, and copies for kernels, at as few kernels as possible.

A kernel at either end of a wait for a copy starts late (decision 020). It starts no later if it is at the ends of
several waits. So a copy with slack waits for a later kernel than it must, and a kernel waits earlier than it must for a
copy that has ended by then, where waits can share a kernel. This is a minimum stabbing set of intervals: an interval
that is about to end without a point gets its last kernel, and so do all that are open then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from mbc.hardware.streams import COPY_STREAMS, Stream
from mbc.optimize import effort
from mbc.optimize.schedule.simulate import Contention, Timeline, simulate, timeline
from mbc.optimize.schedule.synchronise import essential
from mbc.plan.model import Program


def coalesce_waits(program: Program, contention: Contention | None) -> tuple[Program, float]:
    """Return the program with stronger waits where these are predicted to be faster, and its time in microseconds."""
    if contention is None or all(launch.stream not in COPY_STREAMS for launch in program.launches):
        return program, simulate(program, contention=contention)
    times = timeline(program, contention=contention)
    coalesced = replace(program, waits=essential(program.launches, _Sweep(program, times).waits()))
    time_us = simulate(coalesced, contention=contention)
    return (coalesced, time_us) if time_us < times.total_us else (program, times.total_us)


@dataclass
class _Sweep:
    """A sweep over the kernels of a program in order.

    Attributes:
        program: The program.
        times: When its launches run with the present waits.
        _after: For each copy, the last kernel that it waits for.
        _before: For each kernel, the copies that it waits for.
        _between: For each launch, its other waits.
        _ends_us: Ends of the copies whose waits are decided.
    """

    program: Program
    times: Timeline
    _after: dict[int, int] = field(default_factory=dict[int, int])
    _before: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _between: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _ends_us: dict[int, float] = field(default_factory=dict[int, float])
    _unsettled: dict[Stream, deque[int]] = field(default_factory=dict[Stream, "deque[int]"])
    _free_us: dict[Stream, float] = field(default_factory=dict[Stream, float])

    def waits(self) -> list[tuple[int, int]]:
        """Return waits at least as strong as those of the program. Waits between two kernels do not change."""
        waits: list[tuple[int, int]] = []
        streams = [launch.stream for launch in self.program.launches]
        for earlier, later in self.program.waits:
            if streams[earlier] is Stream.COMPUTE and streams[later] in COPY_STREAMS:
                self._after[later] = max(earlier, self._after.get(later, -1))
            elif streams[earlier] in COPY_STREAMS and streams[later] is Stream.COMPUTE:
                self._before.setdefault(later, []).append(earlier)
            else:
                waits.append((earlier, later))
                self._between.setdefault(later, []).append(earlier)
        return waits + self._coalesced(streams)

    def _coalesced(self, streams: Sequence[Stream]) -> list[tuple[int, int]]:
        waits: list[tuple[int, int]] = []
        latest_us = self._latest_us(streams)
        needed = {copy for copies in self._before.values() for copy in copies}  # no kernel waits for these copies yet
        awaited = {stream: deque(sorted(c for c in needed if streams[c] is stream)) for stream in COPY_STREAMS}
        waiting = sorted(self._after, key=lambda copy: (-self._after[copy], copy))
        for stream in COPY_STREAMS:
            self._unsettled[stream] = deque(i for i, other in enumerate(streams) if other is stream)
        open_: list[int] = []  # copies that may wait for the present kernel
        settled: dict[int, int] = {}
        kernels = [i for i, stream in enumerate(streams) if stream is Stream.COMPUTE]
        for kernel, following in pairwise((*kernels, len(streams))):
            while waiting and self._after[waiting[-1]] <= kernel:
                open_.append(waiting.pop())
            next_us = self.times.ends_us[following] if following < len(streams) else math.inf
            ends = any(following > copy or next_us > latest_us[copy] for copy in open_)
            if not ends and not any(copy in needed for copy in self._before.get(kernel, ())):
                continue
            waits += [(kernel, copy) for copy in open_]
            settled |= dict.fromkeys(open_, kernel)
            open_.clear()
            self._settle(settled)
            start_us = self.times.starts_us[kernel] - effort.WAIT_SLACK_US
            due = [copy for copy in self._before.get(kernel, ()) if copy in needed]
            for stream, copies in awaited.items():
                least = max([copy for copy in due if streams[copy] is stream], default=-1)
                over = -1  # copies of a stream end in order
                while (
                    copies
                    and copies[0] < kernel
                    and (copies[0] <= least or self._ends_us.get(copies[0], math.inf) <= start_us)
                ):
                    over = copies.popleft()
                    needed.remove(over)
                if over >= 0:
                    waits.append((over, kernel))
        return waits

    def _settle(self, settled: Mapping[int, int]) -> None:
        """Compute when copies end, in the order of each stream, up to the first copy that is not decided."""
        going = True
        while going:
            going = False
            for stream, copies in self._unsettled.items():
                while copies and (ready_us := self._ready_us(copies[0], settled)) is not None:
                    start_us = max(ready_us, self._free_us.get(stream, 0.0))
                    copy = copies.popleft()
                    self._ends_us[copy] = self._free_us[stream] = start_us + self._takes_us(copy)
                    going = True

    def _ready_us(self, copy: int, settled: Mapping[int, int]) -> float | None:
        """Return the time when all launches that a copy waits for have ended; None if that is not decided yet."""
        others = self._between.get(copy, ())
        if (copy in self._after and copy not in settled) or any(other not in self._ends_us for other in others):
            return None
        kernel_us = self.times.ends_us[settled[copy]] if copy in settled else 0.0
        return max([kernel_us, *(self._ends_us[other] for other in others)])

    def _takes_us(self, copy: int) -> float:
        return self.times.ends_us[copy] - self.times.starts_us[copy]

    def _latest_us(self, streams: Sequence[Stream]) -> Mapping[int, float]:
        """Return the latest start of each copy that delays no launch; at least its present start."""
        starts_us: dict[int, float] = {}
        until_us = [math.inf] * len(streams)  # latest end of each copy
        for earlier, later in self.program.waits:
            if streams[later] not in COPY_STREAMS:
                until_us[earlier] = min(until_us[earlier], self.times.starts_us[later] - effort.WAIT_SLACK_US)
        free_us = dict.fromkeys(COPY_STREAMS, self.times.total_us)
        for copy in reversed(range(len(streams))):
            stream = streams[copy]
            if stream in COPY_STREAMS:
                latest_us = min(until_us[copy], free_us[stream]) - self._takes_us(copy)
                starts_us[copy] = free_us[stream] = max(latest_us, self.times.starts_us[copy])
                for other in self._between.get(copy, ()):
                    until_us[other] = min(until_us[other], starts_us[copy])
        return starts_us

"""Offloads values to the host over the peak, and schedules their copies.

A link carries one copy in each direction at a time. So what goes out has to be out before the peak, and what comes back
starts after it; where there is time for both the offload costs nothing, and kernels wait for the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.transfers import HostLink
from mbc.optimize import effort
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region
from mbc.plan.model import Copy, Stream


class Offloader:
    """The copies of one program. `peak`: the region over which values are offloaded; `offloaded_share`: the offloaded
    share of the excess there; `stalling`: offloaded values that kernels wait for."""

    def __init__(
        self, draft: Draft, link: HostLink, regions: Sequence[Region], ledger: Ledger, host_bytes: int
    ) -> None:
        self._runs = regions
        self._ledger = ledger
        self._host_bytes = host_bytes
        self._times_us = np.array([region.time_us for region in regions] + [0.0])
        # Copies go out before the peak and back after it, so the two directions overlap only where states are offloaded
        # as well.
        busy_both = any(isinstance(launch.work, Copy) for launch in draft.train.launches)
        sizes = {b: ledger.size_bytes[b] for b in ledger.movable}
        self._out_us = {b: link.copy_us(size, Stream.TO_HOST, busy_both) for b, size in sizes.items()}
        self._back_us = {b: link.copy_us(size, Stream.TO_DEVICE, busy_both) for b, size in sizes.items()}
        self.peak = 0
        self.offloaded_share = 0.0
        self.stalling: set[int] = set()

    def offload_hidden(self, excess_bytes: NDArray[np.int64], part: float, recompute: bool) -> None:
        """Offload without a stall, until this share of the worst region's excess is offloaded, or the link is full.
        `recompute`: values that are slowest to recompute go first."""
        starts_us = self.starts_us()
        peak = self.peak = int(np.argmax(excess_bytes))
        needed = wanted = int(excess_bytes[peak] * part)
        ledger = self._ledger
        gaps = [gap for buffer in ledger.movable if (gap := ledger.gap(buffer, peak)) is not None]

        def worth(gap: Gap) -> tuple[float, int, int]:
            time_us = ledger.chain(gap.buffer, gap.before)[0] if recompute else math.inf
            return -time_us / ledger.size_bytes[gap.buffer], gap.after - gap.before, gap.buffer

        queues = self._queues(starts_us)
        host_bytes = self._host_bytes
        chosen: list[Gap] = []
        for gap in sorted(gaps, key=worth):
            if needed <= 0:
                break
            size_bytes = ledger.size_bytes[gap.buffer]
            if size_bytes > host_bytes or not self.worth_copying(gap.buffer):
                continue
            if not self._queued(queues, gap.buffer, gap.before, starts_us):
                continue
            needed -= size_bytes
            host_bytes -= size_bytes
            chosen.append(gap)
        self.offloaded_share = (wanted - needed) / max(1, int(excess_bytes[peak]))
        for gap in chosen:
            ledger.offload(gap.buffer, gap.after + 1, gap.before)
        self.schedule()

    def offload_more(self, buffers: Sequence[int]) -> None:
        """Offload more values over the peak, those that cause no stall."""
        ledger = self._ledger
        starts_us = self.starts_us()
        queues = self._queues(starts_us)
        for other in self.overlapped():
            if not self._queued(queues, other, ledger.first_read(other, ledger.offloads[other][1]), starts_us):
                return
        left_bytes = self._host_bytes - ledger.offloaded_bytes
        for buffer in buffers:
            gap = ledger.gap(buffer, self.peak)
            if gap is None or buffer in ledger.offloads or ledger.size_bytes[buffer] > left_bytes:
                continue
            if self.worth_copying(buffer) and self._queued(queues, buffer, gap.before, starts_us):
                left_bytes -= ledger.size_bytes[buffer]
                ledger.offload(buffer, gap.after + 1, gap.before)

    def overlapped(self) -> list[int]:
        """The values on the host that no kernel waits for."""
        return sorted(self._ledger.offloads.keys() - self.stalling)

    def _queues(self, starts_us: NDArray[np.float64]) -> tuple[_Queue, _Queue]:
        """The copy queues of both directions around the peak: earliest first out, latest first back."""
        return _Queue(float(starts_us[self.peak])), _Queue(-float(starts_us[min(self.peak + 1, len(starts_us) - 1)]))

    def _queued(self, queues: tuple[_Queue, _Queue], buffer: int, needed: int, starts_us: NDArray[np.float64]) -> bool:
        """Queue the copies of a value if both are over in time, together with those that are queued; whether they
        are."""
        made_us = float(starts_us[self._ledger.defined_at[buffer] + 1])
        out_us = self.copy_us(buffer, Stream.TO_HOST)
        if not queues[0].add(made_us, out_us):
            return False
        if queues[1].add(-float(starts_us[needed]), self.copy_us(buffer, Stream.TO_DEVICE)):
            return True
        queues[0].remove(made_us, out_us)
        return False

    def schedule(self) -> None:
        """Schedule every copy: a value is freed as soon as its copy out is over, and the copy back starts as late as it
        may."""
        ledger = self._ledger
        if not ledger.offloads:
            return
        starts_us = self.starts_us()
        count = len(self._runs)
        free_us = 0.0
        outs: dict[int, int] = {}
        for buffer in sorted(ledger.offloads, key=lambda b: ledger.defined_at[b]):
            defined_at = ledger.defined_at[buffer]
            free_us = max(free_us, float(starts_us[defined_at + 1])) + self.copy_us(buffer, Stream.TO_HOST)
            outs[buffer] = min(max(defined_at + 1, bisect_left(starts_us, free_us)), count)
        free_us = math.inf
        needed = {b: ledger.first_read(b, back) for b, (_, back) in ledger.offloads.items()}
        for buffer in sorted(needed, key=lambda b: -needed[b]):
            free_us = min(free_us, float(starts_us[needed[buffer]])) - self.copy_us(buffer, Stream.TO_DEVICE)
            if buffer in self.stalling:
                continue
            last = ledger.last_touch(buffer, needed[buffer])
            out = min(max(outs[buffer], last + 1), needed[buffer])
            back = min(max(bisect_right(starts_us, free_us) - 1, out), needed[buffer])
            if ledger.offloads[buffer] != (out, back):
                ledger.offload(buffer, out, back)

    def copy_us(self, buffer: int, stream: Stream) -> float:
        return (self._out_us if stream is Stream.TO_HOST else self._back_us)[buffer]

    def worth_copying(self, buffer: int) -> bool:
        """Whether its copies are long enough to be worth the waits."""
        return self._out_us[buffer] >= effort.MIN_COPY_US

    def round_trip_us(self, buffer: int) -> float:
        return self._out_us[buffer] + self._back_us[buffer]

    def starts_us(self) -> NDArray[np.float64]:
        """When the launches at each region start, recomputations before it included."""
        spent = self._times_us + self._ledger.recomputed_us()
        return np.concatenate(([0.0], np.cumsum(spent)[:-1]))


class _Queue:
    """Copies of one direction in the order in which they may start; all have to be over at `end_us`."""

    def __init__(self, end_us: float) -> None:
        self._end_us = end_us
        self._copies: list[tuple[float, float]] = []  # when each may start, and what it takes

    def add(self, ready_us: float, takes_us: float) -> bool:
        """Whether one more copy is over in time and all others still are; only then it is added."""
        at = bisect_right(self._copies, ready_us, key=lambda copy: copy[0])
        self._copies.insert(at, (ready_us, takes_us))
        rest_us = 0.0  # from each copy on, the rest of the queue takes at least so long
        for ready, takes in reversed(self._copies):
            rest_us += takes
            if ready + rest_us > self._end_us:
                del self._copies[at]
                return False
        return True

    def remove(self, ready_us: float, takes_us: float) -> None:
        self._copies.remove((ready_us, takes_us))

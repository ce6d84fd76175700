"""Offloads values over the peak, to the host or to a peer's memory, and schedules their copies.

A link carries one copy in each direction at a time. So a copy out has to end before the peak, and a copy back starts
after it. Where there is time for both the offload costs nothing, and kernels wait for the other copies. Each link has
queues of its own: a value takes the fastest link that hides its copies and has enough memory behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.hardware.transfers import Links
from mbc.optimize import effort
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger
from mbc.optimize.schedule.emit_launches import Draft


class Offloader:
    """The copies of one program.

    Attributes:
        peak: The region over which values are offloaded.
        offloaded_share: The offloaded share of the excess bytes there.
        stalling: Offloaded values that kernels wait for.
    """

    def __init__(self, draft: Draft, links: Links, ledger: Ledger, techniques: AllowedTechniques) -> None:
        """Compute the times of all possible copies.

        Args:
            draft: Launches and buffers.
            links: Links that carry copies.
            ledger: The decisions, and the regions of the training program.
            techniques: The bytes that may be offloaded, and whether a copy takes the slowest link that hides it.
        """
        regions, room_bytes = ledger.regions, techniques.room_bytes
        self._regions = regions
        self._ledger = ledger
        self._room_bytes = room_bytes
        self._spaces = links.fastest(room_bytes)
        self._hiding = self._spaces[:: -1 if techniques.slow_first else 1]
        self._regions_us = np.array([region.time_us for region in regions] + [0.0])
        # Copies go out before the peak and back after it, so the two directions overlap only where optimizer states are
        # offloaded as well.
        busy = {launch.stream for launch in draft.train.launches}
        sizes = {b: ledger.size_bytes[b] for b in ledger.movable}
        self._times_us: dict[Stream, dict[int, float]] = {}
        for space in room_bytes:
            lanes = STREAM_TO[space], STREAM_FROM[space]
            both = not busy.isdisjoint(lanes)
            for lane in lanes:
                self._times_us[lane] = {b: links.copy_us(size, lane, both) for b, size in sizes.items()}
        # The spaces for each value, the one whose copies end soonest first.
        self._nearest = {b: sorted(self._spaces, key=lambda s, b=b: self.round_trip_us(b, s)) for b in sizes}
        self.peak = 0
        self.offloaded_share = 0.0
        self.stalling: set[int] = set()

    def offload_hidden(self, excess_bytes: NDArray[np.int64], part: float, recompute: bool) -> None:
        """Offload values without a stall, until enough is offloaded or the link is full.

        Args:
            excess_bytes: Bytes by which each region exceeds the available bytes.
            part: Share of the worst region's excess to offload.
            recompute: Whether values that are slowest to recompute go first.
        """
        starts_us = self.starts_us()
        peak = self.peak = int(np.argmax(excess_bytes))
        needed = wanted = int(excess_bytes[peak] * part)
        ledger = self._ledger
        gaps = [gap for buffer in ledger.movable if (gap := ledger.gap(buffer, peak)) is not None]

        def priority(gap: Gap) -> tuple[float, int, int]:
            time_us = ledger.chain(gap.buffer, gap.before)[0] if recompute else math.inf
            return -time_us / ledger.size_bytes[gap.buffer], gap.after - gap.before, gap.buffer

        queues = self._queues(starts_us)
        left_bytes = dict(self._room_bytes)
        chosen: list[tuple[Gap, Space]] = []
        for gap in sorted(gaps, key=priority):
            if needed <= 0:
                break
            space = self._hidden(queues, left_bytes, gap, starts_us)
            if space is None:
                continue
            needed -= ledger.size_bytes[gap.buffer]
            chosen.append((gap, space))
        self.offloaded_share = (wanted - needed) / max(1, int(excess_bytes[peak]))
        for gap, space in chosen:
            ledger.offload(gap.buffer, gap.after + 1, gap.before, space)
        self.schedule()

    def offload_more(self, buffers: Sequence[int]) -> None:
        """Offload more values over the peak, those that cause no stall."""
        ledger = self._ledger
        starts_us = self.starts_us()
        queues = self._queues(starts_us)
        for other in self.overlapped():
            _, back, space = ledger.offloads[other]
            if not self._queued(queues, other, space, ledger.first_read(other, back), starts_us):
                return
        left_bytes = {space: room - ledger.offloaded_bytes[space] for space, room in self._room_bytes.items()}
        for buffer in buffers:
            gap = ledger.gap(buffer, self.peak)
            if gap is None or buffer in ledger.offloads:
                continue
            space = self._hidden(queues, left_bytes, gap, starts_us)
            if space is not None:
                ledger.offload(buffer, gap.after + 1, gap.before, space)

    def overlapped(self) -> list[int]:
        """Return the offloaded values that no kernel waits for."""
        return sorted(self._ledger.offloads.keys() - self.stalling)

    def fastest(self, buffer: int) -> Space | None:
        """Return the space with enough free bytes whose copies of a value end soonest; None if there is none."""
        ledger = self._ledger
        size_bytes = ledger.size_bytes[buffer]
        for space in self._nearest[buffer]:
            if ledger.offloaded_bytes[space] + size_bytes <= self._room_bytes[space]:
                return space
        return None

    def _queues(self, starts_us: NDArray[np.float64]) -> Mapping[Space, tuple[_Queue, _Queue]]:
        """Return the queues of both directions around the peak, by space: out earliest first, back latest first."""
        out_us, back_us = float(starts_us[self.peak]), -float(starts_us[min(self.peak + 1, len(starts_us) - 1)])
        return {space: (_Queue(out_us), _Queue(back_us)) for space in self._spaces}

    def _hidden(
        self, queues: Mapping[Space, tuple[_Queue, _Queue]], left_bytes: dict[Space, int], gap: Gap,
        starts_us: NDArray[np.float64],
    ) -> Space | None:  # fmt: skip
        """Return the space that takes a value without a stall, or None.

        The copies of the value are then queued, and its bytes subtracted from those left.
        """
        size_bytes = self._ledger.size_bytes[gap.buffer]
        if not self.worth_copying(gap.buffer):
            return None
        for space in self._hiding:
            if size_bytes <= left_bytes[space] and self._queued(queues, gap.buffer, space, gap.before, starts_us):
                left_bytes[space] -= size_bytes
                return space
        return None

    def _queued(
        self, queues: Mapping[Space, tuple[_Queue, _Queue]], buffer: int, space: Space, needed: int,
        starts_us: NDArray[np.float64],
    ) -> bool:  # fmt: skip
        """Queue the copies of a value if they end in time; return whether they do.

        Copies that are queued already must still end in time, too.
        """
        out, back = queues[space]
        made_us = float(starts_us[self._ledger.defined_at[buffer] + 1])
        out_us = self.copy_us(buffer, STREAM_TO[space])
        if not out.add(made_us, out_us):
            return False
        if back.add(-float(starts_us[needed]), self.copy_us(buffer, STREAM_FROM[space])):
            return True
        out.remove(made_us, out_us)
        return False

    def schedule(self) -> None:
        """Schedule every copy.

        A value is freed as soon as its copy out has ended, and the copy back starts as late as possible.
        """
        ledger = self._ledger
        if not ledger.offloads:
            return
        starts_us = self.starts_us()
        count = len(self._regions)
        free = dict.fromkeys(self._spaces, 0.0)
        outs: dict[int, int] = {}
        for buffer in sorted(ledger.offloads, key=lambda b: ledger.defined_at[b]):
            defined_at, space = ledger.defined_at[buffer], ledger.offloads[buffer].space
            free_us = max(free[space], float(starts_us[defined_at + 1])) + self.copy_us(buffer, STREAM_TO[space])
            free[space] = free_us
            outs[buffer] = min(max(defined_at + 1, bisect_left(starts_us, free_us)), count)
        free = dict.fromkeys(self._spaces, math.inf)
        needed = {b: ledger.first_read(b, away.back) for b, away in ledger.offloads.items()}
        for buffer in sorted(needed, key=lambda b: -needed[b]):
            space = ledger.offloads[buffer].space
            free_us = min(free[space], float(starts_us[needed[buffer]])) - self.copy_us(buffer, STREAM_FROM[space])
            free[space] = free_us
            if buffer in self.stalling:
                continue
            last = ledger.last_touch(buffer, needed[buffer])
            out = min(max(outs[buffer], last + 1), needed[buffer])
            back = min(max(bisect_right(starts_us, free_us) - 1, out), needed[buffer])
            if ledger.offloads[buffer][:2] != (out, back):
                ledger.offload(buffer, out, back)

    def copy_us(self, buffer: int, stream: Stream) -> float:
        """Return the time of a value's copy on a stream."""
        return self._times_us[stream][buffer]

    def worth_copying(self, buffer: int) -> bool:
        """Return whether the copies of a value are long enough to justify their waits.

        Copies to the host count, since waits cost as much for a faster link.
        """
        return self._times_us[Stream.TO_HOST][buffer] >= effort.MIN_COPY_US

    def round_trip_us(self, buffer: int, space: Space | None = None) -> float:
        """Return the time of the copies of a value to `space` and back; None: to the space where it is offloaded."""
        space = space or self._ledger.offloads[buffer].space
        return self.copy_us(buffer, STREAM_TO[space]) + self.copy_us(buffer, STREAM_FROM[space])

    def starts_us(self) -> NDArray[np.float64]:
        """Return when the launches at each region start, recomputations before it included."""
        spent = self._regions_us + self._ledger.recomputed_us()
        return np.concatenate(([0.0], np.cumsum(spent)[:-1]))


class _Queue:
    """Copies of one direction in the order in which they may start; all have to end by `end_us`."""

    def __init__(self, end_us: float) -> None:
        """Start an empty queue."""
        self._end_us = end_us
        self._copies: list[tuple[float, float]] = []  # the earliest start and the duration of each copy

    def add(self, ready_us: float, takes_us: float) -> bool:
        """Add one more copy, if it and all others then end in time. Return whether it was added."""
        at = bisect_right(self._copies, ready_us, key=lambda copy: copy[0])
        self._copies.insert(at, (ready_us, takes_us))
        rest_us = 0.0  # duration of a copy and all after it
        for ready, takes in reversed(self._copies):
            rest_us += takes
            if ready + rest_us > self._end_us:
                del self._copies[at]
                return False
        return True

    def remove(self, ready_us: float, takes_us: float) -> None:
        self._copies.remove((ready_us, takes_us))

"""Waits between streams: a launch waits for the data that it reads, and before it overwrites bytes that another stream
may still use. Redundant waits, which others imply, are left out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mbc.plan.model import Buffer, Launch, Mode, Program, Space, Stream


@dataclass
class _Segments:
    """Byte ranges of one space, each with its last writer and its last reader on every stream since."""

    edges: list[int] = field(default_factory=lambda: [0])
    writer: list[int | None] = field(default_factory=lambda: [None])
    readers: list[dict[Stream, int]] = field(default_factory=lambda: [{}])

    def over(self, low: int, high: int) -> range:
        """Indices of the segments that make up [low, high), split at its ends."""
        first = self._split(low)
        return range(first, self._split(high))

    def _split(self, at: int) -> int:
        i = bisect_right(self.edges, at) - 1
        if self.edges[i] == at:
            return i
        self.edges.insert(i + 1, at)
        self.writer.insert(i + 1, self.writer[i])
        self.readers.insert(i + 1, dict(self.readers[i]))
        return i + 1


def synchronise(program: Program, buffers: Sequence[Buffer], offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Waits as (earlier launch, later launch) on different streams, ordered."""
    if len({launch.stream for launch in program.launches}) <= 1:
        return ()
    return essential(program.launches, _needed(program, buffers, offsets))


def essential(launches: Sequence[Launch], waits: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Those waits that no others imply, ordered."""
    needed: dict[int, dict[Stream, int]] = {}
    for earlier, later in waits:
        latest = needed.setdefault(later, {})
        stream = launches[earlier].stream
        latest[stream] = max(latest.get(stream, -1), earlier)
    found: list[tuple[int, int]] = []
    last_on: dict[Stream, int] = {}
    # known[i][s]: the latest launch of stream s that is finished when launch i starts.
    known: list[dict[Stream, int]] = []
    for i, launch in enumerate(launches):
        finished = dict(known[last_on[launch.stream]]) if launch.stream in last_on else {}
        for stream, other in sorted(needed.get(i, {}).items(), key=lambda item: -item[1]):
            if finished.get(stream, -1) < other:
                found.append((other, i))
                for s, launch_index in (*known[other].items(), (stream, other)):
                    finished[s] = max(finished.get(s, -1), launch_index)
        if launch.stream in last_on:
            finished[launch.stream] = last_on[launch.stream]
        known.append(finished)
        last_on[launch.stream] = i
    return tuple(sorted(found))


def _needed(program: Program, buffers: Sequence[Buffer], offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a launch of another stream and one that reads or overwrites its bytes."""
    streams = [launch.stream for launch in program.launches]
    spaces = {space: _Segments() for space in Space}
    for i, launch in enumerate(program.launches):
        ranges: list[tuple[_Segments, range, Mode]] = []
        for access in launch.accesses:
            buffer = buffers[access.buffer]
            per_row = buffer.size_bytes // max(1, buffer.rows.count)
            low = offsets[access.buffer] + (access.rows.start - buffer.rows.start) * per_row
            segments = spaces[buffer.space]
            for k in segments.over(low, low + access.rows.count * per_row):
                others = () if access.mode is Mode.READ else segments.readers[k].values()
                for other in (segments.writer[k], *others):
                    if other is not None and streams[other] is not launch.stream:
                        yield other, i
            ranges.append((segments, range(low, low + access.rows.count * per_row), access.mode))
        for segments, span, mode in ranges:
            for k in segments.over(span.start, span.stop):
                if mode is Mode.READ:
                    segments.readers[k][launch.stream] = i
                else:
                    segments.writer[k], segments.readers[k] = i, {}

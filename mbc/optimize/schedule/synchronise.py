"""Waits between streams, without redundant ones, which others imply.

A launch waits for the data that it reads, and before it overwrites bytes that another stream may still use.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mbc.hardware.streams import Space, Stream
from mbc.plan.model import Access, Buffer, Launch, Mode, Program


def synchronise(
    program: Program, buffers: Sequence[Buffer], offsets: Sequence[int], shared: Container[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """Return the waits, (earlier launch, later launch) on different streams, ordered.

    Args:
        program: The program; its own waits are not read.
        buffers: The buffers of the plan.
        offsets: The offset of each buffer in its space, in bytes.
        shared: Numbers of the buffers whose bytes launches of several streams touch; None if any buffer may be one.
    """
    if len({launch.stream for launch in program.launches}) <= 1:
        return ()
    shared = range(len(buffers)) if shared is None else shared
    return essential(program.launches, _needed(program, buffers, offsets, shared))


def essential(launches: Sequence[Launch], waits: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the waits that no others imply, ordered."""
    needed: dict[int, dict[Stream, int]] = {}
    for earlier, later in waits:
        latest = needed.setdefault(later, {})
        stream = launches[earlier].stream
        latest[stream] = max(latest.get(stream, -1), earlier)
    awaited = {earlier for latest in needed.values() for earlier in latest.values()}
    essential_waits: list[tuple[int, int]] = []
    # finished[s][t]: the latest launch of stream t that is finished when the next launch of stream s starts.
    finished: dict[Stream, dict[Stream, int]] = {}
    # finished_before[i][t]: the latest launch of stream t that is finished when launch i starts; only for launches
    # that others wait for.
    finished_before: dict[int, dict[Stream, int]] = {}
    for i, launch in enumerate(launches):
        here = finished.setdefault(launch.stream, {})
        for stream, other in sorted(needed.get(i, {}).items(), key=lambda item: -item[1]):
            if here.get(stream, -1) < other:
                essential_waits.append((other, i))
                for s, launch_index in (*finished_before[other].items(), (stream, other)):
                    here[s] = max(here.get(s, -1), launch_index)
        if i in awaited:
            finished_before[i] = dict(here)
        here[launch.stream] = i
    return tuple(sorted(essential_waits))


def _needed(
    program: Program, buffers: Sequence[Buffer], offsets: Sequence[int], shared: Container[int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of launches on different streams, the second of which reads or overwrites bytes of the first.

    Only accesses to `shared` buffers count.
    """
    streams = [launch.stream for launch in program.launches]
    accesses = [
        [_bytes(access, buffers, offsets) for access in launch.accesses if access.buffer in shared]
        for launch in program.launches
    ]
    spaces = {space: _Segments() for space in Space}
    for ranges in accesses:
        for space, low, high, _ in ranges:
            spaces[space].ends.update((low, high))
    for segments in spaces.values():
        segments.divide()
    for i, ranges in enumerate(accesses):
        stream = streams[i]
        touched = [(spaces[space], spaces[space].over(low, high), reads) for space, low, high, reads in ranges]
        for segments, span, reads in touched:
            for k in span:
                writer = segments.writer[k]
                if writer is not None and streams[writer] is not stream:
                    yield writer, i
                if not reads:
                    for other in segments.readers[k].values():
                        if streams[other] is not stream:
                            yield other, i
        for segments, span, reads in touched:
            for k in span:
                if reads:
                    segments.readers[k][stream] = i
                else:
                    segments.writer[k], segments.readers[k] = i, {}


def _bytes(access: Access, buffers: Sequence[Buffer], offsets: Sequence[int]) -> tuple[Space, int, int, bool]:
    """Return the space and the range of bytes of an access, and whether it reads."""
    buffer, rows = buffers[access.buffer], access.rows
    per_row = buffer.size_bytes // max(1, buffer.rows.count)
    low = offsets[access.buffer] + (rows.start - buffer.rows.start) * per_row
    return buffer.space, low, low + rows.count * per_row, access.mode is Mode.READ


@dataclass
class _Segments:
    """The bytes of one space between the `ends` of all accesses.

    Each segment has its last writer, and its last reader on every stream since.
    """

    ends: set[int] = field(default_factory=set[int])
    place: dict[int, int] = field(default_factory=dict[int, int])  # number of the segment that begins at a byte
    writer: list[int | None] = field(default_factory=list[int | None])
    readers: list[dict[Stream, int]] = field(default_factory=list[dict[Stream, int]])

    def divide(self) -> None:
        self.place = {end: number for number, end in enumerate(sorted(self.ends))}
        self.writer = [None] * len(self.ends)
        self.readers = [{} for _ in self.ends]

    def over(self, low: int, high: int) -> range:
        """Return the segments that [low, high) consists of."""
        return range(self.place[low], self.place[high])

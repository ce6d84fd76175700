"""The last writer of every byte of a space, and its readers since then. Used by the verifier only.

A space is a sorted list of segments. Accesses split segments at their ends, so that every segment has one history.
A launch is named by its index; -1 stands for the content before the first launch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from mbc.hardware.streams import Stream
from mbc.plan.model import Rows

NOBODY = (-1,) * len(Stream)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows, as sorted half-open intervals that do not touch."""

    parts: tuple[tuple[int, int], ...] = ()

    def joined(self, rows: Rows) -> RowSet | None:
        """Return the set with `rows` added; None if one of them is already a member."""
        at = bisect_right(self.parts, (rows.start, rows.start))
        before = self.parts[at - 1] if at else None
        after = self.parts[at] if at < len(self.parts) else None
        if (before is not None and before[1] > rows.start) or (after is not None and after[0] < rows.stop):
            return None
        start, stop, low, high = rows.start, rows.stop, at, at
        if before is not None and before[1] == start:
            start, low = before[0], at - 1
        if after is not None and after[0] == stop:
            stop, high = after[1], at + 1
        return RowSet((*self.parts[:low], (start, stop), *self.parts[high:]))

    def united(self, rows: Rows) -> RowSet:
        """Return the set with `rows` added, members or not."""
        start, stop = rows.start, rows.stop
        apart = [p for p in self.parts if p[1] < start or p[0] > stop]
        for low, high in self.parts:
            if low <= stop and high >= start:
                start, stop = min(start, low), max(stop, high)
        return RowSet(tuple(sorted([*apart, (start, stop)])))

    def is_exactly(self, start: int, stop: int) -> bool:
        """Return whether the members are the rows from `start` to before `stop`."""
        return self.parts == ((start, stop),)

    def __str__(self) -> str:
        """Return the intervals as text for messages."""
        return ", ".join(f"{start}..{stop}" for start, stop in self.parts) or "none"


@dataclass(slots=True)
class Segment:
    """Bytes [start, stop) with one history.

    Attributes:
        start: First byte.
        stop: Byte after the last.
        buffer: Buffer through which the bytes were written last.
        writer: Launch that wrote them last.
        writer_stream: Index of the stream of that launch.
        summed: Rows that a sum over rows contains so far; None if the bytes are not such a sum.
        readers: For each stream, its latest launch that has read these bytes since they were written; earlier launches
            of that stream have ended when the latest has.
    """

    start: int
    stop: int
    buffer: int
    writer: int
    writer_stream: int
    summed: RowSet | None
    readers: tuple[int, ...] = NOBODY


@dataclass
class Occupancy:
    """The segments of one space, ordered, without overlap. Bytes between them were never written."""

    _starts: list[int] = field(default_factory=list[int])
    _segments: list[Segment] = field(default_factory=list[Segment])

    def within(self, start: int, stop: int) -> list[Segment]:
        """Return the segments in [start, stop), after splitting those that extend beyond its ends."""
        low, high = self._isolate(start, stop)
        return self._segments[low:high]

    def replace(self, segment: Segment) -> None:
        """Replace all segments of the bytes of `segment` by `segment`."""
        low, high = self._isolate(segment.start, segment.stop)
        self._segments[low:high] = [segment]
        self._starts[low:high] = [segment.start]

    def _isolate(self, start: int, stop: int) -> tuple[int, int]:
        low = self._split(start)
        high = low
        while high < len(self._starts) and self._starts[high] < stop:
            high += 1
        if high > low and self._segments[high - 1].stop > stop:
            self._split(stop)
        return low, high

    def _split(self, at: int) -> int:
        """Return the index of the first segment from `at` on, after splitting the segment that contains `at`."""
        i = bisect_right(self._starts, at) - 1
        if i < 0:
            return 0
        segment = self._segments[i]
        if segment.start == at:
            return i
        if segment.stop > at:
            rest = Segment(
                at, segment.stop, segment.buffer, segment.writer, segment.writer_stream, segment.summed, segment.readers
            )
            segment.stop = at
            self._segments.insert(i + 1, rest)
            self._starts.insert(i + 1, at)
        return i + 1

"""Who wrote the bytes of a space last, and who has read them since. Used by the verifier only.

A space is a sorted list of segments. Accesses split segments at their ends, so that every segment has one history.
Launches are named by their index; -1 stands for what was there before the first launch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from mbc.plan.model import Rows, Stream

NOBODY = (-1,) * len(Stream)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows, as sorted half-open intervals that do not touch."""

    parts: tuple[tuple[int, int], ...] = ()

    def joined(self, rows: Rows) -> RowSet | None:
        """With `rows` added; None where one of them is a member already."""
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
        """With `rows` added, members or not."""
        start, stop = rows.start, rows.stop
        apart = [p for p in self.parts if p[1] < start or p[0] > stop]
        for low, high in self.parts:
            if low <= stop and high >= start:
                start, stop = min(start, low), max(stop, high)
        return RowSet(tuple(sorted([*apart, (start, stop)])))

    def is_exactly(self, start: int, stop: int) -> bool:
        return self.parts == ((start, stop),)

    def __str__(self) -> str:
        return ", ".join(f"{start}..{stop}" for start, stop in self.parts) or "none"


@dataclass(slots=True)
class Segment:
    """Bytes [start, stop) with one history.

    `summed` is the rows that a sum over rows holds so far; None where the bytes are no such sum.
    `readers` holds, for each stream, its latest launch that has read these bytes since they were written: the earlier
    ones of a stream are over when the latest is.
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
        """The segments that lie in [start, stop), after splitting those that reach over its ends."""
        low, high = self._isolate(start, stop)
        return self._segments[low:high]

    def replace(self, segment: Segment) -> None:
        """`segment` takes the place of whatever lay there."""
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
        """Index of the first segment that starts at or after `at`, none reaching over it."""
        i = bisect_right(self._starts, at) - 1
        if i < 0:
            return 0
        found = self._segments[i]
        if found.start == at:
            return i
        if found.stop > at:
            rest = Segment(at, found.stop, found.buffer, found.writer, found.writer_stream, found.summed, found.readers)
            found.stop = at
            self._segments.insert(i + 1, rest)
            self._starts.insert(i + 1, at)
        return i + 1

"""Offsets in a text -> lines and columns."""

from __future__ import annotations

from bisect import bisect_right

from mbc.source import Source, Span


class Places:
    """The start of each line of one source, by the rule of `Source.line`."""

    def __init__(self, source: Source) -> None:
        """Find the lines of a source."""
        self._source = source
        self._starts = [0]
        for line in source.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._ends = [len(line) for line in source.text.splitlines()]

    def line(self, offset: int) -> int:
        """Return the line, counted from 1, of the character at `offset`."""
        return max(1, min(bisect_right(self._starts, offset), len(self._ends)))

    def span(self, start: int, end: int) -> Span:
        """Return the characters from `start` to `end`, cut at the end of the first line."""
        line = self.line(start)
        column = start - self._starts[line - 1]
        length = self._ends[line - 1] if self._ends else 0
        return Span(self._source, line, column + 1, max(1, min(end - start, length - column)))

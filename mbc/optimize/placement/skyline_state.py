"""The skyline of a partial placement, how it grows, and where it is stuck: the states of `skyline_search`.

Columns of time are the maximal sets of blocks that are live at once, and no block can be placed lower than it is. Both
are as in Moffitt, "MiniMalloc: a lightweight memory allocator for hardware-accelerated machine learning", 2023.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mbc.optimize.schedule.liveness import Block

Columns = tuple[int, int]  # [begin, end)


def hull(a: Columns, b: Columns) -> Columns:
    """Return the smallest range of columns that contains both."""
    return min(a[0], b[0]), max(a[1], b[1])


def with_walls(columns: Columns) -> Columns:
    """Return the columns with the column to either side."""
    return columns[0] - 1, columns[1] + 1


@dataclass(frozen=True, slots=True)
class Option:
    """A block that comes first at an edge of a gap, and the columns up to it.

    Attributes:
        block: The block; None: no block is placed at the bottom of the gap, and all of it is wasted.
        wasted: The columns up to the block.
        height: Bytes that each of these columns wastes.
    """

    block: int | None
    wasted: Columns
    height: int

    @property
    def area(self) -> int:
        """Bytes times columns that are wasted."""
        return self.height * (self.wasted[1] - self.wasted[0])


@dataclass(slots=True)
class State:
    """A partial placement.

    Attributes:
        edges: Columns at which the segments of the skyline begin, and the end of the last one.
        heights: Heights of the segments.
        left: The blocks that are not placed, as bits.
        slack: Bytes that each column may still waste.
        gaps: End and options of each gap, by its first column.
    """

    edges: list[int]
    heights: list[int]
    left: int
    slack: list[int]
    gaps: dict[int, tuple[int, list[Option]]]

    @property
    def key(self) -> int:
        """A hash of the state; slack and gaps follow from the hashed fields."""
        return hash((self.left, tuple(self.edges), tuple(self.heights)))

    def segment(self, column: int) -> int:
        """Return the number of the segment that contains a column."""
        return bisect_right(self.edges, column, 0, len(self.heights)) - 1

    def waste(self, columns: Columns, height: int) -> None:
        """Subtract `height` from the slack of the columns."""
        self.slack = self.slack.copy()  # several states share one list
        for column in range(*columns):
            self.slack[column] -= height


class Packing:
    """Blocks to be packed below a limit. Sets of blocks are bits of integers, blocks that start first lowest."""

    def __init__(self, blocks: Sequence[Block], limit_bytes: int) -> None:
        """Divide time into columns, and order the blocks by their start."""
        starts, stops, self.columns = columns_of(blocks)
        self.limit = limit_bytes - limit_bytes % math.gcd(*(block.size_bytes for block in blocks))
        self.order = sorted(range(len(blocks)), key=lambda i: (starts[i], -stops[i], -blocks[i].size_bytes))
        self.starts = [starts[i] for i in self.order]
        self.stops = [stops[i] for i in self.order]
        self.sizes = [blocks[i].size_bytes for i in self.order]
        self.lives = [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]
        self.slack = [self.limit] * self.columns
        self.starting, self.stopping = [0] * (self.columns + 1), [0] * (self.columns + 1)
        self.twins: list[int] = []  # the bit of an equal block before this one, which must be placed first; else 0
        before = None
        for i, block in enumerate(zip(self.starts, self.stops, self.sizes, strict=True)):
            start, stop, size = block
            self.starting[start] |= 1 << i
            self.stopping[stop] |= 1 << i
            for column in range(start, stop):
                self.slack[column] -= size
            self.twins.append(1 << i - 1 if block == before else 0)
            before = block
        self.distinct = sorted(set(self.sizes))
        self.small = [0]  # the blocks of the n smallest sizes, n = 0, 1, 2, …
        for size in self.distinct:
            self.small.append(self.small[-1] | sum(1 << i for i, other in enumerate(self.sizes) if other == size))
        self.since, self.until = self.starting.copy(), self.stopping.copy()
        for column in range(self.columns):
            self.since[self.columns - column - 1] |= self.since[self.columns - column]
            self.until[column + 1] |= self.until[column]

    def empty(self) -> tuple[State, Columns | None]:
        """Return the state without a block, and the columns of a conflict if there is no placement."""
        state = State([0, self.columns], [0], (1 << len(self.order)) - 1, self.slack, {})
        if min(self.slack) < 0:
            return state, (0, self.columns)
        return state, self._settled(state, (0, self.columns))[1]

    def decided(self, old: State, segment: int, option: Option) -> tuple[State, Columns, Columns | None]:
        """Return the state after an option for a gap, the columns that the option changed, and those of a conflict."""
        begin, end, ground = old.edges[segment], old.edges[segment + 1], old.heights[segment]
        left, edges, heights = old.left, [begin], [ground]
        if option.block is not None:
            start, stop = self.starts[option.block], self.stops[option.block]
            left ^= 1 << option.block
            edges = [begin] * (begin < start) + [start] + [stop] * (stop < end)
            heights = [ground + self.sizes[option.block] * (edge == start) for edge in edges]
        if option.height:
            heights[0 if option.wasted[0] == begin else -1] += option.height
        gaps = old.gaps.copy()
        del gaps[begin]
        edges = [*old.edges[:segment], *edges, *old.edges[segment + 1 :]]
        heights = [*old.heights[:segment], *heights, *old.heights[segment + 1 :]]
        state = State(edges, heights, left, old.slack, gaps)
        if option.height:
            state.waste(option.wasted, option.height)
        return state, *self._settled(state, (begin, end))

    def depth(self, state: State, segment: int) -> int:
        """Return the depth of a segment below the lower of its walls; the segment is a gap if that is positive."""
        return min(self._walls(state, segment)) - state.heights[segment]

    def _walls(self, state: State, segment: int) -> tuple[int, int]:
        heights = state.heights
        left = heights[segment - 1] if segment else self.limit
        return left, heights[segment + 1] if segment + 1 < len(heights) else self.limit

    def _settled(self, state: State, changed: Columns) -> tuple[Columns, Columns | None]:
        """Update the skyline where it changed, and return all columns that changed, and those of a conflict.

        Level segments are joined, gaps in which no block lives are wasted, and the options of the other gaps are
        computed.
        """
        edges, heights, gaps = state.edges, state.heights, state.gaps
        at = max(state.segment(changed[0]) - 1, 0)
        while state.left and at < len(heights) and edges[at] <= changed[1]:
            begin = edges[at]
            while at + 1 < len(heights) and heights[at + 1] == heights[at]:
                gaps.pop(edges[at + 1], None)
                del edges[at + 1], heights[at + 1]
            gaps.pop(begin, None)
            end, depth = edges[at + 1], self.depth(state, at)
            if depth > 0 and (inside := self.since[begin] & self.until[end] & state.left):
                options = self._options(state, at, inside)
                if not options:
                    return changed, with_walls(hull(changed, (begin, end)))
                gaps[begin] = end, options
            elif depth > 0:
                changed = hull(changed, (begin, end))
                if min(state.slack[begin:end]) < depth:
                    return changed, with_walls(changed)
                state.waste((begin, end), depth)
                heights[at] += depth
                at -= at > 0 and heights[at - 1] == heights[at]
                continue
            at += 1
        return changed, None

    def _options(self, state: State, segment: int, inside: int) -> list[Option]:
        """Return the options at that edge of a gap which leaves fewer of them; none at a dead end."""
        begin, end, slack = state.edges[segment], state.edges[segment + 1], state.slack
        left, right = (wall - state.heights[segment] for wall in self._walls(state, segment))
        depth = min(left, right)
        best: list[Option] | None = None
        for column, wall, at_edge in (begin, left, self.starting[begin]), (end - 1, right, self.stopping[end]):
            first, needed = inside & at_edge, depth - slack[column]
            options: list[Option] = []
            for i in _members(first):
                needed -= self.sizes[i]
                if not self.twins[i] & state.left:
                    options.append(Option(i, (begin, begin), 0))
            if needed > 0:
                return []
            for i in _members(inside & ~first) if slack[column] else ():
                if best is not None and len(options) >= len(best):
                    break
                wasted = (begin, self.starts[i]) if best is None else (self.stops[i], end)
                height = min(self.sizes[i], wall)
                if (
                    not self.twins[i] & state.left
                    and not self._fits(state, wasted, height)
                    and height <= min(slack[wasted[0] : wasted[1]])
                ):
                    options.append(Option(i, wasted, height))
            if best is None or len(options) < len(best):
                best = options
        best = best or []
        if depth <= min(slack[begin:end]) and not self._fits(state, (begin, end), depth):
            best.append(Option(None, (begin, end), depth))
        return best

    def _fits(self, state: State, wasted: Columns, height: int) -> bool:
        """Return whether a block that is left fits the wasted columns: another solution then has the block there."""
        low = self.small[bisect_right(self.distinct, height)]
        return bool(self.since[wasted[0]] & self.until[wasted[1]] & state.left & low)


def columns_of(blocks: Sequence[Block]) -> tuple[list[int], list[int], int]:
    """Return the first column and the end of each block, and the number of columns.

    Two blocks share a column if and only if they are live at the same launch.
    """
    starting: dict[int, list[int]] = {}
    stopping: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        starting.setdefault(block.start, []).append(i)
        stopping.setdefault(block.stop, []).append(i)
    starts, stops = [0] * len(blocks), [0] * len(blocks)
    column, grown = 0, False
    for launch in sorted(starting.keys() | stopping.keys()):
        if launch in stopping and grown:
            column, grown = column + 1, False
        for i in stopping.get(launch, ()):
            stops[i] = column
        for i in starting.get(launch, ()):
            starts[i], grown = column, True
    return starts, stops, column


def _members(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        bits ^= bit
        yield bit.bit_length() - 1

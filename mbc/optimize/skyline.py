"""Place blocks from the bottom up: where the lowest room is, the block that comes first of those that are alive within
it; where none is, that room is lost and the next lowest is filled.

The best fit of Burke, Kendall and Whitwell ("A new placement heuristic for the orthogonal stock-cutting problem", 2004)
as Sekiyama et al. take it to memory ("Profile-guided memory optimization for deep neural networks", 2018), the blocks
that live longest first. What ends up too high then comes earlier in the next round, as in "Squeaky wheel" optimization
(Joslin and Clements, 1999).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.optimize.lifetimes import Block, peak_bytes

# Rounds times blocks that are placed, and most rounds.
PLACED_WORK = 60_000
MOST_ROUNDS = 200
# By how much what is too high, and anything, comes earlier in the next round, at most.
EARLIER, ANY_EARLIER = 2.5, 1.02


def fill_up(blocks: Sequence[Block], good: int, most_rounds: int = MOST_ROUNDS) -> Iterator[list[int]]:
    """Offsets of the blocks, those of each round that reaches at most `good` or lower than all before.

    Seeded and counted in rounds, never in seconds: the same blocks get the same offsets.
    """
    sizes = np.array([block.size_bytes for block in blocks], np.int64)
    starts = np.array([block.start for block in blocks], np.int64)
    stops = np.array([block.stop for block in blocks], np.int64)
    lives = (stops - starts).astype(float)
    enough = max(good, peak_bytes(blocks)[0])
    draw = np.random.default_rng(0)
    ranks = [lives, lives * sizes, sizes.astype(float)]
    lowest = 0
    for number in range(max(1, min(most_rounds, PLACED_WORK // len(blocks)))):
        rank = ranks[number % len(ranks)]
        offsets = _filled(sizes, starts, stops, np.argsort(-rank, kind="stable"))
        tops = offsets + sizes
        reached = int(tops.max())
        if reached <= good or not number or reached < lowest:
            lowest = min(reached, lowest) if number else reached
            yield offsets.tolist()
        high = tops > enough
        rank[high] *= draw.uniform(1.0, EARLIER, int(high.sum()))
        rank *= draw.uniform(1 / ANY_EARLIER, ANY_EARLIER, len(rank))


def _filled(
    sizes: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64], order: NDArray[np.intp]
) -> NDArray[np.int64]:
    """Offsets, the first in `order` of the blocks that a room holds being taken for it."""
    from_, until = starts[order], stops[order]
    size, low, high = sizes[order].tolist(), from_.tolist(), until.tolist()
    left = np.ones(len(order), np.bool_)
    offsets = np.zeros(len(order), np.int64)
    # Rooms side by side: the launches [begins, ends) above a height.
    begins, ends, heights = [int(from_.min())], [int(until.max())], [0]
    count = len(order)
    while count:
        height = min(heights)
        k = heights.index(height)
        begin, end = begins[k], ends[k]
        inside = from_ >= begin
        inside &= until <= end
        inside &= left
        i = int(inside.argmax())
        if inside[i]:
            offsets[order[i]] = height
            left[i] = False
            count -= 1
            first, last = k, k + 1
            rooms = [(begin, low[i], height), (low[i], high[i], height + size[i]), (high[i], end, height)]
            rooms = [room for room in rooms if room[0] < room[1]]
        else:  # lost up to the lower neighbour, or to both where they are level
            beside = heights[max(0, k - 1) : k] + heights[k + 1 : k + 2]
            level = min(beside)
            first = k - 1 if k and heights[k - 1] == level else k
            last = k + 2 if heights[k + 1 : k + 2] == [level] else k + 1
            rooms = [(begins[first], ends[last - 1], level)]
        begins[first:last] = [room[0] for room in rooms]
        ends[first:last] = [room[1] for room in rooms]
        heights[first:last] = [room[2] for room in rooms]
    return offsets

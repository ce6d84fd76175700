"""Skyline placement: the lowest gap of the skyline gets the first block whose live range is within it.

Where there is no such block, the gap is lost and the next lowest is filled. This is the best fit of Burke, Kendall and
Whitwell ("A new placement heuristic for the orthogonal stock-cutting problem", 2004) as Sekiyama et al. apply it to
memory ("Profile-guided memory optimization for deep neural networks", 2018), the blocks that live longest first. Blocks
that end up too high then come earlier in the next round, as in "Squeaky wheel" optimization (Joslin and Clements,
1999).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from mbc.optimize import effort
from mbc.optimize.schedule.liveness import Block, peak_bytes


def fill_up(blocks: Sequence[Block], good: int, most_rounds: int = effort.SKYLINE_MAX_ROUNDS) -> Iterator[list[int]]:
    """Yield offsets of the blocks for each round that reaches at most `good`, or lower than all rounds before.

    The search is seeded and counted in rounds, never in seconds: the same blocks get the same offsets.
    """
    sizes = np.array([block.size_bytes for block in blocks], np.int64)
    lives = np.array([block.stop - block.start for block in blocks], float)
    enough = max(good, peak_bytes(blocks)[0])
    draw = np.random.default_rng(0)
    ranks = [lives, lives * sizes, sizes.astype(float)]
    lowest = 0
    for number in range(max(1, min(most_rounds, effort.SKYLINE_WORK // len(blocks)))):
        rank = ranks[number % len(ranks)]
        order: list[int] = np.argsort(-rank, kind="stable").tolist()
        offsets = np.zeros(len(blocks), np.int64)
        offsets[order] = _filled([blocks[i] for i in order])
        tops = offsets + sizes
        reached = int(tops.max())
        if reached <= good or not number or reached < lowest:
            lowest = min(reached, lowest) if number else reached
            yield offsets.tolist()
        high = tops > enough
        rank[high] *= draw.uniform(1.0, effort.SKYLINE_HIGH_PROMOTION, int(high.sum()))
        rank *= draw.uniform(1 / effort.SKYLINE_ANY_PROMOTION, effort.SKYLINE_ANY_PROMOTION, len(rank))


def _filled(blocks: Sequence[Block]) -> list[int]:
    """Return the offsets; each gap gets the first of the blocks that fit it."""
    times = sorted({time for block in blocks for time in (block.start, block.stop)})
    number = {time: i for i, time in enumerate(times)}
    starts = [number[block.start] for block in blocks]
    stops = [number[block.stop] for block in blocks]
    sizes = [block.size_bytes for block in blocks]
    # Sets of blocks are bits of integers, the first block lowest: blocks that start at each time or later, blocks that
    # stop at that time or earlier, and blocks that are not placed yet. Bit operations find the first that fits a gap.
    since, until = [0] * len(times), [0] * len(times)
    for i in range(len(blocks)):
        since[starts[i]] |= 1 << i
        until[stops[i]] |= 1 << i
    last = len(times) - 1
    for time in range(last):
        since[last - time - 1] |= since[last - time]
        until[time + 1] |= until[time]
    left = (1 << len(blocks)) - 1
    offsets = [0] * len(blocks)
    # Gaps of the skyline, each by the time at which it begins: its height (-1: none begins then) and its end. `begins`:
    # the begin of the gap that ends at a time. `lowest`: a heap of (height, begin), some of them outdated.
    heights, ends, begins = [-1] * len(times), [0] * len(times), [0] * len(times)
    heights[0], ends[0] = 0, last
    lowest = [(0, 0)]
    too_high = sum(sizes) + 1
    while left:
        height, begin = lowest[0]
        if heights[begin] != height:
            heappop(lowest)
            continue
        end = ends[begin]
        inside = since[begin] & until[end] & left
        if inside:
            bit = inside & -inside
            left ^= bit
            i = bit.bit_length() - 1
            offsets[i] = height
            low, high, top = starts[i], stops[i], height + sizes[i]
            if begin < low:
                ends[begin], begins[low] = low, begin
            else:
                heappop(lowest)
            heights[low], ends[low], begins[high] = top, high, low
            heappush(lowest, (top, low))
            if high < end:
                heights[high], ends[high], begins[end] = height, end, high
                heappush(lowest, (height, high))
        else:  # the gap is lost up to the lower neighbour, or to both where they are level
            heappop(lowest)
            before = heights[begins[begin]] if begin else too_high
            behind = heights[end] if end < last else too_high
            heights[begin] = -1
            if behind <= before:
                heights[end] = -1
                end = ends[end]
            if before <= behind:
                begin = begins[begin]
            else:
                heights[begin] = behind
                heappush(lowest, (behind, begin))
            ends[begin], begins[end] = end, begin
    return offsets

"""Offsets of blocks: no two blocks that are live at the same launch may overlap.

Blocks are placed by greedy best fit in several orders, then by repeated skyline placement
(`mbc.optimize.placement.skyline`). If there are few blocks, their order is annealed. If the result exceeds the
available memory although the lower bound, the peak live bytes, does not, a placement is searched
(`mbc.optimize.placement.skyline_search`). Where the smallest height is asked for, heights down to the lower bound are
searched in the same way.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from mbc.optimize import effort
from mbc.optimize.placement.skyline import fill_up
from mbc.optimize.placement.skyline_search import search
from mbc.optimize.schedule.liveness import Block, peak_bytes

HIGHEST_BYTES = np.iinfo(np.int64).max

_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda b: (-b.size_bytes, b.start - b.stop, b.start),
    lambda b: (-b.size_bytes * (b.stop - b.start), b.start, 0),
    lambda b: (b.start - b.stop, -b.size_bytes, b.start),
    lambda b: (b.start, -b.size_bytes, b.stop),
)


def place(
    blocks: Sequence[Block], enough_bytes: int = 0, thorough: bool = True, nodes: int = effort.SKYLINE_SEARCH_NODES
) -> tuple[list[int], int]:
    """Return the offsets of the blocks and the height they reach, at least `peak_bytes(blocks)`.

    Args:
        blocks: The blocks.
        enough_bytes: A height that needs no improvement. If the blocks may fit it, a placement is searched.
        thorough: Whether placement is improved after one quick pass.
        nodes: Nodes of the search for a placement that fits.
    """
    if not blocks:
        return [], 0
    bound, _ = peak_bytes(blocks)
    good = max(int(bound * effort.PLACEMENT_GOOD_ENOUGH), enough_bytes)
    affordable = effort.GREEDY_PLACEMENT_WORK // len(blocks)
    if affordable >= len(_ORDERS):
        orders = _ORDERS if thorough else _ORDERS[:1]
    else:
        orders = (_ORDERS[-1], *_ORDERS)[: 1 + affordable] if thorough else ()
    best_order = list(range(len(blocks)))
    best, height = _greedy(blocks, best_order)
    for key in orders:
        if height <= good:
            break
        order = sorted(range(len(blocks)), key=lambda i, key=key: key(blocks[i]))
        offsets, reached = _greedy(blocks, order, most_bytes=height)
        if reached < height:
            best, height, best_order = offsets, reached, order
    if not thorough or height <= good:
        return best, height
    best, height = _improved(blocks, (best, height), best_order, bound, good)
    if bound <= enough_bytes < height and height > good:
        return _searched(blocks, bound, good, height, nodes) or (best, height)
    return best, height


def place_lowest(blocks: Sequence[Block], nodes: int = effort.SKYLINE_SEARCH_LOWEST_NODES) -> tuple[list[int], int]:
    """Return the offsets of the lowest placement found, and its height: `place`, then a search of lower heights.

    Args:
        blocks: The blocks.
        nodes: Nodes of the search for each height.
    """
    placement = place(blocks)
    if not blocks:
        return placement
    nodes = min(nodes, effort.SKYLINE_SEARCH_WORK // len(blocks) ** 2)
    if nodes < len(blocks):  # each block takes a node
        return placement
    return _lowest(blocks, peak_bytes(blocks)[0], placement[1], nodes) or placement


def fit_within(blocks: Sequence[Block], available_bytes: int) -> list[int] | None:
    """Return the offsets of the blocks within `available_bytes`, or None if a quick search does not find any."""
    order = sorted(range(len(blocks)), key=lambda i: _ORDERS[0](blocks[i]))
    offsets, reached = _greedy(blocks, order, most_bytes=available_bytes + 1)
    if reached <= available_bytes:
        return offsets
    large = [i for i in order if blocks[i].size_bytes * effort.SMALL_BLOCK_DIVISORS[0] >= available_bytes]
    for places in fill_up([blocks[i] for i in large], available_bytes, effort.SKYLINE_QUICK_ROUNDS):
        offsets, reached = place_around(blocks, dict(zip(large, places, strict=True)), available_bytes + 1)
        if reached <= available_bytes:
            return offsets
    return None


def place_around(
    blocks: Sequence[Block], fixed: Mapping[int, int], most_bytes: int = HIGHEST_BYTES
) -> tuple[list[int], int]:
    """Return the offsets of the blocks and the height they reach, where some blocks have `fixed` offsets.

    A placement that reaches `most_bytes` is abandoned: its offsets have no meaning.
    """
    rest = sorted(set(range(len(blocks))) - fixed.keys(), key=lambda i: (-blocks[i].size_bytes, blocks[i].start))
    return _greedy(blocks, rest, fixed, most_bytes)


def _improved(
    blocks: Sequence[Block], placement: tuple[list[int], int], order: list[int], bound: int, good: int
) -> tuple[list[int], int]:
    """Improve the placement of the large blocks: by the skyline heuristic, and by annealing if there are few.

    Smaller blocks then fill the gaps.
    """

    def filled(chosen: list[int], places: list[int]) -> tuple[list[int], int]:
        return place_around(blocks, dict(zip(chosen, places, strict=True)), height)

    offsets, height = placement
    large: list[int] = []
    for count in effort.SMALL_BLOCK_DIVISORS:
        before, large = large, [i for i in order if blocks[i].size_bytes * count >= bound]
        for places in fill_up([blocks[i] for i in large], good) if large != before else ():
            offsets, height = min((offsets, height), filled(large, places), key=lambda placement: placement[1])
            if height <= good:
                return offsets, height
    if large and len(large) ** 2 * effort.ANNEAL_MIN_ROUNDS <= effort.ANNEAL_WORK:
        chosen = [blocks[i] for i in large]
        start = _lowest_first(chosen, range(len(chosen)))
        places, _ = _anneal(chosen, start, list(range(len(chosen))), bound, good)
        offsets, height = min((offsets, height), filled(large, places), key=lambda placement: placement[1])
    return offsets, height


def _searched(blocks: Sequence[Block], bound: int, good: int, height: int, nodes: int) -> tuple[list[int], int] | None:
    """Return offsets within `good` by the skyline search, else the lowest below `height`; None if there are none.

    The lower bound itself is tried for a short time, since the least may be wasted there, and dead ends are noticed
    soonest. Half of the effort is for `good`, half of the rest for the height between `good` and the lowest height so
    far, and so on.
    """
    nodes = min(nodes, effort.SKYLINE_SEARCH_WORK // len(blocks) ** 2)
    best: tuple[list[int], int] | None = None
    failed, limit = good, bound
    for _ in range(effort.SKYLINE_SEARCH_LIMITS):
        most_nodes = nodes // (2 if limit >= good else effort.SKYLINE_SEARCH_BOUND_DIVISOR)
        offsets = search(blocks, limit, most_nodes)
        nodes -= most_nodes
        if offsets is not None:
            height = _height(blocks, offsets)
            best = offsets, height
            if height <= good:
                break
        elif limit >= good:
            failed = limit
        limit = good if limit < good else (failed + height) // 2
    return best


def _lowest(blocks: Sequence[Block], bound: int, height: int, nodes: int) -> tuple[list[int], int] | None:
    """Return offsets of the lowest height below `height` that the skyline search finds; None if it finds none.

    The lower bound is tried first, then the middle between the highest height that failed and the lowest one reached.
    A failure is no proof: where both are close together, the heights down to the bound are tried again.

    Args:
        blocks: The blocks.
        bound: The lower bound of the height.
        height: Height of the placement that is to be lowered.
        nodes: Nodes of each height.
    """
    best: tuple[list[int], int] | None = None
    failed, limit, failures = bound, bound, 0
    while failures < effort.SKYLINE_SEARCH_LOWEST_FAILURES and bound < height:
        offsets = search(blocks, limit, nodes)
        if offsets is None:
            failed, failures = limit, failures + 1
        else:
            height = _height(blocks, offsets)
            best = offsets, height
        if height - failed < (effort.PLACEMENT_GOOD_ENOUGH - 1) * bound:
            failed = bound
        limit = (failed + height) // 2
    return best


def _height(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max(offset + block.size_bytes for offset, block in zip(offsets, blocks, strict=True))


def _greedy(
    blocks: Sequence[Block],
    order: Sequence[int],
    fixed: Mapping[int, int] | None = None,
    most_bytes: int = HIGHEST_BYTES,
) -> tuple[list[int], int]:
    """Place blocks in the given order, each into the smallest gap that holds it, else on top.

    Other blocks have `fixed` offsets. A placement that reaches `most_bytes` is abandoned.
    """
    offsets = [0] * len(blocks)
    # The placed blocks, ordered by offset.
    lows, highs, starts, stops = placed = [np.zeros(len(blocks), np.int64) for _ in range(4)]
    count = len(fixed) if fixed else 0
    for at, (offset, i) in enumerate(sorted((offset, i) for i, offset in fixed.items()) if fixed else ()):
        offsets[i] = lows[at] = offset
        highs[at], starts[at], stops[at] = offset + blocks[i].size_bytes, blocks[i].start, blocks[i].stop
    reached = int(highs.max(initial=0))
    # In the order of their starts, a block that has ended conflicts with none of the later ones; all others do.
    forgetting = not count and all(blocks[a].start <= blocks[b].start for a, b in pairwise(order))
    for i in order:
        if reached >= most_bytes:
            break
        block = blocks[i]
        if forgetting:
            alive = (stops[:count] > block.start).nonzero()[0]
            if len(alive) < count:
                for column in placed:
                    column[: len(alive)] = column[alive]
                count = len(alive)
            low, high = lows[:count], highs[:count]
        else:
            overlapping = starts[:count] < block.stop
            overlapping &= stops[:count] > block.start
            concurrent = overlapping.nonzero()[0]
            low, high = lows[concurrent], highs[concurrent]
        from_ = np.zeros(len(low) + 1, np.int64)  # starts of the gaps
        np.maximum.accumulate(high, out=from_[1:])
        sizes = np.append(low, HIGHEST_BYTES) - from_
        fitting = (sizes >= block.size_bytes).nonzero()[0]
        offset = int(from_[fitting[sizes[fitting].argmin()]])
        offsets[i] = offset
        reached = max(reached, offset + block.size_bytes)
        at = int(lows[:count].searchsorted(offset))
        for column, value in zip(placed, (offset, offset + block.size_bytes, block.start, block.stop), strict=True):
            column[at + 1 : count + 1] = column[at:count]
            column[at] = value
        count += 1
    return offsets, reached


def _anneal(
    blocks: Sequence[Block], start: tuple[list[int], int], order: list[int], bound: int, good: int
) -> tuple[list[int], int]:
    """Move single blocks within the order and place again; at first accept orders that are a little worse.

    The search is seeded and counted in placements, never in seconds: the same blocks get the same offsets.
    """
    draw = random.Random(0)
    rounds = min(effort.ANNEAL_MAX_ROUNDS, effort.ANNEAL_WORK // len(blocks) ** 2)
    best, best_height = start
    height = best_height
    for done in range(rounds):
        if best_height <= good:
            break
        moved = list(order)
        moved.insert(draw.randrange(len(order)), moved.pop(draw.randrange(len(order))))
        offsets, reached = _lowest_first(blocks, moved)
        tolerated = bound * effort.ANNEAL_START_TOLERANCE * (1 - done / rounds)
        if reached <= height or draw.random() < math.exp((height - reached) / max(tolerated, 1.0)):
            order, height = moved, reached
        if reached < best_height:
            best, best_height = offsets, reached
    return best, best_height


def _lowest_first(blocks: Sequence[Block], order: Sequence[int]) -> tuple[list[int], int]:
    """Place blocks in the given order, each at the lowest offset where it fits; for few blocks this is fast."""
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int, int]] = []  # low, high, start, stop, ordered by low
    reached = 0
    for i in order:
        block = blocks[i]
        start, stop, size_bytes = block.start, block.stop, block.size_bytes
        offset = 0
        for low, high, other_start, other_stop in placed:
            if other_start < stop and start < other_stop:
                if low - offset >= size_bytes:
                    break
                offset = max(offset, high)
        offsets[i] = offset
        insort(placed, (offset, offset + size_bytes, start, stop))
        reached = max(reached, offset + size_bytes)
    return offsets, reached

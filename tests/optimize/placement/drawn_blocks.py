"""Blocks that tests place: random ones, or pieces of a rectangle; and the optimum of few blocks by brute force."""

from __future__ import annotations

import random
from itertools import permutations

from hypothesis import strategies as st

from mbc.optimize.schedule.liveness import Block

UNIT = 256


@st.composite
def block_lists(draw: st.DrawFn, most: int) -> list[Block]:
    count = draw(st.integers(0, most))
    result = []
    for i in range(count):
        start = draw(st.integers(0, 12))
        stop = start + draw(st.integers(1, 8))
        result.append(Block((i,), UNIT * draw(st.integers(1, 9)), start, stop))
    return result


def overlaps(blocks: list[Block], offsets: list[int]) -> bool:
    for i, a in enumerate(blocks):
        for j, b in enumerate(blocks[:i]):
            at_once = a.start < b.stop and b.start < a.stop
            apart = offsets[i] + a.size_bytes <= offsets[j] or offsets[j] + b.size_bytes <= offsets[i]
            if at_once and not apart:
                return True
    return False


def lowest_height(blocks: list[Block]) -> int:
    """Return the least height: every order is tried, each block at the lowest free place, and some order is optimal."""
    best = sum(b.size_bytes for b in blocks)
    for order in permutations(range(len(blocks))):
        offsets: dict[int, int] = {}
        for i in order:
            block = blocks[i]
            taken = sorted(
                (offsets[j], offsets[j] + blocks[j].size_bytes)
                for j in offsets
                if block.start < blocks[j].stop and blocks[j].start < block.stop
            )
            at = 0
            for low, high in taken:
                if low - at >= block.size_bytes:
                    break
                at = max(at, high)
            offsets[i] = at
        best = min(best, max(offsets[i] + blocks[i].size_bytes for i in offsets))
    return best


def cut(rng: random.Random, low: int, high: int, start: int, stop: int, count: int) -> list[tuple[int, int, int, int]]:
    """Return at most `count` pieces of a rectangle, which therefore fit it without a gap."""
    if count > 1 and rng.random() < 0.5 and high - low >= 8:
        middle = rng.randrange(low + 2, high - 1)
        parts = (low, middle, start, stop), (middle, high, start, stop)
    elif count > 1 and stop - start >= 4:
        middle = rng.randrange(start + 1, stop)
        parts = (low, high, start, middle), (low, high, middle, stop)
    else:
        return [(low, high, start, stop)]
    first = rng.randrange(1, count)
    return cut(rng, *parts[0], first) + cut(rng, *parts[1], count - first)


def jigsaw(count: int, seed: int = 2) -> list[Block]:
    parts = cut(random.Random(seed), 0, 2000, 0, 400, count)
    blocks = [Block((i,), UNIT * (high - low), start, stop) for i, (low, high, start, stop) in enumerate(parts)]
    return sorted(blocks, key=lambda block: block.start)

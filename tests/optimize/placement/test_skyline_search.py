"""Skyline search: valid, complete as far as brute force can tell, and optimal on randomly cut rectangles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.optimize.placement import skyline_search
from mbc.optimize.placement.place_blocks import place
from mbc.optimize.placement.skyline_search import search
from mbc.optimize.placement.skyline_state import columns_of
from mbc.optimize.schedule.liveness import Block, peak_bytes
from tests.optimize.placement.drawn_blocks import UNIT, block_lists, jigsaw, lowest_height, overlaps

ENOUGH = 100_000


@st.composite
def crowded(draw: st.DrawFn, most: int) -> list[Block]:
    """Draw blocks of few launches, so that most of them are live with most others."""
    lives = draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=most)
    )
    return [Block((i,), UNIT * size, start, start + life) for i, (start, life, size) in enumerate(lives)]


@given(crowded(6) | block_lists(6).filter(bool))
@settings(max_examples=300, deadline=None)
def test_the_optimum_is_found_and_nothing_below_it(blocks: list[Block]) -> None:
    optimum = lowest_height(blocks)
    offsets = search(blocks, optimum, ENOUGH)
    assert offsets is not None
    assert not overlaps(blocks, offsets)
    assert all(0 <= offset <= optimum - block.size_bytes for block, offset in zip(blocks, offsets, strict=True))
    assert search(blocks, optimum - 1, ENOUGH) is None


# Sizes, starts and stops of blocks whose peak is 4 and whose optimum is 5 (by CP-SAT).
ABOVE_THE_BOUND = (
    (2, 6, 7), (2, 4, 7), (1, 2, 5), (2, 5, 6), (1, 2, 4), (2, 1, 3), (2, 0, 1), (2, 1, 2), (2, 0, 1), (1, 3, 5),
    (1, 3, 4),
)  # fmt: skip


def test_the_search_ends_by_itself_where_the_lower_bound_cannot_be_reached() -> None:
    blocks = [Block((i,), UNIT * size, start, stop) for i, (size, start, stop) in enumerate(ABOVE_THE_BOUND)]
    assert peak_bytes(blocks)[0] == 4 * UNIT
    assert search(blocks, 5 * UNIT - 1, 10**12) is None
    assert search(blocks, 5 * UNIT, ENOUGH) is not None


@given(block_lists(40), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_placements_are_within_the_limit(blocks: list[Block], more: int) -> None:
    limit = peak_bytes(blocks)[0] + more * UNIT // 2
    offsets = search(blocks, limit, 2000)
    if offsets is not None:
        assert not overlaps(blocks, offsets)
        assert all(0 <= offset <= limit - block.size_bytes for block, offset in zip(blocks, offsets, strict=True))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_full_rectangle_is_packed_without_a_gap(seed: int) -> None:
    blocks = jigsaw(400, seed)
    bound = peak_bytes(blocks)[0]
    offsets = search(blocks, bound, ENOUGH)
    assert offsets is not None
    assert not overlaps(blocks, offsets)
    assert max(offset + block.size_bytes for offset, block in zip(offsets, blocks, strict=True)) == bound
    assert place(blocks)[1] > bound, "heuristics reach it as well: the test shows nothing"


def test_a_search_that_ends_before_all_blocks_are_placed_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    row = [Block((i,), UNIT, i, i + 1) for i in range(400)]
    assert search(row[:300], UNIT, 2500) == [0] * 300
    assert search(row, UNIT, 20_000) == [0] * 400
    monkeypatch.setattr(skyline_search, "Packing", None)
    assert search(row, UNIT, 2500) is None


def test_nodes_are_limited_and_the_same_blocks_get_the_same_offsets() -> None:
    blocks = jigsaw(400)
    bound = peak_bytes(blocks)[0]
    assert search(blocks, bound, len(blocks) - 1) is None, "each block takes a node"
    assert search(blocks, bound, ENOUGH) == search(blocks, bound, ENOUGH)


@given(block_lists(30))
def test_blocks_share_a_column_where_they_are_live_at_once(blocks: list[Block]) -> None:
    starts, stops, columns = columns_of(blocks)
    assert columns <= len(blocks)
    assert all(0 <= start < stop <= columns for start, stop in zip(starts, stops, strict=True))
    for i, a in enumerate(blocks):
        for j, b in enumerate(blocks):
            assert (starts[i] < stops[j] and starts[j] < stops[i]) == (a.start < b.stop and b.start < a.stop)

"""Placement: blocks never overlap, the height is at least the bound, and optimal if brute force can tell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mbc.optimize.placement.place_blocks
from mbc.optimize import effort
from mbc.optimize.placement.place_blocks import fit_within, place, place_around, place_lowest
from mbc.optimize.placement.skyline import fill_up
from mbc.optimize.placement.skyline_search import search
from mbc.optimize.schedule.liveness import Block, peak_bytes
from tests.optimize.placement.drawn_blocks import UNIT, block_lists, jigsaw, lowest_height, overlaps


@given(block_lists(30))
@settings(max_examples=200)
def test_placement_is_legal(blocks: list[Block]) -> None:
    offsets, height = place(blocks)
    assert not overlaps(blocks, offsets)
    assert all(offset % UNIT == 0 and offset >= 0 for offset in offsets)
    assert height == max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0)
    assert height >= peak_bytes(blocks)[0]


@given(block_lists(30), st.integers(0, 4))
@settings(max_examples=100)
def test_fitting_plans_are_within_the_budget(blocks: list[Block], more: int) -> None:
    available_bytes = peak_bytes(blocks)[0] + more * UNIT
    offsets = fit_within(blocks, available_bytes)
    if offsets is not None:
        assert not overlaps(blocks, offsets)
        assert all(offset + block.size_bytes <= available_bytes for offset, block in zip(offsets, blocks, strict=True))
    assert fit_within(blocks, sum(block.size_bytes for block in blocks)) is not None


@given(block_lists(30), st.integers(0, 30))
@settings(max_examples=100)
def test_measured_places_are_kept(blocks: list[Block], count: int) -> None:
    fixed = dict(enumerate(place(blocks[:count])[0]))
    offsets, height = place_around(blocks, fixed)
    assert offsets[:count] == list(fixed.values())
    assert not overlaps(blocks, offsets)
    assert height == max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0)


@given(block_lists(6))
@settings(max_examples=60)
def test_placement_of_few_blocks_is_optimal(blocks: list[Block]) -> None:
    if blocks:
        assert place(blocks)[1] == lowest_height(blocks)


@given(block_lists(20))
@settings(max_examples=30)
def test_same_blocks_same_placement(blocks: list[Block]) -> None:
    assert place(blocks) == place(blocks)


@given(block_lists(30))
def test_peak_is_the_most_alive_at_any_launch(blocks: list[Block]) -> None:
    naive = max((sum(b.size_bytes for b in blocks if b.start <= t < b.stop) for t in range(25)), default=0)
    assert peak_bytes(blocks)[0] == naive


def nothing(blocks: list[Block], good: int) -> list[list[int]]:
    return []


def never(blocks: list[Block], limit_bytes: int, most_nodes: int) -> None:
    """Search without finding offsets."""


def test_filling_up_comes_near_the_live_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mbc.optimize.placement.place_blocks, "search", never)
    blocks = jigsaw(400)
    bound = peak_bytes(blocks)[0]
    offsets, height = place(blocks, int(1.02 * bound))
    assert height <= 1.03 * bound
    assert not overlaps(blocks, offsets)
    monkeypatch.setattr(mbc.optimize.placement.place_blocks, "fill_up", nothing)
    _, without = place(blocks, int(1.02 * bound))
    assert without > 1.1 * bound, "greedy and annealing come as near: the test shows nothing"


@given(block_lists(30))
@settings(max_examples=20)
def test_every_round_of_filling_up_is_legal(blocks: list[Block]) -> None:
    for offsets in fill_up(blocks, 0) if blocks else ():
        assert not overlaps(blocks, offsets)
        assert min(offsets) == 0


def test_rounds_get_lower() -> None:
    blocks = jigsaw(200)
    heights = [max(o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)) for offsets in fill_up(blocks, 0)]
    assert len(heights) > 2, "the first round is the best: what is too high does not come earlier"
    assert heights == sorted(heights, reverse=True)


def test_a_budget_that_heuristics_exceed_is_searched_for() -> None:
    blocks = jigsaw(400)
    bound = peak_bytes(blocks)[0]
    offsets, height = place(blocks, bound)
    assert height == bound
    assert not overlaps(blocks, offsets)


@pytest.mark.parametrize("budget", [0.0, 0.99, 1.1])  # none, less than any placement, more than heuristics need
def test_nothing_is_searched_without_a_budget_that_it_can_help(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(blocks: list[Block], limit_bytes: int, most_nodes: int) -> None:
        pytest.fail(f"searched within {limit_bytes}")

    monkeypatch.setattr(mbc.optimize.placement.place_blocks, "search", asked)
    blocks = jigsaw(400)
    bound = peak_bytes(blocks)[0]
    _, height = place(blocks, int(budget * bound))
    assert bound < height < 1.1 * bound


def search_that_fails_below(lowest: int, bound: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the search find no placement below `lowest`; return a list that will have the heights that were tried."""
    limits: list[int] = []

    def from_lowest(blocks: list[Block], limit_bytes: int, most_nodes: int) -> list[int] | None:
        limits.append(limit_bytes)
        offsets = search(blocks, bound, most_nodes) or []
        return [offset + limit_bytes - bound for offset in offsets] if limit_bytes >= lowest else None

    monkeypatch.setattr(mbc.optimize.placement.place_blocks, "search", from_lowest)
    return limits


def test_the_search_lowers_states_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = jigsaw(400)
    bound = peak_bytes(blocks)[0]
    _, heuristic = place(blocks)
    lowest = (3 * bound + heuristic) // 4
    limits = search_that_fails_below(lowest, bound, monkeypatch)
    offsets, height = place(blocks, int(1.002 * bound))
    assert limits[:2] == [bound, int(1.002 * bound)], "the lower bound first, then the budget"
    assert len(limits) == effort.SKYLINE_SEARCH_LIMITS
    assert lowest <= height < lowest + (heuristic - bound) / 8, "halved three times"
    assert not overlaps(blocks, offsets)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_lowest_placement_is_searched_for_without_a_height(seed: int) -> None:
    blocks = jigsaw(400, seed)
    bound = peak_bytes(blocks)[0]
    assert place(blocks)[1] > bound, "heuristics reach it as well: the test shows nothing"
    offsets, height = place_lowest(blocks)
    assert height == bound and not overlaps(blocks, offsets)
    assert place_lowest(blocks, len(blocks) - 1) == place(blocks), "each block takes a node"


@given(block_lists(6))
@settings(max_examples=60, deadline=None)
def test_the_lowest_placement_of_few_blocks_is_optimal(blocks: list[Block]) -> None:
    assert place_lowest(blocks)[1] == (lowest_height(blocks) if blocks else 0)


def test_heights_above_a_bound_that_is_out_of_reach_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = jigsaw(400)
    bound, heuristic = peak_bytes(blocks)[0], place(blocks)[1]
    lowest = (3 * bound + heuristic) // 4
    limits = search_that_fails_below(lowest, bound, monkeypatch)
    height = place_lowest(blocks, 100_000)[1]
    assert limits[0] == bound and lowest <= height <= 1.001 * lowest
    assert sum(limit < lowest for limit in limits) == effort.SKYLINE_SEARCH_LOWEST_FAILURES

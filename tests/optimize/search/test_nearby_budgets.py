"""A little less room is tried, too, where what is found hangs on chance: `_with_other_budgets` of
`mbc.optimize.search.search`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mbc.optimize import effort
from mbc.optimize.search import search

LEAST_US = 100.0  # without a limit
ROOM_BYTES = 1000


def found(step_us: float, arena_bytes: int, launches: int = 10) -> Any:
    draft = SimpleNamespace(train=SimpleNamespace(launches=range(launches)))
    return SimpleNamespace(step_us=step_us, placed=SimpleNamespace(arena_bytes=arena_bytes), draft=draft)


@pytest.fixture
def luckier(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, Any]], tuple[Any, list[int]]]:
    """What it takes of what is found in each room, and the rooms that were tried."""
    forms: Any = (SimpleNamespace(table=None, unlimited=SimpleNamespace(train_us=LEAST_US)),)

    def run(by_room: dict[int, Any]) -> tuple[Any, list[int]]:
        tried: list[int] = []

        def faster(forms: Any, limits: Any, techniques: Any, available_bytes: int) -> Any:
            tried.append(available_bytes)
            return by_room[available_bytes]

        monkeypatch.setattr(search, "_with_or_without_masks", faster)
        nothing: Any = None
        return search._with_other_budgets(forms, nothing, nothing, ROOM_BYTES), tried

    return run


def test_a_step_that_is_fast_enough_is_taken_at_once(luckier):
    first = found(120.0, 1000)
    assert luckier({1000: first}) == (first, [1000])


def test_of_slow_ones_the_fastest_is_taken_until_one_is_fast(luckier):
    slow, faster, fast = found(150.0, 1000), found(140.0, 995), found(110.0, 990)
    assert luckier({1000: slow, 995: faster, 990: fast}) == (fast, [1000, 995, 990])
    assert luckier({1000: slow, 995: fast}) == (fast, [1000, 995])
    assert luckier({1000: faster, 995: slow, 990: slow}) == (faster, [1000, 995, 990])


def test_what_does_not_fit_or_is_long_is_not_tried_again(luckier):
    high, long = found(150.0, 1001), found(150.0, 1000, effort.NEARBY_BUDGETS_MAX_LAUNCHES + 1)
    assert luckier({1000: high}) == (high, [1000])
    assert luckier({1000: long}) == (long, [1000])

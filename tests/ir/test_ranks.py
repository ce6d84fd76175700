"""Rows of a mini-batch are shared evenly, and each row belongs to one rank."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.ir.graph import Ranks
from mbc.ir.ranks import grouped, rows_by_speed, share_rows


def test_even() -> None:
    assert share_rows(12, 4) == (Ranks((3, 3, 3, 3), (0, 1, 2, 3)),)


def test_uneven() -> None:
    rows = (3, 3, 2)
    assert share_rows(8, 3) == (Ranks(rows, (0, 1)), Ranks(rows, (2,)))
    assert [ranks.share for ranks in share_rows(8, 3)] == [3 / 8, 2 / 8]
    assert [Ranks(rows, (2,)).first_row(rank) for rank in range(3)] == [0, 3, 6]


@given(st.integers(1, 200), st.integers(2, 40))
def test_every_row_is_of_one_rank(batch: int, size: int) -> None:
    if batch < size:
        with pytest.raises(MbcError, match="MBC280"):
            share_rows(batch, size)
        return
    shared = share_rows(batch, size)
    assert len({ranks.rows for ranks in shared}) == 1 and 1 <= len(shared) <= 2
    rows = shared[0].rows
    assert sum(rows) == batch == shared[0].batch and len(rows) == size == shared[0].size
    assert max(rows) - min(rows) <= 1 and list(rows) == sorted(rows, reverse=True)
    assert sorted(rank for ranks in shared for rank in ranks.members) == list(range(size))
    assert all(len({rows[rank] for rank in ranks.members}) == 1 for ranks in shared)
    assert [shared[0].first_row(rank) for rank in range(size)] == [0, *accumulate(rows)][:-1]


def test_fewer_rows_than_ranks() -> None:
    with pytest.raises(MbcError) as caught:
        share_rows(2, 3)
    assert caught.value.code == "MBC280"
    assert caught.value.message == "a mini-batch of 2 cannot be shared by 3 GPUs: each needs one row or more"
    assert "raise batch" in (caught.value.remedy or "")


# Unlike GPUs


def slowest_us(rows: tuple[int, ...], kinds: tuple[str, ...], step_us) -> float:
    return max(step_us(kind, own) for kind, own in zip(kinds, rows, strict=True))


@pytest.mark.parametrize(
    ("batch", "speeds", "rows"),
    [(96, (2.0, 1.0), (64, 32)), (256, (1.0, 1.0, 1.0, 1.0), (64,) * 4), (10, (1.0, 1.0, 3.0), (2, 2, 6))],
)
def test_rows_by_speed(batch: int, speeds: tuple[float, ...], rows: tuple[int, ...]) -> None:
    kinds = tuple(f"gpu of {speed}" for speed in speeds)
    speed = dict(zip(kinds, speeds, strict=True))
    assert rows_by_speed(batch, kinds, lambda kind, own: own / speed[kind]) == rows


def test_measured_rows_near_the_best_are_tried() -> None:
    """Let unmeasured rows seem slower, so that straight lines lead to another share."""
    asked: list[tuple[str, int]] = []

    def step_us(kind: str, own: int) -> float:
        asked.append((kind, own))
        return own if kind == "whole" else own * (2.0 if own == 86 else 2.6)

    kinds = ("whole", "part", "part")
    measured = {"whole": (16, 170, 256), "part": (86, 512)}
    assert rows_by_speed(342, kinds, step_us, measured.__getitem__) == (170, 86, 86)
    assert not {16, 256, 512} & {own for _, own in asked} and len(asked) < 20
    assert rows_by_speed(342, kinds, step_us) != (170, 86, 86)


@given(st.data())
def test_no_other_shares_are_sooner_done(data: st.DataObject) -> None:
    """The chosen share is compared with all other shares, for step times that grow linearly with the rows."""
    batch = data.draw(st.integers(2, 40))
    fixed_us, row_us = (data.draw(st.tuples(*[st.floats(0.0, 30.0)] * 2)) for _ in range(2))

    def step_us(kind: str, own: int) -> float:
        at = "ab".index(kind)
        return fixed_us[at] + (0.1 + row_us[at]) * own

    rows = rows_by_speed(batch, ("a", "b"), step_us)
    assert sum(rows) == batch and min(rows) >= 1
    least = min(slowest_us((n, batch - n), ("a", "b"), step_us) for n in range(1, batch))
    assert slowest_us(rows, ("a", "b"), step_us) <= least * (1 + 1e-9)


@pytest.mark.parametrize("most", [1, 7, 20, 31, 32])
def test_a_gpu_gets_as_many_rows_as_it_holds(most: int) -> None:
    """The small GPU is faster, so it gets as many rows as its memory holds."""
    asked: list[tuple[str, int]] = []

    def step_us(kind: str, own: int) -> float:
        asked.append((kind, own))
        return own / 4 if kind == "small" and own <= most else float("inf") if kind == "small" else own

    assert rows_by_speed(40, ("small", "large"), step_us) == (most, 40 - most)
    assert len(asked) == len(set(asked)) <= 20


def test_gpus_that_hold_too_few() -> None:
    with pytest.raises(MbcError, match=r"error MBC284: no share of 40 rows .* are 4 on rank 0, 5 on rank 1"):
        rows_by_speed(40, ("a", "b"), lambda kind, own: own if own <= (4 if kind == "a" else 5) else float("inf"))
    with pytest.raises(MbcError, match="MBC280"):
        rows_by_speed(1, ("a", "b"), lambda kind, own: own)


def test_a_gpu_that_holds_no_row() -> None:
    with pytest.raises(MbcError, match=r"error MBC284: .* 9 on rank 0, 0 on rank 1"):
        rows_by_speed(10, ("a", "b"), lambda kind, own: own if kind == "a" else float("inf"))


@given(st.data())
@settings(max_examples=60)
def test_shares_within_memory(data: st.DataObject) -> None:
    """Check three kinds of GPUs with limits: if some share fits, one is found, and no other is much faster."""
    batch = data.draw(st.integers(3, 40))
    fixed_us, row_us = (data.draw(st.tuples(*[st.floats(0.0, 30.0)] * 3)) for _ in range(2))
    most = data.draw(st.tuples(*[st.integers(1, 40)] * 3))

    def step_us(kind: str, own: int) -> float:
        at = "abc".index(kind)
        return fixed_us[at] + (0.1 + row_us[at]) * own if own <= most[at] else float("inf")

    kinds = ("a", "b", "c")
    ways = [(a, b, batch - a - b) for a in range(1, batch - 1) for b in range(1, batch - a)]
    least = min(slowest_us(way, kinds, step_us) for way in ways)
    if least == float("inf"):
        with pytest.raises(MbcError, match="MBC284"):
            rows_by_speed(batch, kinds, step_us)
    else:
        assert slowest_us(rows_by_speed(batch, kinds, step_us), kinds, step_us) <= least * (1 + 1e-9)


def test_ranks_of_one_kind_and_as_many_rows_have_one_plan() -> None:
    rows = (5, 3, 5, 3, 4)
    assert grouped(rows, ("a", "b", "a", "a", "b")) == tuple(
        Ranks(rows, members) for members in ((0, 2), (1,), (3,), (4,))
    )

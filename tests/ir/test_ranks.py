"""Rows of a mini-batch are shared evenly, each once."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.ir.graph import Ranks
from mbc.ir.ranks import share_rows


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

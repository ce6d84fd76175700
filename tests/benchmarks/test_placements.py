"""Instances of the placement benchmark: full rectangles, seeded; and its own check of offsets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import placements

from mbc.optimize.schedule.liveness import Block, live_bytes
from mbc.plan.model import ALIGNMENT_BYTES


@pytest.mark.parametrize("cut", placements.CUTS)
def test_a_cut_rectangle_stays_full(cut: placements.Cut) -> None:
    blocks = placements.instance(cut, 200, seed=1)
    assert 150 <= len(blocks) <= 200
    assert set(live_bytes(blocks, max(block.stop for block in blocks))) == {placements.HEIGHT * ALIGNMENT_BYTES}
    assert blocks == placements.instance(cut, 200, seed=1) != placements.instance(cut, 200, seed=2)


def test_what_overlaps_or_is_too_high_is_not_correct() -> None:
    blocks = [Block((0,), 4, 0, 2), Block((1,), 4, 1, 3)]
    assert placements.correct(blocks, [0, 4], 8)
    assert not placements.correct(blocks, [0, 3], 8)
    assert not placements.correct(blocks, [0, 5], 8)
    assert not placements.correct(blocks, [-1, 4], 8)


def test_blocks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "blocks.csv"
    path.write_text("id,lower,upper,size\nb1,0,3,4\nb2,3,9,8\n", encoding="utf-8")
    assert placements.read(path) == [Block((0,), 4, 0, 3), Block((1,), 8, 3, 9)]

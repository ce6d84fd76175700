"""The generator behind dropout: known answers, and masks that do not depend on how rows are divided."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.random import ChannelDropout, Dropout, DropPath, dropout_keep, philox
from tests.ir.execution import new_control

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_answers_of_random123(
    key: tuple[int, int], counter: tuple[int, int, int, int], expected: tuple[int, ...]
) -> None:
    block = np.array([counter[0] | counter[1] << 32], np.uint64)
    assert tuple(philox(key, block, counter[2], counter[3])[0]) == expected


def test_element_i_takes_word_i_mod_4_of_block_i_div_4() -> None:
    a = Dropout(0.3, key=77)
    keep = dropout_keep(a, (3, 5), 0, seed=(9 << 32) | 4, step=6)
    words = philox((4, 9), np.arange(4, dtype=np.uint64), 6, 77)
    expected = [words[i // 4, i % 4] * 2.0**-32 < 1 - 0.3 for i in range(15)]
    assert keep.reshape(-1).tolist() == expected


@pytest.mark.parametrize("features", [1, 3, 4, 7])
def test_a_mask_of_some_rows_is_that_part_of_the_whole(features: int) -> None:
    a = Dropout(0.5, key=1)
    whole = dropout_keep(a, (9, features), 0, seed=3, step=2)
    for first in range(9):
        assert np.array_equal(dropout_keep(a, (9 - first, features), first, seed=3, step=2), whole[first:])


@pytest.mark.parametrize(("a", "drawn"), [(DropPath(0.5, key=1), (9, 1, 1)), (ChannelDropout(0.5, key=1), (9, 2, 1))])
def test_a_path_is_dropped_for_whole_samples_or_channels(a: Dropout, drawn: tuple[int, ...]) -> None:
    keep = dropout_keep(a, (9, 2, 3), 0, seed=3, step=2)
    assert keep.shape == drawn and 0 < keep.sum() < keep.size
    assert keep.reshape(-1).tolist() == dropout_keep(Dropout(0.5, key=1), (keep.size,), 0, seed=3, step=2).tolist()
    assert np.array_equal(dropout_keep(a, (4, 2, 3), 5, seed=3, step=2), keep[5:])


def test_the_share_kept_and_the_scale() -> None:
    a = Dropout(0.25, key=5)
    kind = TensorType((64, 1000), DType.FP32)
    evaluate = KINDS["dropout"].evaluate
    assert evaluate is not None
    x = np.ones(kind.shape, np.float32)
    (y,) = evaluate(a, (x, new_control(step=1, seed=2)), Call((kind,), 0, 64, Precision.FP32))
    assert abs((y != 0).mean() - 0.75) < 0.01
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    for step, seed, key in ((2, 2, 5), (1, 3, 5), (1, 2, 6)):
        other = dropout_keep(Dropout(0.25, key), kind.shape, 0, seed, step)
        assert abs((other == (y != 0)).mean() - (0.75**2 + 0.25**2)) < 0.01

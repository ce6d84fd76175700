"""The pool of random numbers from which operands are cut."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ir.types import DType, Layout
from mbc.measure.random_pool import MOST_ELEMENTS, numbers, stored_numbers
from mbc.runtime.formats import loaded


@pytest.mark.parametrize("dtype", [DType.FP64, DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize("positive", [False, True])
def test_numbers_are_those_of_the_stored_bytes(dtype: DType, positive: bool) -> None:
    data = stored_numbers(dtype, 5000, 3, positive)
    assert np.array_equal(loaded(data, (5000,), dtype, Layout.CHANNELS_FIRST), numbers(dtype, 5000, 3, positive))


def test_numbers_are_normal_or_positive() -> None:
    normal, positive = numbers(DType.FP32, 100_000, 0), numbers(DType.FP32, 100_000, 0, positive=True)
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    assert 0.5 <= positive.min() < 0.51 and 1.99 < positive.max() <= 2


def test_a_scale_is_applied_before_rounding() -> None:
    small = numbers(DType.FP16, 10_000, 0, scale=2.0**-12)
    assert np.array_equal(small.astype(np.float16).astype(np.float32), small)  # denormal ones, too
    assert np.array_equal(small, (numbers(DType.FP32, 10_000, 0) * np.float32(2.0**-12)).astype(np.float16))


def test_operands_differ_and_repeat_beyond_the_pool() -> None:
    first, second = numbers(DType.FP32, 1000, 0), numbers(DType.FP32, 1000, 1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.15
    assert len({numbers(DType.FP32, 8, operand).tobytes() for operand in range(256)}) == 256
    many = numbers(DType.FP32, 2 * MOST_ELEMENTS, 1)
    assert np.array_equal(many[:MOST_ELEMENTS], many[MOST_ELEMENTS:])


def test_nobody_writes_into_the_pool() -> None:
    for array in (numbers(DType.BF16, 10, 0), stored_numbers(DType.BF16, 10, 0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0

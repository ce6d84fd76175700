"""A pool of random numbers from which all operands are cut.

To draw and round a million numbers takes longer than to measure a small operation. So the numbers are drawn once for
each type in which they are stored. The operands of an operation, up to 256, start at different places in the pool.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Layout
from mbc.runtime.formats import loaded, stored_bytes

MOST_ELEMENTS = (1 << 20) + 61  # then the numbers repeat; odd, so that no two rows are equal
_STARTS, _START_STEP = 256, 521

Array = NDArray[Any]


def numbers(dtype: DType, count: int, operand: int, positive: bool = False, scale: float = 1.0) -> Array:
    """Return `count` read-only numbers for an operand, in NumPy's type, rounded to `dtype`.

    Args:
        dtype: Type in which the numbers are stored.
        count: Number of elements; beyond MOST_ELEMENTS they repeat.
        operand: Index of the operand, which selects the start in the pool.
        positive: Draw from 0.5 to 2 rather than from the normal distribution.
        scale: Factor of all numbers.
    """
    start = operand % _STARTS * _START_STEP
    drawn = _rounded(dtype, positive, scale)[start : start + min(count, MOST_ELEMENTS)]
    return np.resize(drawn, count) if count > MOST_ELEMENTS else drawn


def stored_numbers(
    dtype: DType, count: int, operand: int, positive: bool = False, scale: float = 1.0
) -> NDArray[np.uint8]:
    """Return the numbers of `numbers` as the bytes of a buffer, at most MOST_ELEMENTS."""
    start = operand % _STARTS * _START_STEP * dtype.size_bytes
    return _stored(dtype, positive, scale)[start : start + min(count, MOST_ELEMENTS) * dtype.size_bytes]


@lru_cache(maxsize=2)
def _drawn(positive: bool) -> NDArray[np.float32]:
    rng, count = np.random.default_rng(0), MOST_ELEMENTS + _STARTS * _START_STEP
    return rng.uniform(0.5, 2.0, count).astype(np.float32) if positive else rng.standard_normal(count, np.float32)


@lru_cache(maxsize=8)
def _stored(dtype: DType, positive: bool, scale: float = 1.0) -> NDArray[np.uint8]:
    data = stored_bytes(_drawn(positive) * np.float32(scale), dtype, Layout.CHANNELS_FIRST)
    data.flags.writeable = False
    return data


@lru_cache(maxsize=16)
def _rounded(dtype: DType, positive: bool, scale: float) -> Array:
    values = loaded(_stored(dtype, positive, scale), _drawn(positive).shape, dtype, Layout.CHANNELS_FIRST)
    values.flags.writeable = False
    return values

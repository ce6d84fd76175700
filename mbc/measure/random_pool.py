"""Random numbers that the operands of everything measured are cut from.

Drawing and rounding a million numbers takes longer than a small operation is measured with, so that is done once for
each type that they are stored as. The operands of an operation, up to 256 of them, start elsewhere in the pool.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Layout
from mbc.runtime.formats import loaded, stored_bytes

MOST_ELEMENTS = (1 << 20) + 61  # then they repeat; odd, so that no two rows are alike
_STARTS, _START_STEP = 256, 521

Array = NDArray[Any]


def numbers(dtype: DType, count: int, operand: int, positive: bool = False, scale: float = 1.0) -> Array:
    """`count` numbers for an operand by its place: as NumPy computes with them, rounded as `dtype` stores them, not to
    be written to. Normal ones times `scale`, or `positive` ones from 0.5 to 2. Beyond MOST_ELEMENTS they repeat."""
    start = operand % _STARTS * _START_STEP
    drawn = _rounded(dtype, positive, scale)[start : start + min(count, MOST_ELEMENTS)]
    return np.resize(drawn, count) if count > MOST_ELEMENTS else drawn


def stored_numbers(dtype: DType, count: int, operand: int, positive: bool = False) -> NDArray[np.uint8]:
    """The same as the bytes of a buffer, MOST_ELEMENTS at most."""
    start = operand % _STARTS * _START_STEP * dtype.size_bytes
    return _stored(dtype, positive)[start : start + min(count, MOST_ELEMENTS) * dtype.size_bytes]


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

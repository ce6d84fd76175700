"""GEMMs add K block by block: right for every shape, and nearer to the exact result than one long sum."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.ops.products import product


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("depth", [1, 63, 64, 65, 128, 5000])
def test_equals_the_product(dtype: type, depth: int) -> None:
    random = np.random.default_rng(depth)
    a = random.integers(-4, 5, (2, 3, depth)).astype(dtype)
    b = random.integers(-4, 5, (2, depth, 5)).astype(dtype)
    actual = product(a, b)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, a @ b)  # whole numbers: every order of summation is exact


def test_transposed_operands() -> None:
    random = np.random.default_rng(1)
    a = random.standard_normal((200, 4)).astype(np.float32)
    b = random.standard_normal((7, 200)).astype(np.float32)
    np.testing.assert_allclose(product(a.T, b.T), a.T.astype(np.float64) @ b.T, rtol=1e-4, atol=1e-5)


def test_error_grows_slowly_with_depth() -> None:
    random = np.random.default_rng(2)
    # Sums of positive numbers, where a long float32 sum loses most.
    a = random.random((8, 1 << 16), dtype=np.float32)
    b = random.random((1 << 16, 8), dtype=np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(product(a, b) - exact) / np.linalg.norm(exact)
    assert error < 16 * np.finfo(np.float32).eps

"""Matrix products with blocked summation over K, so that rounding errors stay small."""

from __future__ import annotations

import math

import numpy as np

from mbc.ops.base import Array

_LEAST_BLOCK = 64  # smaller blocks cost more passes over the result than their accuracy justifies


def product(a: Array, b: Array) -> Array:
    """Return a @ b for [..., M, K] and [..., K, N], summed in blocks of K.

    BLAS accumulates some hundreds of float32 products sequentially. Blocks of about sqrt(K) keep the error near that of
    sqrt(K) additions: blocked summation, as in Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section
    4.2. Products in float64 need no blocks.
    """
    depth = a.shape[-1]
    block = max(_LEAST_BLOCK, math.isqrt(depth))
    if a.dtype != np.float32 or depth <= block:
        return np.matmul(a, b)
    total = np.matmul(a[..., :block], b[..., :block, :])
    part = np.empty_like(total)
    for start in range(block, depth, block):
        np.matmul(a[..., start : start + block], b[..., start : start + block, :], out=part)
        total += part
    return total

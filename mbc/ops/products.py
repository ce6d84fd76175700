"""Matrix products whose rounding errors stay small."""

from __future__ import annotations

import math

import numpy as np

from mbc.ops.base import Array

_SHORTEST_PIECE = 64  # shorter ones cost more in passes over the result than they gain


def product(a: Array, b: Array) -> Array:
    """a @ b for [..., M, K] and [..., K, N], summed over K in parts.

    BLAS adds some hundreds of float32 products sequentially. Parts of about sqrt(K), added up at the end, keep the
    error near that of sqrt(K) additions: blocked summation, as in Higham, "Accuracy and Stability of Numerical
    Algorithms", 2002, section 4.2. In float64 nobody needs that.
    """
    depth = a.shape[-1]
    piece = max(_SHORTEST_PIECE, math.isqrt(depth))
    if a.dtype != np.float32 or depth <= piece:
        return np.matmul(a, b)
    total = np.matmul(a[..., :piece], b[..., :piece, :])
    part = np.empty_like(total)
    for start in range(piece, depth, piece):
        np.matmul(a[..., start : start + piece], b[..., start : start + piece, :], out=part)
        total += part
    return total

"""Rounding of matrix operands to TF32."""

from __future__ import annotations

import numpy as np

from mbc.ir.types import Precision
from mbc.ops.base import Array


def round_tf32(x: Array) -> Array:
    """float32 rounded to 10 bits of mantissa, to nearest, ties away from zero (PTX `cvt.rna.tf32.f32`)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)  # infinities and NaN keep their bits
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(special, bits, rounded).view(np.float32)


def operand(x: Array, precision: Precision) -> Array:
    """What a convolution or matrix product reads of `x`. bf16 and fp16 operands are rounded by their storage."""
    return round_tf32(x) if precision is Precision.TF32 and x.dtype == np.float32 else x

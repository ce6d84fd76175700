"""Rounding to the type in which elements are stored, and of matrix operands to TF32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Precision
from mbc.ops.base import Array


def round_tf32(x: Array) -> Array:
    """Return float32 rounded to 10 bits of mantissa, to nearest, ties away from zero (PTX `cvt.rna.tf32.f32`)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)  # infinities and NaN keep their bits
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(special, bits, rounded).view(np.float32)


def operand(x: Array, precision: Precision) -> Array:
    """Return `x` as a convolution or matrix product reads it; bf16 and fp16 operands are rounded when stored."""
    return round_tf32(x) if precision is Precision.TF32 and x.dtype == np.float32 else x


def to_bf16(array: Array) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of every element.

    A NaN stays a (quiet) NaN; overflow becomes infinity.
    """
    single = np.asarray(array, np.float32)
    bits = single.reshape(-1).view(np.uint32)
    # Adding just under half of the last kept bit, and that bit itself, rounds ties to even; a carry into the
    # exponent is correct. A NaN could become infinity by a carry, so it is handled separately.
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    nan = np.isnan(single).reshape(-1)
    if nan.any():
        result[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return result.reshape(single.shape)


def from_bf16(bits: Array) -> NDArray[np.float32]:
    """Return the float32 values of bfloat16 bits; the conversion is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def stored(x: Array, dtype: DType) -> Array:
    """Return `x` as it is read after it was stored as `dtype`."""
    if dtype is DType.BF16:
        return from_bf16(to_bf16(x)).astype(x.dtype)
    if dtype is DType.FP16:
        with np.errstate(over="ignore"):  # numbers above 65504 become infinity, as on a GPU
            return x.astype(np.float16).astype(x.dtype)
    return x

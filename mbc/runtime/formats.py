"""Storage formats of elements: bfloat16, half and TF32 rounding, and the order of elements in memory.

An array is *canonical* when its axes are in the order of the value's shape (channels first) and NumPy computes with
its elements: float64, float32, int32 or uint8. All conversions round to nearest, ties to even.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.ir.types import DType, Layout
from mbc.ops.rounding import from_bf16, to_bf16

Array = NDArray[Any]

# NumPy's type of one stored element. NumPy has no bfloat16, so its 16 bits are stored as an integer.
STORED: dict[DType, np.dtype[Any]] = {
    DType.FP64: np.dtype("<f8"),
    DType.FP32: np.dtype("<f4"),
    DType.BF16: np.dtype("<u2"),
    DType.FP16: np.dtype("<f2"),
    DType.INT32: np.dtype("<i4"),
    DType.UINT8: np.dtype("u1"),
}


def canonical_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type that computes with values stored as `dtype`."""
    return STORED[DType.FP32] if dtype in (DType.BF16, DType.FP16) else STORED[dtype]


def wrong_elements(wanted: DType, given: np.dtype[Any]) -> tuple[str, str] | None:
    """Return the elements that an input needs and a remedy if the given type is wrong, otherwise None.

    `step`, `forward` and data sets share this rule. Integers are not accepted for floating-point numbers: pixels from 0
    to 255 would train a network that expects them from 0 to 1.

    Args:
        wanted: Type of the input in the network.
        given: Type of the array's elements.
    """
    if wanted is DType.INT32:
        return None if given.kind in "iu" else ("integers", "convert it with astype('int32')")
    if wanted is DType.UINT8:
        remedy = "give pixels from 0 to 255 as uint8 (what augment expects), or declare the input `: float`"
        return None if given == np.uint8 else ("bytes", remedy)
    if given.kind == "f":
        return None
    bytes_too = ", or declare the input `: uint8` and pipe it into augment" if given == np.uint8 else ""
    return "floating-point numbers", f"convert it with astype('float32'), scaled as the network expects{bytes_too}"


def canonical_view(data: NDArray[np.uint8], shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
    """Return stored bytes as a view in canonical order, without a copy; bfloat16 appears as its bits.

    `data` holds exactly the elements of `shape`. Writing to the view writes to `data`.
    """
    typed = data.view(STORED[dtype])
    if layout is Layout.CHANNELS_FIRST or len(shape) <= 2:
        return typed.reshape(shape)
    rows, channels, *spatial = shape
    return np.moveaxis(typed.reshape(rows, *spatial, channels), -1, 1)


def load(view: Array, dtype: DType) -> Array:
    """Return a canonical view as an array with which NumPy can compute; the view itself if it already is one."""
    if dtype is DType.BF16:
        return from_bf16(view)
    return view.astype(np.float32) if dtype is DType.FP16 else view


def store(view: Array, dtype: DType, array: Array) -> None:
    """Round `array` to `dtype` and write it to the canonical view."""
    if dtype is DType.BF16:
        view[...] = to_bf16(array)
    elif dtype is DType.FP16:
        with np.errstate(over="ignore"):  # values beyond 65504 become infinity, as on a GPU
            view[...] = array
    else:
        view[...] = array


def stored_bytes(array: Array, dtype: DType, layout: Layout) -> NDArray[np.uint8]:
    """Return a canonical array as the bytes of a buffer."""
    data = np.empty(math.prod(array.shape) * dtype.size_bytes, np.uint8)
    store(canonical_view(data, array.shape, dtype, layout), dtype, array)
    return data


def loaded(data: NDArray[np.uint8], shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
    """Return the canonical array that a buffer's bytes hold: contiguous, and sharing no memory with `data`."""
    array = load(canonical_view(data, shape, dtype, layout), dtype)
    return np.array(array, order="C", copy=True)

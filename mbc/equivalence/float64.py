"""What a launch must give is computed in float64: by the interpreter's own code in NumPy, or by PyTorch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Layout
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.pooling import Pool, padded_image
from mbc.ops.rounding import from_bf16, to_bf16
from mbc.runtime.formats import canonical_view, load

Array = Any  # of NumPy or of PyTorch: floating ones in float64; what both understand is all that is used of them


class Arithmetic(Protocol):
    """Arrays in canonical order, and what operations of the graph make of them."""

    name: str
    chunk_bytes: int  # of float64 that one evaluation should take at most, where an operation can be divided
    out_of_memory: type[Exception]

    def load(self, data: Array, shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
        """Stored bytes (uint8) as numbers: floating ones in float64, whole ones as they are."""
        ...

    def evaluate(self, kind: str, attributes: Attributes, inputs: Sequence[Array], call: Call) -> Sequence[Array]: ...

    def stored(self, x: Array, dtype: DType) -> Array:
        """`x` as it is read again when it was stored as `dtype`."""
        ...

    def signs(self, like: Array) -> Array:
        """+1 or -1 at random, an element each."""
        ...

    def where(self, condition: Array, x: Array, y: Array) -> Array: ...

    def padded(self, a: Pool, x: Array, fill: float) -> Array:
        """Images with what their pooling windows reach beyond them."""
        ...

    def finite(self, x: Array) -> Array: ...

    def copy(self, data: Array) -> Array: ...

    def release(self) -> None:
        """Give back memory that is kept for later."""
        ...


class InNumpy:
    """The interpreter's evaluation of float64 operands, on the CPU."""

    name = "NumPy"
    chunk_bytes = 256 << 20
    out_of_memory: type[Exception] = MemoryError

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def load(self, data: NDArray[np.uint8], shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
        array = load(canonical_view(data, shape, dtype, layout), dtype)
        with np.errstate(invalid="ignore"):  # of a NaN that signals
            return np.array(array, np.float64 if array.dtype.kind == "f" else array.dtype, order="C")

    def evaluate(self, kind: str, attributes: Attributes, inputs: Sequence[Array], call: Call) -> Sequence[Array]:
        if kind == "cast":  # rounds where it is stored
            return inputs
        evaluate = KINDS[kind].evaluate
        assert evaluate is not None, "what runs has a meaning"
        with np.errstate(all="ignore"):
            return evaluate(attributes, inputs, call)

    def stored(self, x: Array, dtype: DType) -> Array:
        with np.errstate(over="ignore"):  # beyond the largest number is infinity, as on a GPU
            if dtype is DType.BF16:
                return from_bf16(to_bf16(x)).astype(np.float64)
            if dtype in (DType.FP16, DType.FP32):
                return x.astype(np.float16 if dtype is DType.FP16 else np.float32).astype(np.float64)
        return x

    def signs(self, like: Array) -> Array:
        return self._random.integers(0, 2, like.shape, np.int8) * 2.0 - 1.0

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        return cast("Array", np.where(condition, x, y))

    def padded(self, a: Pool, x: Array, fill: float) -> Array:
        return padded_image(a, x, fill)

    def finite(self, x: Array) -> Array:
        return np.isfinite(x)

    def copy(self, data: Array) -> Array:
        return data.copy()

    def release(self) -> None:
        """Nothing is kept."""

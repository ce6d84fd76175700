"""The exact results of a launch in float64, by the interpreter's code in NumPy or by PyTorch on a GPU."""

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

Array = Any  # of NumPy or PyTorch, with floating-point numbers in float64; only operations that both have are used


class Arithmetic(Protocol):
    """Arrays in canonical order, and the operations of the graph on them."""

    name: str
    chunk_bytes: int  # largest size of one evaluation in float64, if the operation can be divided
    out_of_memory: type[Exception]

    def load(self, data: Array, shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
        """Return stored bytes (uint8) as numbers: floating-point numbers in float64, integers in their own type."""
        ...

    def evaluate(self, kind: str, attributes: Attributes, inputs: Sequence[Array], call: Call) -> Sequence[Array]:
        """Return the results of an operation."""
        ...

    def stored(self, x: Array, dtype: DType) -> Array:
        """Return `x` as memory returns it after it was stored as `dtype`."""
        ...

    def signs(self, like: Array) -> Array:
        """Return +1 or -1 at random for each element."""
        ...

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """Return `x` where the condition is true, else `y`."""
        ...

    def padded(self, a: Pool, x: Array, fill: float) -> Array:
        """Return images with the padding that their pooling windows reach."""
        ...

    def finite(self, x: Array) -> Array:
        """Return True for each element that is finite."""
        ...

    def copy(self, data: Array) -> Array:
        """Return a copy of stored bytes."""
        ...

    def release(self) -> None:
        """Free cached memory."""
        ...


class InNumpy:
    """The interpreter's evaluation of float64 operands, on the CPU."""

    name = "NumPy"
    chunk_bytes = 256 << 20
    out_of_memory: type[Exception] = MemoryError

    def __init__(self, seed: int) -> None:
        """Create the arithmetic, whose random signs depend on `seed`."""
        self._random = np.random.default_rng(seed)

    def load(self, data: NDArray[np.uint8], shape: tuple[int, ...], dtype: DType, layout: Layout) -> Array:
        """Return stored bytes as numbers."""
        array = load(canonical_view(data, shape, dtype, layout), dtype)
        with np.errstate(invalid="ignore"):  # converting a signalling NaN warns
            return np.array(array, np.float64 if array.dtype.kind == "f" else array.dtype, order="C")

    def evaluate(self, kind: str, attributes: Attributes, inputs: Sequence[Array], call: Call) -> Sequence[Array]:
        """Return the results of an operation."""
        if kind == "cast":  # the rounding happens when the value is stored
            return inputs
        evaluate = KINDS[kind].evaluate
        assert evaluate is not None, "every kind that runs can be evaluated"
        with np.errstate(all="ignore"):
            return evaluate(attributes, inputs, call)

    def stored(self, x: Array, dtype: DType) -> Array:
        """Return `x` as memory returns it after it was stored as `dtype`."""
        with np.errstate(over="ignore"):  # larger numbers become infinity, as on a GPU
            if dtype is DType.BF16:
                return from_bf16(to_bf16(x)).astype(np.float64)
            if dtype in (DType.FP16, DType.FP32):
                return x.astype(np.float16 if dtype is DType.FP16 else np.float32).astype(np.float64)
        return x

    def signs(self, like: Array) -> Array:
        """Return +1 or -1 at random for each element."""
        return self._random.integers(0, 2, like.shape, np.int8) * 2.0 - 1.0

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """Return `x` where the condition is true, else `y`."""
        return cast("Array", np.where(condition, x, y))

    def padded(self, a: Pool, x: Array, fill: float) -> Array:
        """Return images with the padding that their pooling windows reach."""
        return padded_image(a, x, fill)

    def finite(self, x: Array) -> Array:
        """Return True for each element that is finite."""
        return np.isfinite(x)

    def copy(self, data: Array) -> Array:
        """Return a copy of stored bytes."""
        return data.copy()

    def release(self) -> None:
        """Do nothing, because NumPy caches no memory."""

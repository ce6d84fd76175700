"""Element types, layouts and tensor types. Sizes are in bytes, shapes in elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """Storage type of an element."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT32 = "int32"
    UINT8 = "uint8"

    @property
    def size_bytes(self) -> int:
        """Bytes of an element."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "uint8": 1}[self.value]


class Precision(StrEnum):
    """Precision that `precision = …` of a `train` section chooses."""

    FP32 = "fp32"  # strict: no tensor-core rounding of the operands
    TF32 = "tf32"  # fp32 storage; convolutions and matrix products round operands to 10 bits of mantissa
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"  # interpreter only

    @property
    def working(self) -> DType:
        """Element type of activations and of their gradients."""
        return {"tf32": DType.FP32}.get(self.value) or DType(self.value)

    @property
    def runs_on_gpus(self) -> bool:
        """True if GPUs run plans in this precision, which then have predicted times; plans in fp64 are for the CPU."""
        return self is not Precision.FP64

    @property
    def master(self) -> DType:
        """Element type of parameters, statistics, optimizer state, parameter gradients and losses."""
        return DType.FP64 if self is Precision.FP64 else DType.FP32


class Layout(StrEnum):
    """Order of a buffer's elements in memory.

    If the order does not matter (see `layout_matters`), the layout is always CHANNELS_FIRST; a kernel sees such an
    operand in the layout of its other operands.
    """

    CHANNELS_FIRST = "nchw"  # the order of the shape
    CHANNELS_LAST = "nhwc"  # axis 1 moved to the end; a filter [K, C, R, S] is stored as [K, R, S, C]


def layout_matters(shape: tuple[int, ...]) -> bool:
    """Return whether the two layouts of this shape differ in memory."""
    return len(shape) > 2 and shape[1] > 1 and math.prod(shape[2:]) > 1


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.size_bytes

    @property
    def ordered(self) -> bool:
        """True if both layouts are possible. Class numbers [rows, height, width] have no channels."""
        return self.dtype is not DType.INT32 and layout_matters(self.shape)

    def with_rows(self, rows: int) -> TensorType:
        """Return the type with `rows` as its first dimension."""
        return TensorType((rows, *self.shape[1:]), self.dtype)

    def __str__(self) -> str:
        """Return the type as text, such as `fp32[8, 3, 4, 4]`."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

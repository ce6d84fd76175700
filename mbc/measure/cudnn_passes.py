"""The kinds of convolutions, as cuDNN's graph (backend) API describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.measure.cudnn_constants import Constant

DATA_TYPES = {
    DType.FP64: Constant.DATA_DOUBLE,
    DType.FP32: Constant.DATA_FLOAT,
    DType.BF16: Constant.DATA_BFLOAT16,
    DType.FP16: Constant.DATA_HALF,
}


class ConvolutionAttributes(Protocol):
    """Attributes of the three convolution kinds (docs/operations.md); `pad` is (before, after) for each axis."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Stride for each axis."""
        ...

    @property
    def pad(self) -> tuple[int, ...]:
        """Padding before and after, for each axis."""
        ...

    @property
    def dilation(self) -> tuple[int, ...]:
        """Dilation for each axis."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """Constants that describe one convolution kind to the backend API; `operands` are the inputs, then the output."""

    operation: int
    descriptor: int
    alpha: int
    beta: int
    operands: tuple[int, ...]


PASSES = {
    "convolution": Pass(
        Constant.BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
        Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
        Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
        Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
        (
            Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_X,
            Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_W,
            Constant.ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
        ),
    ),
    "convolution_backward_data": Pass(
        Constant.BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
        (
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
        ),
    ),
    "convolution_backward_filter": Pass(
        Constant.BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
        Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
        (
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
            Constant.ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
        ),
    ),
}
CONVOLUTION_KINDS = tuple(PASSES)
ENGINE_KINDS = (*CONVOLUTION_KINDS, WITH_STATISTICS)  # that cuDNN's graph API runs


def engine_types(request: Request) -> tuple[TensorType, ...]:
    """Return the types of the inputs and of the output as the engine uses them.

    cuDNN writes a filter gradient only in the type of its operands; the caller converts it where necessary.
    """
    working = request.inputs[0].dtype
    return (*request.inputs, TensorType(request.outputs[0].shape, working))


def strides(shape: Sequence[int], layout: Layout) -> list[int]:
    """Return the distance in elements between neighbours along each axis of a packed tensor."""
    order = [0, *range(2, len(shape)), 1] if layout is Layout.CHANNELS_LAST else list(range(len(shape)))
    result = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        result[axis] = step
        step *= shape[axis]
    return result

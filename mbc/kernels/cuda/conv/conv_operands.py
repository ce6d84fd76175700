"""The operands of a convolution in any pass, and its sizes in the form that launchers read."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Struct
from mbc.ops.convolution import Convolution


@dataclass(frozen=True, slots=True)
class ConvOperands:
    """Types of the image, the features and the filter of one pass, or of their gradients."""

    image: TensorType
    features: TensorType
    weight: TensorType

    @staticmethod
    def of(request: Request) -> ConvOperands:
        """Return the operands of a request in any of the three passes."""
        (a, b), c = request.inputs, request.outputs[0]
        if request.kind == "convolution":
            return ConvOperands(a, c, b)
        return ConvOperands(c, a, b) if request.kind == "convolution_backward_data" else ConvOperands(a, b, c)


def attributes(request: Request) -> Convolution:
    """Return the attributes of a convolution."""
    a = request.attributes
    assert isinstance(a, Convolution)
    return a


@dataclass(frozen=True, slots=True)
class ConvolutionSizes(Struct):
    """The first fields of a convolution's arguments, as in templates/kernels/shared/conv_operands.cuh."""

    rows: int
    channels: int
    height: int
    width: int
    filters: int
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    stride_height: int
    stride_width: int
    pad_top: int
    pad_left: int


def sizes(request: Request) -> dict[str, int]:
    """Return the fields of `ConvolutionSizes` for a request in any pass."""
    a, conv = attributes(request), ConvOperands.of(request)
    rows, channels, height, width = conv.image.shape
    _, filters, out_height, out_width = conv.features.shape
    return {
        "rows": rows,
        "channels": channels,
        "height": height,
        "width": width,
        "filters": filters,
        "out_height": out_height,
        "out_width": out_width,
        "kernel_height": a.kernel[0],
        "kernel_width": a.kernel[1],
        "stride_height": a.stride[0],
        "stride_width": a.stride[1],
        "pad_top": a.pad[0],
        "pad_left": a.pad[2],
    }

"""The gradient of 3 x 3 filters in tf32, where libraries have no kernel that is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, ConvOperands, attributes, sizes

# As in the source.
CHANNELS = 64  # of the image and of the gradient, in a tile
COLUMNS = 32  # of the output, that a block goes down
ROWS = 14  # of the output in a strip, at most
PITCH = CHANNELS + 8  # of a pixel in shared memory
SHARED_BYTES = (5 * (COLUMNS + 2) + 3 * COLUMNS) * PITCH * 4  # five rows of the image, three of the gradient
TENSOR_SHARE = 0.3  # of the peak, as measured on an H200: mma.sync instead of wgmma, and half of the time around it


@dataclass(frozen=True, slots=True)
class Tf32FilterArguments(ConvolutionSizes):
    band: int
    parts: int
    accumulate: int


def _takes(request: Request) -> bool:
    a, conv = attributes(request), ConvOperands.of(request)
    return (
        request.precision is Precision.TF32
        and {conv.image.dtype, conv.features.dtype} == {DType.FP32}
        and len(conv.image.shape) == 4
        and conv.image.shape[1] % CHANNELS == 0
        and conv.features.shape[1] % CHANNELS == 0
        and (a.kernel, a.stride, a.dilation, a.groups) == ((3, 3), (1, 1), (1, 1), 1)
    )


def _rows(request: Request) -> int:
    return min(ROWS, ConvOperands.of(request).features.shape[2])


def _parts(request: Request) -> int:
    """Split-K: blocks among which strips are divided, for each tile of channels and filters."""
    conv = ConvOperands.of(request)
    images, filters, height, width = conv.features.shape
    strips = images * math.ceil(height / _rows(request)) * math.ceil(width / COLUMNS)
    return min(strips, max(1, REDUCTION_BLOCKS // (conv.image.shape[1] // CHANNELS * (filters // CHANNELS))))


def _arguments(at: Slice) -> Tf32FilterArguments:
    request = at.request
    return Tf32FilterArguments(
        **sizes(request),
        band=_rows(request),
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * request.outputs[0].size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * conv.features.elements * math.prod(conv.weight.shape[1:])
    return gemm_us(request, device, operations, peak_tflops(device, Precision.TF32), TENSOR_SHARE)


KERNELS = (
    OwnKernel(
        "convolution_backward_filter",
        "conv/tf32_filter_gradient.cu",
        Tf32FilterArguments,
        _arguments,
        layouts=channels_last,
        workspace=_partial_bytes,
        time_us=_time_us,
        launches=2,
        accumulates=True,
        launcher="convolution_backward_filter_tf32",
        takes=_takes,
        shared=shared_of(SHARED_BYTES),
        tensor_cores=True,
    ),
)

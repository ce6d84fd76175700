"""The gradient of 3 x 3 filters in tf32, for which libraries have no fast kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import mma_sync_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, ConvOperands, attributes, sizes

# The constants up to SHARED_BYTES are equal to those in the source.
CHANNELS = 64  # channels of the image and of the gradient in a tile
COLUMNS = 32  # columns of the output in a strip, which a block walks down
ROWS = 14  # most rows of the output in a strip
PITCH = CHANNELS + 8  # words of a pixel in shared memory
SHARED_BYTES = (5 * (COLUMNS + 2) + 3 * COLUMNS) * PITCH * 4  # five rows of the image, three of the gradient


@dataclass(frozen=True, slots=True)
class Tf32FilterArguments(ConvolutionSizes):
    """Integer arguments of a launch of the tf32 filter gradient.

    Attributes:
        band: Output rows of a strip.
        parts: Blocks among which strips are divided (split-K).
    """

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
    """Return the number of blocks among which the strips of each tile of channels and filters are divided (split-K)."""
    conv = ConvOperands.of(request)
    images, filters, height, width = conv.features.shape
    strips = images * math.ceil(height / _rows(request)) * math.ceil(width / COLUMNS)
    return min(strips, max(1, REDUCTION_BLOCKS // (conv.image.shape[1] // CHANNELS * (filters // CHANNELS))))


def _arguments(at: Slice) -> Tf32FilterArguments:
    request = at.request
    return Tf32FilterArguments(
        **sizes(request), band=_rows(request), parts=_parts(request), accumulate=int(at.accumulate)
    )


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * request.outputs[0].size_bytes


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * conv.features.elements * math.prod(conv.weight.shape[1:])
    return operations / (mma_sync_tflops(device, Precision.TF32) * 1e6)


KERNELS = (
    OwnKernel(
        "convolution_backward_filter",
        "conv/tf32_filter_gradient.cu",
        Tf32FilterArguments,
        _arguments,
        layouts=channels_last,
        workspace=_partial_bytes,
        arithmetic_us=_arithmetic_us,
        launches=2,
        accumulates=True,
        launcher="convolution_backward_filter_tf32",
        takes=_takes,
        shared=shared_of(SHARED_BYTES),
        needs=Instruction.MMA_SYNC,
    ),
)

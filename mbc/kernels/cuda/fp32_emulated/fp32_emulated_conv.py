"""Convolutions in emulated fp32: three fp16 tensor-core products for each fp32 product (3xFP16).

Operands begin at multiples of 16 bytes. Buffers do so, and slices do, too, because their rows have a multiple of 64
channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us, shared_of
from mbc.kernels.cuda.conv.conv_operands import (
    ConvolutionSizes,
    ConvOperands,
    channels_by,
    data_pass_is_convolution,
    sizes,
)

# The constants up to SHARED_BYTES are equal to those in the sources.
CHANNELS = 64  # the channels of both sides are a multiple of this number
TILE = 128  # filters of a tile if their number is a multiple of 128; else 64
STAGE_K = 64  # K of a stage
SCALE_BYTES = 16  # bytes of the scale of a stage of weights, whose elements are two fp16 words each
LARGEST_BYTES = 2048  # bytes of the largest magnitudes, one for each block that searches an image
SHARED_BYTES = 201 << 10
LEAST_STAGES = 16  # fewest stages of a part (split-K)
MERGE_PIXELS = 185  # K whose MMAs take as long as to write and read a part: 8 bytes at 4 TB/s, 2 flops at 185 T/s
PRODUCTS = 3
TENSOR_SHARE = 0.6  # share of the peak, by judgement


@dataclass(frozen=True, slots=True)
class Fp32EmulatedArguments(ConvolutionSizes):
    """Integer arguments of a launch of a convolution in emulated fp32.

    Sizes are those of the image that is read and of the output, or, in the filter pass, of its gradient.

    Attributes:
        backward: Data gradient: weights are transposed and rotated.
        parts: Parts of the pixels in the filter pass (split-K).
    """

    backward: int
    parts: int
    accumulate: int


def _takes(request: Request) -> bool:
    conv = ConvOperands.of(request)
    planes = len(conv.image.shape) == 4
    types = {conv.image.dtype, conv.features.dtype}
    return planes and request.precision is Precision.FP32 and types == {DType.FP32} and channels_by(CHANNELS, request)


def _takes_data(request: Request) -> bool:
    return _takes(request) and data_pass_is_convolution(request)


def _arguments(at: Slice) -> Fp32EmulatedArguments:
    request = at.request
    backward = request.kind == "convolution_backward_data"
    return Fp32EmulatedArguments(
        **sizes(request, backward),
        backward=int(backward),
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for the split weights and for a scale for every stage of a tile."""
    conv = ConvOperands.of(request)
    backward = request.kind == "convolution_backward_data"
    filters = (conv.image if backward else conv.features).shape[1]
    blocks = filters // (TILE if filters % TILE == 0 else CHANNELS)
    stages = conv.weight.elements // filters // STAGE_K
    return conv.weight.size_bytes + blocks * stages * SCALE_BYTES


def _parts(request: Request) -> int:
    """Return the number of parts of the filter pass (split-K), whose K is pixels."""
    if request.kind != "convolution_backward_filter":
        return 1
    conv = ConvOperands.of(request)
    filters = conv.features.shape[1]
    columns = conv.weight.elements // filters // CHANNELS  # columns of 64
    tiles = (
        filters // TILE * math.ceil(columns / 2)
        if filters % TILE == 0
        else filters // CHANNELS * math.ceil(columns / 4)
    )
    return split_k(tiles, conv.features.elements // filters)


def split_k(tiles: int, pixels: int) -> int:
    """Return the number of parts of K = `pixels` for `tiles` tiles.

    Blocks then end at about the same time, and few parts are merged.
    """
    merge_cost = MERGE_PIXELS / pixels  # time to merge a part, divided by the time of the MMAs

    def takes(parts: int) -> float:
        return math.ceil(tiles * parts / REDUCTION_BLOCKS) / parts * REDUCTION_BLOCKS / tiles + merge_cost * parts

    return min(range(1, max(2, min(REDUCTION_BLOCKS, pixels // STAGE_K // LEAST_STAGES) + 1)), key=takes)


def _filter_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for the split image and for a partial filter gradient for each part."""
    conv = ConvOperands.of(request)
    return LARGEST_BYTES + conv.image.size_bytes + _parts(request) * conv.weight.size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * conv.features.elements * math.prod(conv.weight.shape[1:]) * PRODUCTS
    return gemm_us(request, device, operations, peak_tflops(device, Precision.FP16), TENSOR_SHARE)


_FORWARD = OwnKernel(
    "convolution",
    "fp32_emulated/fp32_emulated_conv.cu",
    Fp32EmulatedArguments,
    _arguments,
    layouts=channels_last,
    workspace=_weights_bytes,
    time_us=_time_us,
    launches=2,
    launcher="fp32_emulated_conv",
    takes=_takes,
    shared=shared_of(SHARED_BYTES),
    needs=Instruction.WGMMA,
    emulates_fp32=True,
    aligned=True,
)
_BACKWARD_DATA = replace(
    _FORWARD, kind="convolution_backward_data", named="fp32_emulated_conv_backward_data", takes=_takes_data
)
_BACKWARD_FILTER = replace(
    _FORWARD,
    kind="convolution_backward_filter",
    file="fp32_emulated/fp32_emulated_conv_filter.cu",
    launcher="fp32_emulated_conv_backward_filter",
    workspace=_filter_bytes,
    launches=4,
    accumulates=True,
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _BACKWARD_FILTER)

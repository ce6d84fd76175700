"""Convolutions of 64 or 128 channels in bf16 and fp16, with filters of several pixels and a stride of one.

A block keeps the weights of 64 filters in shared memory, and halos of the image next to them. It can compute the batch
statistics of its result in the epilogue.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes, channels_by, data_pass_is_convolution
from mbc.kernels.cuda.conv.halo import (
    MOST_HALO_PIXELS,
    PIXELS,
    HaloArguments,
    halo_arguments,
    halo_fits,
    pixels_computed,
)
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.statistics import convolution_of

# The constants up to REDUCING_WARPS are equal to those in the source.
FILTERS = 64  # filters of a block
HALOS = 3
KEPT_PITCH_BYTES = FILTERS * 16 + 16  # bytes of K = 8 of all filters of a block
BARRIERS_BYTES = 128  # upper bound
REDUCING_WARPS = 8  # warps of a block that each write a partial state of the statistics
TENSOR_SHARE = 0.7  # share of the peak, by judgement: one warpgroup multiplies while the other writes

# Channels of a halo by the number of all channels: next to twice the weights, a smaller halo fits into shared memory.
HALO_CHANNELS = MappingProxyType({64: 64, 128: 32})


@dataclass(frozen=True, slots=True)
class HaloStatisticsArguments(HaloArguments):
    """Integer arguments of a launch with statistics.

    Attributes:
        blocks: Blocks for each 64 filters; independent of the GPU, so that sums have one order.
    """

    blocks: int


def _takes(request: Request) -> bool:
    conv = ConvOperands.of(request)
    return (
        {conv.image.dtype, conv.features.dtype} in ({DType.BF16}, {DType.FP16})
        and channels_by(FILTERS, request)
        and _reduced_channels(request) in HALO_CHANNELS
        and halo_fits(request)
        and (data_pass_is_convolution(request) or request.kind == "convolution")
    )


def _reduced_channels(request: Request) -> int:
    """Return the channels of the operand that is read; a gradient has as many as the convolution has filters."""
    return request.inputs[0].shape[1]


def _shared_bytes(request: Request) -> int:
    channels = _reduced_channels(request)
    weights_bytes = math.prod(attributes(request).kernel) * channels // 8 * KEPT_PITCH_BYTES
    return HALOS * MOST_HALO_PIXELS * HALO_CHANNELS[channels] * 2 + weights_bytes + BARRIERS_BYTES


def _time_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * pixels_computed(request) * math.prod(conv.weight.shape)
    return gemm_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)


_FORWARD = OwnKernel(
    "convolution",
    "conv/weight_stationary_conv.cu",
    HaloArguments,
    halo_arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="weight_stationary_conv",
    takes=_takes,
    shared=_shared_bytes,
    needs=Instruction.WGMMA,
    aligned=True,
)
_BACKWARD_DATA = replace(_FORWARD, kind="convolution_backward_data", named="weight_stationary_conv_backward_data")


def _blocks(request: Request) -> int:
    """Return the number of blocks that share the pixels of the same filters."""
    convolution = convolution_of(request)
    across = convolution.outputs[0].shape[1] // FILTERS
    return max(1, min(REDUCTION_BLOCKS // across, pixels_computed(convolution) // PIXELS))


def _group_arguments(at: Slice) -> HaloStatisticsArguments:
    alone = halo_arguments(replace(at, request=convolution_of(at.request)))
    return HaloStatisticsArguments(*astuple(alone), blocks=_blocks(at.request))


_WITH_STATISTICS = replace(
    with_statistics(_FORWARD, lambda request: _blocks(request) * REDUCING_WARPS),
    struct=HaloStatisticsArguments,
    integers=_group_arguments,
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _WITH_STATISTICS)

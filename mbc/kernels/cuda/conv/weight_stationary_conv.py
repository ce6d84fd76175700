"""Convolutions in bf16 and fp16 of 64 or 128 channels, with filters of several taps and a stride of one.

A block keeps the weights of 64 filters in shared memory, and halos of the image next to them. It can compute the batch
statistics of its result in the epilogue.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, product_us
from mbc.kernels.cuda.conv.conv_operands import Sides, attributes
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import by_the_64, turns
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_halo import (
    MOST_PLACES,
    PLACES,
    HaloArguments,
    patch_arguments,
    places_made,
    seen_in_patches,
)
from mbc.kernels.statistics import convolution_of

# As in the source.
MADE = 64  # filters of a block
PATCHES = 3
EIGHT_BYTES = MADE * 16 + 16  # of eight terms of all weights under a place of the filter
BARRIERS_BYTES = 128  # at most
SUMMING = 8  # warps of a block that leave statistics each
MOST_BLOCKS = 132  # that leave statistics, on a large GPU; a constant, so that sums are the same on all
TENSOR_SHARE = 0.7  # of the peak, by judgement: one warpgroup multiplies while the other writes

# Of a patch, by all that are summed up: beside twice as many weights it has room for fewer.
CHANNELS = MappingProxyType({64: 64, 128: 32})


@dataclass(frozen=True, slots=True)
class HaloStatisticsArguments(HaloArguments):
    blocks: int


def _takes(request: Request) -> bool:
    sides = Sides.of(request)
    return (
        {sides.image.dtype, sides.features.dtype} in ({DType.BF16}, {DType.FP16})
        and by_the_64(request)
        and _summed(request) in CHANNELS
        and seen_in_patches(request)
        and (turns(request) or request.kind == "convolution")
    )


def _summed(request: Request) -> int:
    """Channels of what is read: of gradients, as many as the convolution has filters."""
    return request.inputs[0].shape[1]


def _shared_bytes(request: Request) -> int:
    summed = _summed(request)
    weights_bytes = math.prod(attributes(request).kernel) * summed // 8 * EIGHT_BYTES
    return PATCHES * MOST_PLACES * CHANNELS[summed] * 2 + weights_bytes + BARRIERS_BYTES


def _time_us(request: Request, device: DeviceSpec) -> float:
    sides = Sides.of(request)
    operations = 2 * places_made(request) * math.prod(sides.weight.shape)
    return product_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)


_FORWARD = OwnKernel(
    "convolution",
    "conv/weight_stationary_conv.cu",
    HaloArguments,
    patch_arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="weight_stationary_conv",
    takes=_takes,
    shared=_shared_bytes,
    tensor_cores=True,
    warpgroups=True,
    aligned=True,
)
_BACKWARD_DATA = replace(
    _FORWARD,
    kind="convolution_backward_data",
    launcher="weight_stationary_conv_backward_data",
)


def _blocks(request: Request) -> int:
    """Of the same filters."""
    convolution = convolution_of(request)
    across = convolution.outputs[0].shape[1] // MADE
    return max(1, min(MOST_BLOCKS // across, places_made(convolution) // PLACES))


def _group_arguments(at: Slice) -> HaloStatisticsArguments:
    alone = patch_arguments(replace(at, request=convolution_of(at.request)))
    return HaloStatisticsArguments(*astuple(alone), blocks=_blocks(at.request))


_WITH_STATISTICS = replace(
    with_statistics(_FORWARD, lambda request: _blocks(request) * SUMMING),
    struct=HaloStatisticsArguments,
    integers=_group_arguments,
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _WITH_STATISTICS)

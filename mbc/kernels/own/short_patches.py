"""Convolutions in bf16 and fp16 of 64 channels, where the filter has several places and a step of one pixel.

A block keeps the weights of 64 filters in shared memory, and beside them what it sees of the image.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mbc.device.spec import DeviceSpec
from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.own.base import OwnKernel, channels_last, moved_us
from mbc.kernels.own.halves import by_the_64, turns
from mbc.kernels.own.patches import MOST_PLACES, PatchArguments, patch_arguments, places_of_pixel, seen_in_patches
from mbc.kernels.own.sides import Sides, attributes

# As in the source.
CHANNELS = 64  # that are summed up
PATCH_BYTES = 3 * MOST_PLACES * CHANNELS * 2
PLACE_BYTES = 8 * (64 * 16 + 16)  # of weights under a place of the filter
BARRIERS_BYTES = 128  # at most
TENSOR_SHARE = 0.7  # of the peak, by judgement: one warpgroup multiplies while the other writes


def _takes(request: Request) -> bool:
    sides = Sides.of(request)
    backward = request.kind == "convolution_backward_data"
    summed = sides.features if backward else sides.image
    return (
        {sides.image.dtype, sides.features.dtype} in ({DType.BF16}, {DType.FP16})
        and by_the_64(request)
        and summed.shape[1] == CHANNELS
        and seen_in_patches(request)
        and (turns(request) or not backward)
    )


def _shared_bytes(request: Request) -> int:
    return PATCH_BYTES + math.prod(attributes(request).kernel) * PLACE_BYTES + BARRIERS_BYTES


def _time_us(request: Request, device: DeviceSpec) -> float:
    sides = Sides.of(request)
    operations = 2 * sides.features.elements * math.prod(sides.weight.shape[1:]) * places_of_pixel(request)
    multiplied_us = operations / (peak_tflops(device, request.precision) * 1e6 * TENSOR_SHARE)
    return max(multiplied_us, moved_us(request, device))


_FORWARD = OwnKernel(
    "convolution",
    "short_patch.cu",
    PatchArguments,
    patch_arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="convolution_of_short_patches",
    takes=_takes,
    shared=_shared_bytes,
    tensor_cores=True,
    warpgroups=True,
    aligned=True,
)

KERNELS = (
    _FORWARD,
    replace(_FORWARD, kind="convolution_backward_data", launcher="convolution_backward_data_of_short_patches"),
)

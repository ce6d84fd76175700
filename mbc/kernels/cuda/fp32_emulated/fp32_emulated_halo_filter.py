"""The gradient of filters three taps wide, in emulated fp32 (3xFP16).

A block splits words once for all taps of a row of the filter.
"""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Slice, shared_of
from mbc.kernels.cuda.conv.conv_operands import Sides, attributes, sizes
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import AT_ONCE, CHANNELS, Fp32EmulatedArguments, fewest_parts
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import KERNELS as IN_HALVES

# As in the source.
WIDTH = 3  # of the filter, of which a block makes a line
FOUND_BLOCKS = 256  # of each 64 channels, that look for the largest words
FOUND_BYTES = FOUND_BLOCKS * 8 * 4  # of eight channels each, which share a scale
SHARED_BYTES = 202 << 10
OF_ITS_TIME = 0.9  # of the kernel's that divides words for each tile, by judgement

(_TILED,) = (kernel for kernel in IN_HALVES if kernel.kind == "convolution_backward_filter")


def _takes(request: Request) -> bool:
    a = attributes(request)
    return _TILED.takes(request) and a.kernel[1] == WIDTH and a.stride == (1, 1)


def _filters(request: Request) -> int:
    """Of a block: its two warpgroups have 64 each, or the same 64 and other pixels."""
    return AT_ONCE if Sides.of(request).features.shape[1] % AT_ONCE == 0 else CHANNELS


def _parts(request: Request) -> int:
    sides = Sides.of(request)
    filters, channels = sides.features.shape[1], sides.image.shape[1]
    tiles = filters // _filters(request) * attributes(request).kernel[0] * channels // CHANNELS
    return fewest_parts(tiles, sides.features.elements // filters)


def _arguments(at: Slice) -> Fp32EmulatedArguments:
    return Fp32EmulatedArguments(
        **sizes(at.request), backward=0, parts=_parts(at.request), accumulate=int(at.accumulate)
    )


def _workspace_bytes(request: Request, layout: Layout) -> int:
    """What is the largest of channels, and what the pixels of each part, or half of it, come to."""
    sides = Sides.of(request)
    found_bytes = (sides.image.shape[1] + sides.features.shape[1]) // CHANNELS * FOUND_BYTES
    return found_bytes + _parts(request) * AT_ONCE // _filters(request) * sides.weight.size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    """A place beside each line is multiplied, too."""
    width = Sides.of(request).features.shape[3]
    return OF_ITS_TIME * (width + 1) / width * _TILED.time_us(request, device)


KERNELS = (
    replace(
        _TILED,
        file="fp32_emulated/fp32_emulated_halo_filter.cu",
        integers=_arguments,
        workspace=_workspace_bytes,
        time_us=_time_us,
        launches=3,
        launcher="fp32_emulated_halo_backward_filter",
        takes=_takes,
        shared=shared_of(SHARED_BYTES),
    ),
)

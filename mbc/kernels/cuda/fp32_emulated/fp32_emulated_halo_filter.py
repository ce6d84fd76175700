"""The gradient of filters that are three pixels wide, in emulated fp32 (3xFP16).

A block splits the words of a stage once for all pixels of a row of the filter.
"""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Slice, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes, sizes
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import CHANNELS, TILE, Fp32EmulatedArguments, split_k
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import KERNELS as CONV_KERNELS

# The constants up to SHARED_BYTES are equal to those in the source.
WIDTH = 3  # width of the filter; a tile has one row of it
FOUND_BLOCKS = 256  # blocks that search the largest magnitude of each 64 channels
FOUND_BYTES = FOUND_BLOCKS * 8 * 4  # bytes of the largest magnitudes: eight channels share a scale
SHARED_BYTES = 202 << 10
# Share of the time of `fp32_emulated_conv`, which splits words for each filter pixel, by judgement.
TIME_SHARE = 0.9

(_CONV_FILTER,) = (kernel for kernel in CONV_KERNELS if kernel.kind == "convolution_backward_filter")


def _takes(request: Request) -> bool:
    a = attributes(request)
    return _CONV_FILTER.takes(request) and a.kernel[1] == WIDTH and a.stride == (1, 1)


def _filters(request: Request) -> int:
    """Return the filters of a tile.

    Its two consumers have 64 filters each, or both have the same 64 filters and different pixels.
    """
    return TILE if ConvOperands.of(request).features.shape[1] % TILE == 0 else CHANNELS


def _parts(request: Request) -> int:
    conv = ConvOperands.of(request)
    filters, channels = conv.features.shape[1], conv.image.shape[1]
    tiles = filters // _filters(request) * attributes(request).kernel[0] * channels // CHANNELS
    return split_k(tiles, conv.features.elements // filters)


def _arguments(at: Slice) -> Fp32EmulatedArguments:
    return Fp32EmulatedArguments(
        **sizes(at.request), backward=0, parts=_parts(at.request), accumulate=int(at.accumulate)
    )


def _workspace_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for the largest magnitudes of the channels and for the partial gradients.

    There is a partial gradient for each part, or, with 64 filters, for each consumer of each part.
    """
    conv = ConvOperands.of(request)
    found_bytes = (conv.image.shape[1] + conv.features.shape[1]) // CHANNELS * FOUND_BYTES
    return found_bytes + _parts(request) * TILE // _filters(request) * conv.weight.size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    """Return the estimated time. One pixel of padding in each row is multiplied, too."""
    width = ConvOperands.of(request).features.shape[3]
    return TIME_SHARE * (width + 1) / width * _CONV_FILTER.time_us(request, device)


KERNELS = (
    replace(
        _CONV_FILTER,
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

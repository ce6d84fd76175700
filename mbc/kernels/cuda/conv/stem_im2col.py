"""Stem convolutions, of images with few channels, on Hopper's tensor cores: the windows of a tile are laid out in
shared memory (im2col). In bf16 and fp16, of filters by the 64; the forward pass can compute the batch statistics of its
result.

Nobody has measured them yet: they are estimated to take longer than `stem_conv`, so that no estimate takes them.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import partial

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.cuda.conv.stem_conv import (
    BACKWARD_FILTER,
    BANDS,
    COLUMNS,
    FORWARD,
    STAGES,
    StemConvArguments,
    arguments,
)
from mbc.kernels.statistics import convolution_of

# As in the source.
FILTERS = 64  # of a block
EIGHT_BYTES = COLUMNS * 16  # of 8 elements of a row of the windows of 64 pixels
ROW_BYTES = COLUMNS * FILTERS * 2  # of an output row of a tile
IMAGES = 2
TILES = (8, 16, 24)  # of N = 8 elements of a window, of the filter pass
MOST_EIGHTS = TILES[-1]
MOST_BOX = 256  # elements of a box that the tensor memory accelerator copies, in each dimension
ALIGNED_BYTES = 1008  # spent to begin at a multiple of 1,024
# Blocks that a multiprocessor has shared memory for, of 228 KiB, of which a block takes 1 KiB itself.
BLOCKS, FILTER_BLOCKS = 3, 2
MULTIPROCESSOR_BYTES, BLOCK_BYTES = 228 * 1024, 1024
ESTIMATED_SLOWER = 4.0  # than `stem_conv`


@dataclass(frozen=True, slots=True)
class StemConvStatisticsArguments(StemConvArguments):
    blocks: int


def _run(request: Request) -> int:
    """Elements of a row of a window."""
    return attributes(request).kernel[1] * ConvOperands.of(request).image.shape[1]


def _eights(request: Request) -> int:
    """Of a row of a window, the last one padded."""
    return math.ceil(_run(request) / 8)


def window_eights(request: Request) -> int:
    return attributes(request).kernel[0] * _eights(request)


def _pitch(request: Request) -> int:
    """Elements of a row of the image under a tile in shared memory."""
    a, channels = attributes(request), ConvOperands.of(request).image.shape[1]
    span, lead = ((COLUMNS - 1) * a.stride[1] + a.kernel[1]) * channels, a.pad[2] * channels % 2
    return math.ceil((lead + span + 8 * _eights(request) - _run(request) + 2) / 8) * 8


def _shared_bytes(request: Request, band: int) -> int:
    a = attributes(request)
    rows = (band - 1) * a.stride[0] + a.kernel[0]
    images = IMAGES * math.ceil(rows * _pitch(request) * 2 / 128) * 128
    if request.kind == BACKWARD_FILTER.kind:
        padding = next(n for n in TILES if window_eights(request) <= n) - window_eights(request)
        more = STAGES * ROW_BYTES + padding * EIGHT_BYTES
    else:
        more = ROW_BYTES + EIGHT_BYTES
    return images + rows * _eights(request) * EIGHT_BYTES + more + ALIGNED_BYTES


def band(request: Request) -> int:
    """Output rows of a tile, as many as shared memory holds of several blocks; 0 where it does not hold two rows."""
    blocks = FILTER_BLOCKS if request.kind == BACKWARD_FILTER.kind else BLOCKS
    most_bytes = MULTIPROCESSOR_BYTES // blocks - BLOCK_BYTES
    return next((n for n in BANDS if _shared_bytes(request, n) <= most_bytes), 0)


def shared_bytes(request: Request) -> int:
    return _shared_bytes(request, band(request))


def _takes(kernel: OwnKernel, request: Request) -> bool:
    conv = ConvOperands.of(request)
    return (
        kernel.takes(request)
        and conv.features.shape[1] % FILTERS == 0
        and conv.image.shape[1] * conv.image.shape[3] % 8 == 0  # rows of 16 bytes
        and window_eights(request) <= MOST_EIGHTS
        and _pitch(request) // 2 <= MOST_BOX
        and band(request) > 0
    )


def _tiles(request: Request) -> int:
    rows, _, height, width = ConvOperands.of(request).features.shape
    return rows * math.ceil(height / band(request)) * math.ceil(width / COLUMNS)


def _parts(request: Request) -> int:
    """Split-K of the filter pass; not by the GPU's size, so that reductions are the same on all."""
    return min(FILTER_BLOCKS * REDUCTION_BLOCKS, _tiles(request))


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * window_eights(request) * 8 * ConvOperands.of(request).features.shape[1] * 4


def _arguments(at: Slice) -> StemConvArguments:
    return replace(arguments(at), band=band(at.request), parts=_parts(at.request))


def _time_us(request: Request, device: DeviceSpec) -> float:
    return ESTIMATED_SLOWER * FORWARD.time_us(request, device)


_FORWARD = replace(
    FORWARD,
    file="conv/stem_im2col.cu",
    launcher="stem_im2col",
    takes=partial(_takes, FORWARD),
    integers=_arguments,
    shared=shared_bytes,
    time_us=_time_us,
    warpgroups=True,
    aligned=True,
    version=1,
)
_BACKWARD_FILTER = replace(
    BACKWARD_FILTER,
    file="conv/stem_im2col_filter.cu",
    launcher="stem_im2col_backward_filter",
    takes=partial(_takes, BACKWARD_FILTER),
    integers=_arguments,
    workspace=_partial_bytes,
    shared=shared_bytes,
    time_us=_time_us,
    warpgroups=True,
    aligned=True,
    version=1,
)


def _blocks(request: Request) -> int:
    """Blocks that share the pixels of the same filters."""
    convolution = convolution_of(request)
    across = convolution.outputs[0].shape[1] // FILTERS
    return max(1, min(BLOCKS * REDUCTION_BLOCKS // across, _tiles(convolution)))


def _group_arguments(at: Slice) -> StemConvStatisticsArguments:
    alone = _arguments(replace(at, request=convolution_of(at.request)))
    return StemConvStatisticsArguments(*astuple(alone), blocks=_blocks(at.request))


_WITH_STATISTICS = replace(
    with_statistics(_FORWARD, _blocks), struct=StemConvStatisticsArguments, integers=_group_arguments
)

KERNELS = (_FORWARD, _BACKWARD_FILTER, _WITH_STATISTICS)

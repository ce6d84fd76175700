"""Stem convolutions, which read images with few channels, on Hopper's tensor cores.

The windows of a tile are copied to shared memory (im2col). The kernels run in bf16 and fp16, for multiples of 64
filters. The forward pass can compute the batch statistics of its result.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import partial

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, gemm_us
from mbc.kernels.cuda.conv.conv1x1 import ALIGNED_BYTES
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

# The constants up to MOST_VECTORS are equal to those in the source.
FILTERS = 64  # filters of a block
VECTOR_BYTES = COLUMNS * 16  # bytes of one vector of 8 elements of a row, for the windows of 64 pixels
ROW_BYTES = COLUMNS * FILTERS * 2  # bytes of an output row of a tile
IMAGES = 2
TILES = (8, 16, 24)  # possible numbers of tiles of N = 8 elements of a window in the filter pass
MOST_VECTORS = TILES[-1]
MOST_BOX = 256  # elements of a box that the tensor memory accelerator copies, in each dimension
BARRIERS_BYTES = 128  # upper bound
# Blocks that share a multiprocessor's 228 KiB of shared memory, of which each block takes 1 KiB for itself.
BLOCKS, FILTER_BLOCKS = 3, 2
MULTIPROCESSOR_BYTES, BLOCK_BYTES = 228 * 1024, 1024
TENSOR_SHARE = 0.6  # share of the peak, by judgement: one block multiplies while another copies windows
# Time of a tile, from the copy of its band to the last result: by judgement, after ResNet's stem on an H100.
TILE_US = 3.0


@dataclass(frozen=True, slots=True)
class StemConvStatisticsArguments(StemConvArguments):
    """Integer arguments of a launch of the forward pass with statistics.

    Attributes:
        blocks: Blocks for each 64 filters; independent of the GPU, so that sums have one order.
    """

    blocks: int


def _run(request: Request) -> int:
    """Return the number of elements of a row of a window."""
    return attributes(request).kernel[1] * ConvOperands.of(request).image.shape[1]


def _row_vectors(request: Request) -> int:
    """Return the number of vectors of a row of a window, the last one padded."""
    return math.ceil(_run(request) / 8)


def window_vectors(request: Request) -> int:
    """Return the number of vectors of a window."""
    return attributes(request).kernel[0] * _row_vectors(request)


def _pitch(request: Request) -> int:
    """Return the elements of a row of a tile's image in shared memory."""
    a, channels = attributes(request), ConvOperands.of(request).image.shape[1]
    span, lead = ((COLUMNS - 1) * a.stride[1] + a.kernel[1]) * channels, -a.pad[2] * channels % 8
    return math.ceil((lead + span + 8 * _row_vectors(request) - _run(request) + 2) / 8) * 8


def _shared_bytes(request: Request, band: int) -> int:
    a = attributes(request)
    rows = (band - 1) * a.stride[0] + a.kernel[0]
    images = IMAGES * math.ceil(rows * _pitch(request) * 2 / 128) * 128
    if request.kind == BACKWARD_FILTER.kind:
        padding = next(n for n in TILES if window_vectors(request) <= n) - window_vectors(request)
        more = STAGES * ROW_BYTES + padding * VECTOR_BYTES
    else:
        more = ROW_BYTES + 2 * VECTOR_BYTES
    return images + rows * _row_vectors(request) * VECTOR_BYTES + more + ALIGNED_BYTES + BARRIERS_BYTES


def _resident_blocks(request: Request) -> int:
    """Return the number of blocks that a multiprocessor has room for."""
    return FILTER_BLOCKS if request.kind == BACKWARD_FILTER.kind else BLOCKS


def band(request: Request) -> int:
    """Return the output rows of a tile, as many as fit several blocks into a multiprocessor; 0 if two rows do not."""
    most_bytes = MULTIPROCESSOR_BYTES // _resident_blocks(request) - BLOCK_BYTES
    return next((n for n in BANDS if _shared_bytes(request, n) <= most_bytes), 0)


def shared_bytes(request: Request) -> int:
    """Return the shared memory of a block in bytes."""
    return _shared_bytes(request, band(request))


def _takes(kernel: OwnKernel, request: Request) -> bool:
    conv = ConvOperands.of(request)
    return (
        kernel.takes(request)
        and len(conv.image.shape) == 4
        and conv.features.shape[1] % FILTERS == 0
        and conv.image.shape[1] * conv.image.shape[3] % 8 == 0  # rows of 16 bytes
        and window_vectors(request) <= MOST_VECTORS
        and _pitch(request) // 2 <= MOST_BOX
        and band(request) > 0
    )


def tiles(request: Request) -> int:
    """Return the number of tiles, each 64 columns of a band of output rows."""
    rows, _, height, width = ConvOperands.of(request).features.shape
    return rows * math.ceil(height / band(request)) * math.ceil(width / COLUMNS)


def _parts(request: Request) -> int:
    """Return the number of parts of the filter pass (split-K).

    The number does not depend on the GPU, so that reductions have one order on all GPUs.
    """
    return min(FILTER_BLOCKS * REDUCTION_BLOCKS, tiles(request))


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * window_vectors(request) * 8 * ConvOperands.of(request).features.shape[1] * 4


def _arguments(at: Slice) -> StemConvArguments:
    return replace(arguments(at), band=band(at.request), parts=_parts(at.request))


def _time_us(request: Request, device: DeviceSpec) -> float:
    rows, filters, height, width = ConvOperands.of(request).features.shape
    columns = math.ceil(width / COLUMNS) * COLUMNS
    operations = 2 * rows * height * columns * filters * 8 * window_vectors(request)
    gemms_us = gemm_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)
    blocks = _resident_blocks(request) * device.multiprocessors
    return max(gemms_us, TILE_US * math.ceil(tiles(request) * filters // FILTERS / blocks))


def _by_im2col(kernel: OwnKernel, launcher: str, file: str) -> OwnKernel:
    """Return the kernel that runs a pass of `stem_conv` by im2col."""
    return replace(
        kernel,
        file=file,
        launcher=launcher,
        takes=partial(_takes, kernel),
        integers=_arguments,
        shared=shared_bytes,
        time_us=_time_us,
        arithmetic_us=None,
        needs=Instruction.WGMMA,
        aligned=True,
        version=1,
    )


_FORWARD = _by_im2col(FORWARD, "stem_im2col", "conv/stem_im2col.cu")
_BACKWARD_FILTER = replace(
    _by_im2col(BACKWARD_FILTER, "stem_im2col_backward_filter", "conv/stem_im2col_filter.cu"), workspace=_partial_bytes
)


def _blocks(request: Request) -> int:
    """Return the number of blocks that share the pixels of the same filters."""
    convolution = convolution_of(request)
    across = convolution.outputs[0].shape[1] // FILTERS
    return max(1, min(BLOCKS * REDUCTION_BLOCKS // across, tiles(convolution)))


def _group_arguments(at: Slice) -> StemConvStatisticsArguments:
    alone = _arguments(replace(at, request=convolution_of(at.request)))
    return StemConvStatisticsArguments(*astuple(alone), blocks=_blocks(at.request))


_WITH_STATISTICS = replace(
    with_statistics(_FORWARD, _blocks),
    struct=StemConvStatisticsArguments,
    integers=_group_arguments,
    without_statistics=_FORWARD.name,
)

KERNELS = (_FORWARD, _BACKWARD_FILTER, _WITH_STATISTICS)

"""Convolutions of 32 to 64 channels in bf16 and fp16, with filters of 3 x 3 x 3 or 3 x 3 and a stride of one.

Forward and for the data gradient, a block keeps the weights of its filters in shared memory, and planes of the image
next to them. For each plane of the image it computes products for three planes of the output. A forward pass can also
compute statistics of its result, of the batch or of each sample. For the filter gradient, a block keeps the sums of 32
filters and 32 channels in registers.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us
from mbc.kernels.cuda.conv.plane_sweep import (
    STAGES,
    TAPS,
    VOXELS,
    PlaneSweepArguments,
    in_16_bits,
    plane_sweep,
)
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.statistics import STATISTICS_GROUPS, WITH_INSTANCE_STATISTICS, convolution_of

CHANNELS = (32, 48, 64)  # possible numbers of channels; a source is compiled for each
BLOCK_FILTERS = (64, 48, 32)  # possible numbers of filters of a block; more filters read each plane less often
BLOCK_BYTES = 227 * 1024  # shared memory that a block may have on the GPUs with wgmma
BARRIERS_BYTES = 192  # upper bound
CONSUMER_WARPS = 8  # equal to the constant in the source
TENSOR_SHARES = {32: 0.7, 48: 0.78, 64: 0.86}  # of the peak on an H200, by channels; that of 48 is interpolated
FILTER_STAGES = 8
FILTER_CHANNELS = 32  # channels and filters of a block of the filter gradient
MOST_FILTER_BLOCKS = 4  # blocks of channels and filters: each of them reads its channels of every voxel
FILTER_TENSOR_SHARE = 0.72  # share of the peak on an H200; 0.75 at most


@dataclass(frozen=True, slots=True)
class PlaneSweepConvArguments(PlaneSweepArguments):
    """Integer arguments of a launch.

    Attributes:
        block_filters: Filters of a block: 32, 48 or 64.
        backward: Data gradient: weights are transposed and rotated.
        segment_planes: Most planes of the output of a tile; independent of the GPU, so that statistics have one order.
    """

    block_filters: int
    backward: int
    segment_planes: int


@dataclass(frozen=True, slots=True)
class PlaneSweepConvStatisticsArguments(PlaneSweepConvArguments):
    """Integer arguments of a launch with statistics.

    Attributes:
        samples: Samples that have statistics of their own; 1: statistics are those of the batch.
    """

    samples: int


@dataclass(frozen=True, slots=True)
class PlaneSweepFilterArguments(PlaneSweepArguments):
    """Integer arguments of a launch of the filter gradient.

    Attributes:
        parts: Blocks among which the voxels are divided; independent of the GPU, so that sums have one order.
        accumulate: 1 if the result is added to the output.
        segment_planes: Most planes of a tile.
    """

    parts: int
    accumulate: int
    segment_planes: int


def _shared_bytes(sweep: PlaneSweepArguments, filters: int) -> int:
    """Return the shared memory of a block of `filters` filters: the weights, and planes with halo."""
    weights_bytes = sweep.taps // TAPS * (sweep.channels // 8) * (TAPS * filters * 16 + 16)
    return weights_bytes + STAGES * sweep.box_voxels * sweep.channels * 2 + BARRIERS_BYTES


def _block_filters(sweep: PlaneSweepArguments) -> int:
    """Return the most filters that a block can take; 0 if it can take none."""
    fitting = (n for n in BLOCK_FILTERS if sweep.filters % n == 0 and _shared_bytes(sweep, n) <= BLOCK_BYTES)
    return next(fitting, 0)


def _takes(request: Request) -> bool:
    sweep = plane_sweep(request) if in_16_bits(request) else None
    return sweep is not None and sweep.channels in CHANNELS and _block_filters(sweep) > 0


def _sweep(request: Request) -> PlaneSweepArguments:
    sweep = plane_sweep(request)
    assert sweep is not None
    return sweep


def _shared(request: Request) -> int:
    sweep = _sweep(request)
    return _shared_bytes(sweep, _block_filters(sweep))


def _samples(request: Request) -> int:
    """Return the number of samples that have statistics of their own."""
    return request.inputs[0].shape[0] if request.kind == WITH_INSTANCE_STATISTICS else 1


def _segment_planes(request: Request) -> int:
    """Return the most planes of a tile; samples with statistics of their own have as many tiles as one alone would."""
    sweep = _sweep(convolution_of(request))
    blocks = max(1, REDUCTION_BLOCKS * _block_filters(sweep) // sweep.filters)
    return sweep.divide_planes(sweep.rows // _samples(request), blocks)


def _parts(request: Request) -> int:
    """Return the number of partial states of a mean."""
    sweep = _sweep(convolution_of(request))
    segments = math.ceil(sweep.out_planes / _segment_planes(request))
    return sweep.rows // _samples(request) * sweep.tiles_of_plane * segments * CONSUMER_WARPS


def _arguments(at: Slice) -> PlaneSweepConvArguments:
    request = convolution_of(at.request)
    sweep = _sweep(request)
    return PlaneSweepConvArguments(
        *astuple(sweep),
        block_filters=_block_filters(sweep),
        backward=int(request.kind == "convolution_backward_data"),
        segment_planes=_segment_planes(at.request),
    )


def _statistics_arguments(at: Slice) -> PlaneSweepConvStatisticsArguments:
    return PlaneSweepConvStatisticsArguments(*astuple(_arguments(at)), samples=_samples(at.request))


def _time_us(request: Request, device: DeviceSpec) -> float:
    sweep = _sweep(request)
    operations = 2 * sweep.voxels_computed * sweep.taps * sweep.channels * sweep.filters
    of_filter = request.kind == "convolution_backward_filter"
    share = FILTER_TENSOR_SHARE if of_filter else TENSOR_SHARES[sweep.channels]
    return gemm_us(request, device, operations, peak_tflops(device, request.precision), share)


def _filter_blocks(sweep: PlaneSweepArguments) -> int:
    """Return the number of blocks of channels and filters."""
    return sweep.channels // FILTER_CHANNELS * (sweep.filters // FILTER_CHANNELS)


def _takes_filter(request: Request) -> bool:
    sweep = plane_sweep(request) if in_16_bits(request) else None
    return (
        sweep is not None
        and {sweep.channels % FILTER_CHANNELS, sweep.filters % FILTER_CHANNELS} == {0}
        and _filter_blocks(sweep) <= MOST_FILTER_BLOCKS
    )


def _filter_shared(request: Request) -> int:
    return FILTER_STAGES * (_sweep(request).box_voxels + VOXELS) * FILTER_CHANNELS * 2 + BARRIERS_BYTES


def _filter_parts(request: Request) -> int:
    return max(1, REDUCTION_BLOCKS // _filter_blocks(_sweep(request)))


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _filter_parts(request) * request.outputs[0].size_bytes


def _filter_arguments(at: Slice) -> PlaneSweepFilterArguments:
    sweep, parts = _sweep(at.request), _filter_parts(at.request)
    return PlaneSweepFilterArguments(
        *astuple(sweep),
        parts=parts,
        accumulate=int(at.accumulate),
        segment_planes=sweep.divide_planes(sweep.rows, parts),
    )


_FORWARD = OwnKernel(
    "convolution",
    "conv/plane_sweep_conv.cu",
    PlaneSweepConvArguments,
    _arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="plane_sweep_conv",
    takes=_takes,
    shared=_shared,
    needs=Instruction.WGMMA,
    aligned=True,
)
_BACKWARD_DATA = replace(_FORWARD, kind="convolution_backward_data", named="plane_sweep_conv_backward_data")

_BACKWARD_FILTER = replace(
    _FORWARD,
    kind="convolution_backward_filter",
    file="conv/plane_sweep_conv_filter.cu",
    struct=PlaneSweepFilterArguments,
    integers=_filter_arguments,
    workspace=_partial_bytes,
    launches=2,
    accumulates=True,
    launcher="plane_sweep_conv_backward_filter",
    takes=_takes_filter,
    shared=_filter_shared,
)

_WITH_STATISTICS = tuple(
    replace(
        with_statistics(_FORWARD, _parts, kind),
        struct=PlaneSweepConvStatisticsArguments,
        integers=_statistics_arguments,
        without_statistics=_FORWARD.name,
        by_measurement=True,
        named=f"plane_sweep_conv_{kind.partition('+')[2]}",
    )
    for kind in STATISTICS_GROUPS
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _BACKWARD_FILTER, *_WITH_STATISTICS)

"""Stem convolutions of volumes: images of one to four channels, filters of 3 x 3 x 3 and a stride of one, in 16 bits.

A block sweeps a tile of the image along its planes. The forward pass can compute the statistics of its result, of the
batch or of each sample. There is no data gradient, because a network's image needs none.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, gemm_us, pixel_by_pixel, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvOperands
from mbc.kernels.cuda.conv.plane_sweep import LINES, PlaneSweepArguments, in_16_bits, plane_sweep
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.statistics import STATISTICS_GROUPS, WITH_INSTANCE_STATISTICS, convolution_of

MOST_CHANNELS, MOST_FILTERS = 4, 64
UNIT_FILTERS = 16  # fewest filters of a block
COLUMNS = 32  # of a tile; equal to the constant in the source
WARPS = 8  # of a block, which has as many states of statistics for each tile; equal to the constant in the source
FORWARD_BLOCKS, BLOCKS = 3, 2  # blocks that share a multiprocessor: of the forward pass alone, and of all other kernels
# Most shared memory of a block of the filter gradient, with two channels and 32 filters: gradients, table and planes.
SHARED_BYTES = (64 << 10) + 4 * 64 * 4 + 4 * 18 * 74 * 4
# Shares of the peak with which estimates are near the times of an H200 for four channels; for one, bytes take longer.
TENSOR_SHARE, FILTER_TENSOR_SHARE = 0.2, 0.12


@dataclass(frozen=True, slots=True)
class StemVolumeArguments(PlaneSweepArguments):
    """Integer arguments of a launch.

    Attributes:
        segment_planes: Most planes of the output of a tile; independent of the GPU, so that sums have one order.
        samples: Samples whose statistics are computed by themselves; 1: those of the batch as a whole.
        parts: Blocks among which the tiles of the filter pass are divided (split-K).
        accumulate: 1 if the gradient is added to the output.
    """

    segment_planes: int
    samples: int
    parts: int
    accumulate: int

    @property
    def tiles_of_plane(self) -> int:
        """Number of tiles that cover a plane of the output."""
        return math.ceil(self.out_columns / COLUMNS) * math.ceil(self.out_lines / LINES)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.rows * self.tiles_of_plane * math.ceil(self.out_planes / self.segment_planes)


def _takes(request: Request) -> bool:
    sweep = plane_sweep(request) if in_16_bits(request) else None
    return (
        sweep is not None
        and not sweep.flat
        and sweep.channels <= MOST_CHANNELS
        and sweep.filters <= MOST_FILTERS
        and sweep.filters % UNIT_FILTERS == 0
    )


def _launch(request: Request, accumulate: bool = False) -> StemVolumeArguments:
    """Return the arguments of a launch; a sample that is reduced by itself is divided as if it were alone."""
    sweep, is_by_sample = plane_sweep(convolution_of(request)), request.kind == WITH_INSTANCE_STATISTICS
    assert sweep is not None
    samples = sweep.rows if is_by_sample else 1
    blocks = REDUCTION_BLOCKS * (1 if is_by_sample else FORWARD_BLOCKS if request.kind == "convolution" else BLOCKS)
    whole = StemVolumeArguments(
        *astuple(sweep), segment_planes=sweep.out_planes, samples=samples, parts=0, accumulate=int(accumulate)
    )
    divided = replace(whole, segment_planes=whole.divide_planes(sweep.rows // samples, blocks))
    return replace(divided, parts=min(BLOCKS * REDUCTION_BLOCKS, divided.tiles))


def _arguments(at: Slice) -> StemVolumeArguments:
    return _launch(at.request, at.accumulate)


def _states(request: Request) -> int:
    """Return the number of states of statistics that are merged to one."""
    launch = _launch(request)
    return launch.tiles // launch.samples * WARPS


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _launch(request).parts * request.outputs[0].size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * conv.features.elements * conv.weight.elements // conv.weight.shape[0]
    share = TENSOR_SHARE if request.kind == "convolution" else FILTER_TENSOR_SHARE
    return gemm_us(request, device, operations, peak_tflops(device, request.precision), share)


_FORWARD = OwnKernel(
    "convolution",
    "conv/stem_volume.cu",
    StemVolumeArguments,
    _arguments,
    layouts=pixel_by_pixel,
    time_us=_time_us,
    launcher="stem_volume",
    takes=_takes,
    by_measurement=True,
    needs=Instruction.MMA_SYNC,
    aligned=True,
)
_BACKWARD_FILTER = replace(
    _FORWARD,
    kind="convolution_backward_filter",
    file="conv/stem_volume_filter.cu",
    workspace=_partial_bytes,
    launches=2,
    accumulates=True,
    launcher="stem_volume_backward_filter",
    shared=shared_of(SHARED_BYTES),
)
_WITH_STATISTICS = tuple(
    replace(
        with_statistics(_FORWARD, _states, kind),
        operands="image weights y mean variance workspace",
        named=f"stem_volume_{kind.partition('+')[2]}",
        without_statistics=_FORWARD.name,
    )
    for kind in STATISTICS_GROUPS
)

KERNELS = (_FORWARD, _BACKWARD_FILTER, *_WITH_STATISTICS)

"""Convolutions of 32 to 64 channels in bf16 and fp16, with filters of 3 x 3 x 3 or 3 x 3 and a stride of one.

Forward and for the data gradient, a block keeps the weights of its filters in shared memory, and planes of the image
next to them. For each plane of the image it computes products for three planes of the output. A forward pass can also
compute statistics of its result, a data gradient the sums of the gradient of the norm before it, over the batch or over
each sample. For the filter gradient, a block keeps the sums of 32 filters and 32 channels in registers.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import REDUCTION_BLOCKS, OwnKernel, Slice, channels_last, gemm_us, moved_us
from mbc.kernels.cuda.conv.plane_sweep import STAGES, TAPS, VOXELS, PlaneSweepArguments, in_16_bits, plane_sweep
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.cuda.norm.batch_norm import SUMS_BYTES
from mbc.kernels.cuda.wiring import AFFINE, SCALE_SHIFT, Wiring, for_norm_relus, members, product_of, run, taking
from mbc.kernels.statistics import STATISTICS_GROUPS
from mbc.ops.activation import LeakyRelu
from mbc.ops.batch_normalize import BatchNormalize
from mbc.ops.fused import SEVERAL
from mbc.ops.instance_norm import InstanceNormalize
from mbc.ops.shape import ChannelSlice

CHANNELS = (32, 48, 64)  # possible numbers of channels; a source is compiled for each
BLOCK_FILTERS = (64, 48, 32)  # possible numbers of filters of a block; more filters read each plane less often
BLOCK_BYTES = 227 * 1024  # shared memory of a block on the GPUs with wgmma; equal to the constant in the source
BARRIERS_BYTES = 192  # upper bound
CONSUMER_WARPS = 8  # equal to the constant in the source
CHANNEL_BYTES = 12  # constants of a norm's channel
UNIT_FILTERS = 16  # of a block, of which a thread holds four
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
class PlaneSweepReductionArguments(PlaneSweepConvArguments):
    """Integer arguments of a launch that reduces its result.

    Attributes:
        samples: Samples that are reduced by themselves; 1: the batch is reduced as a whole.
    """

    samples: int


@dataclass(frozen=True, slots=True)
class PlaneSweepNormArguments(PlaneSweepReductionArguments):
    """Integer arguments of a launch with the sums of a norm's gradient, or with a norm before the convolution.

    Attributes:
        affine: Whether the norm has scale and shift.
    """

    affine: int


@dataclass(frozen=True, slots=True)
class PlaneSweepHalvesArguments(PlaneSweepConvArguments):
    """Integer arguments of a launch that writes its result to two tensors.

    Attributes:
        swapped: 0: the first output has the first half of the filters, and the second output the second half. 1: the
            first output has the second half, and the second output the first half.
    """

    swapped: int


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
    """Return the sizes of a convolution, or of the convolution in a group."""
    sweep = plane_sweep(product_of(request))
    assert sweep is not None
    return sweep


def _is_flat(request: Request) -> bool:
    return _sweep(request).flat == 1


def _shared(request: Request) -> int:
    sweep = _sweep(request)
    return _shared_bytes(sweep, _block_filters(sweep))


def _samples(request: Request) -> int:
    """Return the number of samples that a launch reduces by themselves."""
    return request.inputs[0].shape[0] if "instance_" in request.kind else 1


def _segment_planes(request: Request) -> int:
    """Return the most planes of a tile; samples that are reduced by themselves have as many tiles as one alone."""
    sweep = _sweep(request)
    blocks = max(1, REDUCTION_BLOCKS * _block_filters(sweep) // sweep.filters)
    return sweep.divide_planes(sweep.rows // _samples(request), blocks)


def reduction_parts(request: Request) -> int:
    """Return the number of partial states of a reduction."""
    sweep = _sweep(request)
    segments = math.ceil(sweep.out_planes / _segment_planes(request))
    return sweep.rows // _samples(request) * sweep.tiles_of_plane * segments * CONSUMER_WARPS


def _arguments(at: Slice) -> PlaneSweepConvArguments:
    sweep = _sweep(at.request)
    return PlaneSweepConvArguments(
        *astuple(sweep),
        block_filters=_block_filters(sweep),
        backward=int(at.request.kind.startswith("convolution_backward_data")),
        segment_planes=_segment_planes(at.request),
    )


def _reduction_arguments(at: Slice) -> PlaneSweepReductionArguments:
    return PlaneSweepReductionArguments(*astuple(_arguments(at)), samples=_samples(at.request))


def norm_arguments(at: Slice) -> PlaneSweepNormArguments:
    """Return the integers of a launch with a norm that has scale and shift or not."""
    norm = next(member for member in members(at.request).members if member.kind.endswith("_normalize"))
    return PlaneSweepNormArguments(*astuple(_reduction_arguments(at)), affine=int(len(norm.inputs) == max(AFFINE)))


def _time_us(request: Request, device: DeviceSpec) -> float:
    sweep = _sweep(request)
    operations = 2 * sweep.voxels_computed * sweep.taps * sweep.channels * sweep.filters
    of_filter = product_of(request).kind == "convolution_backward_filter"
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


FORWARD = OwnKernel(
    "convolution",
    "conv/plane_sweep_conv.cu",
    PlaneSweepConvArguments,
    _arguments,
    layouts=channels_last,
    time_us=_time_us,
    launcher="plane_sweep_conv",
    flat=_is_flat,
    takes=_takes,
    shared=_shared,
    needs=Instruction.WGMMA,
    aligned=True,
)
_BACKWARD_DATA = replace(FORWARD, kind="convolution_backward_data", named="plane_sweep_conv_backward_data")

BACKWARD_FILTER = replace(
    FORWARD,
    kind="convolution_backward_filter",
    file="conv/plane_sweep_conv_filter.cu",
    struct=PlaneSweepFilterArguments,
    integers=_filter_arguments,
    workspace=_partial_bytes,
    launches=2,
    accumulates=True,
    launcher="plane_sweep_conv_backward_filter",
    flat=None,
    takes=_takes_filter,
    shared=_filter_shared,
)

_WITH_STATISTICS = tuple(
    replace(
        with_statistics(FORWARD, reduction_parts, kind),
        file="conv/plane_sweep_conv_statistics.cu",
        struct=PlaneSweepReductionArguments,
        integers=_reduction_arguments,
        operands="image weights y mean variance workspace",
        named=f"plane_sweep_conv_{kind.partition('+')[2]}",
    )
    for kind in STATISTICS_GROUPS
)


def _norm_sums_wiring(operands: int) -> Wiring:
    """Return the wiring of a data gradient, a recomputed norm with an activation, and the sums of the norm's gradient.

    Inputs: a gradient, weights, and the `operands` of the norm. Outputs: the data gradient and the sums.
    """
    dy = 2 + operands
    z, y, d = run(dy + 1, 3)
    return ((0, 1), run(2, operands), (z,), (y, dy), (2, d, 3, 4)), (dy, d + 1, d + 2)


_wired = taking(*map(_norm_sums_wiring, AFFINE))


def _norm_shared(request: Request) -> int:
    return _shared(request) + CONSUMER_WARPS * _block_filters(_sweep(request)) * CHANNEL_BYTES


def _takes_norm(request: Request) -> bool:
    return _wired(request) and _takes(product_of(request)) and _norm_shared(request) <= BLOCK_BYTES


def _norm_partial_bytes(request: Request, layout: Layout) -> int:
    return reduction_parts(request) * request.outputs[1].elements * SUMS_BYTES


def norm_reals(at: Slice) -> tuple[float, ...]:
    """Return eps of the norm, and the slope of the leaky ReLU behind it; 0 for ReLU."""
    attributes = [member.attributes for member in members(at.request).members]
    eps = next(a.eps for a in attributes if isinstance(a, BatchNormalize | InstanceNormalize))
    return eps, next((a.slope for a in attributes if isinstance(a, LeakyRelu)), 0.0)


def _norm_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of the data gradient and of the sums one after the other."""
    read = (*request.inputs[2:], request.outputs[0])
    sums_us = moved_us(replace(request, inputs=read, outputs=request.outputs[1:]), device)
    return _time_us(request, device) + device.launch_us + sums_us


_WITH_NORM_SUMS = for_norm_relus(
    replace(
        _BACKWARD_DATA,
        kind="convolution_backward_data+{norm}_normalize+{relu}+{relu}_backward+{norm}_normalize_backward_reduce",
        file="conv/plane_sweep_conv_norm_sums.cu",
        struct=PlaneSweepNormArguments,
        integers=norm_arguments,
        reals=norm_reals,
        workspace=_norm_partial_bytes,
        time_us=_norm_us,
        launches=2,
        operands=f"dy weights x mean variance {SCALE_SHIFT} y dgamma dbeta workspace",
        launcher="plane_sweep_conv_norm_sums",
        named="plane_sweep_conv_{norm}_norm_{relu}_sums",
        takes=_takes_norm,
        shared=_norm_shared,
    )
)


_both_sliced = taking((((0, 1), (2,), (2,)), (3, 4)))


def _starts(request: Request) -> tuple[int, ...]:
    """Return the first channels of two slices."""
    slices = (member.attributes for member in members(request).members[1:])
    return tuple(a.start for a in slices if isinstance(a, ChannelSlice))


def _takes_halves(request: Request) -> bool:
    """Return whether two slices of one size make up a data gradient; four filters of a thread lie in one of them."""
    half = request.outputs[0].shape[1]
    return (
        _both_sliced(request)
        and _takes(product_of(request))
        and request.outputs[0] == request.outputs[1]
        and half % UNIT_FILTERS == 0
        and 2 * half == _sweep(request).filters
        and set(_starts(request)) == {0, half}
    )


def _halves_arguments(at: Slice) -> PlaneSweepHalvesArguments:
    return PlaneSweepHalvesArguments(*astuple(_arguments(at)), swapped=int(_starts(at.request)[0] > 0))


_IN_HALVES = replace(
    _BACKWARD_DATA,
    kind=f"{_BACKWARD_DATA.kind}+channel_slice{SEVERAL}",
    file="conv/plane_sweep_conv_halves.cu",
    struct=PlaneSweepHalvesArguments,
    integers=_halves_arguments,
    launcher="plane_sweep_conv_halves",
    named="",
    takes=_takes_halves,
)

KERNELS = (FORWARD, _BACKWARD_DATA, BACKWARD_FILTER, *_WITH_STATISTICS, *_WITH_NORM_SUMS, _IN_HALVES)

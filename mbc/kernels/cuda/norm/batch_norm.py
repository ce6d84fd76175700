"""Reductions of biases and batch normalization: statistics, the sums of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import (
    REDUCTION_BLOCKS,
    THREADS,
    VECTOR_BYTES,
    Channels,
    OwnKernel,
    Slice,
    attributes_of,
    channels_first,
    image_of,
)
from mbc.kernels.cuda.image import SumArguments
from mbc.kernels.cuda.wiring import affines
from mbc.kernels.launch_struct import Struct

# Blocks of a reduction on 132 multiprocessors: one wave if channels are last; several waves if channels are first,
# because a thread then has only one load in flight. Constants, so that reductions have one order on all GPUs.
BLOCKS_LAST = 3 * REDUCTION_BLOCKS
BLOCKS_FIRST = 12 * REDUCTION_BLOCKS
LEAST_ROWS = 8  # rows of a thread that justify a block for its part
WARP = 32

# Bytes of the states in channel_sum.cuh, batch_norm.cuh and batch_statistics.cuh.
SUM_BYTES, SUMS_BYTES, STATISTICS_BYTES = 4, 8, 12


@dataclass(frozen=True, slots=True)
class FusedSumArguments(SumArguments):
    """Integer arguments of a launch that reduces an image with up to two normalizations."""

    affine: int
    affine2: int


@dataclass(frozen=True, slots=True)
class ConcatStatisticsArguments(Struct):
    """Integer arguments of a launch that concatenates pairs of mean and variance.

    The channels of every pair follow, `pairs` integers.
    """

    pairs: int


def parts(x: TensorType, layout: Layout, blocks_last: int = BLOCKS_LAST) -> int:
    """Return the number of parts into which the reduction of a channel is split.

    The parts fill a large GPU, and each has enough rows to justify a block. `blocks_last` is the number of blocks that
    a large GPU runs at a time, channels last.
    """
    c = Channels.of(x)
    vector = VECTOR_BYTES // x.dtype.size_bytes
    if layout is Layout.CHANNELS_FIRST:
        most, rows_per_block, rows = -(-BLOCKS_FIRST // c.channels), THREADS, c.rows * c.inner // vector
    else:
        columns = c.channels // vector if c.channels % vector == 0 else c.channels
        tiles = -(-columns // WARP)
        most, rows_per_block, rows = blocks_last // tiles, THREADS // -(-columns // tiles), c.rows * c.inner
    return max(1, min(most, rows // (rows_per_block * LEAST_ROWS)))


def sample_of(x: TensorType) -> TensorType:
    """Return the type of one sample, whose reduction by itself has as many parts in any division of the mini-batch."""
    return TensorType((1, *x.shape[1:]), x.dtype)


def partial_bytes(x: TensorType, layout: Layout, state_bytes: int, blocks_last: int = BLOCKS_LAST) -> int:
    """Return the workspace for the partial states of a reduction over channels; 0 if there is one part."""
    count = parts(x, layout, blocks_last)
    return count * x.shape[1] * state_bytes if count > 1 else 0


def sum_arguments(at: Slice) -> SumArguments:
    """Return the integer arguments of a launch that reduces each channel."""
    return SumArguments(*image_of(at), parts(at.request.inputs[0], at.layout), int(at.accumulate))


def fused_sum_arguments(at: Slice) -> FusedSumArguments:
    """Return the integer arguments of a launch that reduces an image with up to two normalizations."""
    return FusedSumArguments(*sum_arguments(at).integers(), *(*affines(at.request), 0, 0)[:2])


def _instance_statistics(at: Slice) -> SumArguments:
    return SumArguments(*image_of(at), parts(sample_of(at.request.inputs[0]), at.layout), accumulate=0)


def _instance_workspace(request: Request, layout: Layout) -> int:
    (x,) = request.inputs
    return x.shape[0] * partial_bytes(sample_of(x), layout, STATISTICS_BYTES)


def _join(at: Slice) -> ConcatStatisticsArguments:
    return ConcatStatisticsArguments(len(at.request.inputs) // 2)


def _channels_of_pairs(at: Slice) -> tuple[int, ...]:
    return tuple(mean.elements for mean in at.request.inputs[::2])


def sum_workspace(request: Request, layout: Layout) -> int:
    """Return the workspace of a reduction with one sum for each channel."""
    return partial_bytes(request.inputs[0], layout, SUM_BYTES)


def sums_workspace(request: Request, layout: Layout) -> int:
    """Return the workspace of a reduction with two sums for each channel."""
    return partial_bytes(request.inputs[0], layout, SUMS_BYTES)


def statistics_workspace(request: Request, layout: Layout) -> int:
    """Return the workspace of batch statistics."""
    return partial_bytes(request.inputs[0], layout, STATISTICS_BYTES)


KERNELS = (
    OwnKernel(
        "channel_sum",
        "norm/bias.cu",
        SumArguments,
        sum_arguments,
        workspace=sum_workspace,
        launches=2,
        accumulates=True,
        version=3,
    ),
    OwnKernel(
        "batch_statistics",
        "norm/batch_norm.cu",
        SumArguments,
        sum_arguments,
        workspace=statistics_workspace,
        launches=2,
        version=3,
    ),
    OwnKernel(
        "instance_statistics",
        "norm/batch_norm.cu",
        SumArguments,
        _instance_statistics,
        workspace=_instance_workspace,
        launches=2,
        operands="x mean variance workspace?",
    ),
    OwnKernel(
        "concat_statistics",
        "norm/batch_norm.cu",
        ConcatStatisticsArguments,
        _join,
        trailing=_channels_of_pairs,
        layouts=channels_first,
        operands="statistics[pairs*2] mean variance",
    ),
    OwnKernel(
        "batch_normalize_backward_reduce",
        "norm/batch_norm.cu",
        SumArguments,
        sum_arguments,
        attributes_of("eps"),
        workspace=sums_workspace,
        launches=2,
        accumulates=True,
        operands="x dy mean variance dgamma dbeta workspace?",
        version=3,
    ),
)

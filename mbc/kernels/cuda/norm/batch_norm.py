"""Biases, and batch normalisation: statistics, normalisation, the backward reductions, the gradient of x."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import (
    THREADS,
    VECTOR_BYTES,
    Channels,
    OwnKernel,
    Slice,
    Struct,
    channels_first,
    image_of,
)
from mbc.ops.normalization import BatchNormalize, BatchNormalizeBackward, UpdateRunning

# Of a reduction, on 132 multiprocessors: channels last one wave; channels first, where a thread has one load in flight,
# several. Constant, so that reductions are the same on all GPUs.
BLOCKS_LAST = 3 * 132
BLOCKS_FIRST = 12 * 132
LEAST_ROWS = 8  # of a thread, or its part is not worth a block
WARP = 32

# Of the states in channel_sum.cuh, batch_norm.cuh and batch_statistics.cuh.
SUM_BYTES, SUMS_BYTES, STATISTICS_BYTES = 4, 8, 12


@dataclass(frozen=True, slots=True)
class BiasAddArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int


@dataclass(frozen=True, slots=True)
class ChannelSumArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    parts: int
    accumulate: int


@dataclass(frozen=True, slots=True)
class BatchStatisticsArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    parts: int


@dataclass(frozen=True, slots=True)
class ConcatStatisticsArguments(Struct):
    pairs: int


@dataclass(frozen=True, slots=True)
class BatchNormalizeArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int


@dataclass(frozen=True, slots=True)
class BatchNormalizeBackwardReduceArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    parts: int
    accumulate: int


@dataclass(frozen=True, slots=True)
class BatchNormalizeBackwardArguments(Struct):
    type: int
    layout: int
    rows: int
    channels: int
    inner: int
    affine: int
    count: int


@dataclass(frozen=True, slots=True)
class UpdateRunningArguments(Struct):
    channels: int
    count: int


def parts(x: TensorType, layout: Layout, blocks_last: int = BLOCKS_LAST) -> int:
    """Into how many parts the reduction of a channel is split: enough to fill a large GPU, each worth a block of its
    own. `blocks_last`: of a large GPU at a time, channels last."""
    c = Channels.of(x)
    vector = VECTOR_BYTES // x.dtype.size_bytes
    if layout is Layout.CHANNELS_FIRST:
        most, rows_per_block, rows = -(-BLOCKS_FIRST // c.channels), THREADS, c.rows * c.inner // vector
    else:
        columns = c.channels // vector if c.channels % vector == 0 else c.channels
        tiles = -(-columns // WARP)
        most, rows_per_block, rows = blocks_last // tiles, THREADS // -(-columns // tiles), c.rows * c.inner
    return max(1, min(most, rows // (rows_per_block * LEAST_ROWS)))


def partial_bytes(x: TensorType, layout: Layout, state_bytes: int, blocks_last: int = BLOCKS_LAST) -> int:
    """Workspace of the partial states of a reduction by channel; none where there is one part."""
    count = parts(x, layout, blocks_last)
    return count * x.shape[1] * state_bytes if count > 1 else 0


def bias_arguments(at: Slice) -> BiasAddArguments:
    return BiasAddArguments(*image_of(at))


def channel_sum_arguments(at: Slice) -> ChannelSumArguments:
    return ChannelSumArguments(*image_of(at), parts(at.request.inputs[0], at.layout), int(at.accumulate))


def _statistics(at: Slice) -> BatchStatisticsArguments:
    return BatchStatisticsArguments(*image_of(at), parts(at.request.inputs[0], at.layout))


def _join(at: Slice) -> ConcatStatisticsArguments:
    return ConcatStatisticsArguments(len(at.request.inputs) // 2)


def _channels_of_pairs(at: Slice) -> tuple[int, ...]:
    return tuple(mean.elements for mean in at.request.inputs[::2])


def _normalize(at: Slice) -> BatchNormalizeArguments:
    return BatchNormalizeArguments(*image_of(at), affine=int(len(at.request.inputs) == 5))


def _sums(at: Slice) -> BatchNormalizeBackwardReduceArguments:
    return BatchNormalizeBackwardReduceArguments(
        *image_of(at), parts(at.request.inputs[0], at.layout), int(at.accumulate)
    )


def _backward(at: Slice) -> BatchNormalizeBackwardArguments:
    a = at.request.attributes
    assert isinstance(a, BatchNormalizeBackward)
    return BatchNormalizeBackwardArguments(*image_of(at), affine=int(len(at.request.inputs) == 7), count=a.count)


def _update_running(at: Slice) -> UpdateRunningArguments:
    a = at.request.attributes
    assert isinstance(a, UpdateRunning)
    return UpdateRunningArguments(at.request.inputs[0].elements, a.count)


def _eps(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, BatchNormalize | BatchNormalizeBackward)
    return (a.eps,)


def _momentum(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, UpdateRunning)
    return (a.momentum,)


def sum_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(request.inputs[0], layout, SUM_BYTES)


def sums_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(request.inputs[0], layout, SUMS_BYTES)


def statistics_workspace(request: Request, layout: Layout) -> int:
    return partial_bytes(request.inputs[0], layout, STATISTICS_BYTES)


KERNELS = (
    OwnKernel("bias_add", "norm/bias.cu", BiasAddArguments, bias_arguments, version=3),
    OwnKernel(
        "channel_sum",
        "norm/bias.cu",
        ChannelSumArguments,
        channel_sum_arguments,
        workspace=sum_workspace,
        launches=2,
        accumulates=True,
        version=3,
    ),
    OwnKernel(
        "batch_statistics",
        "norm/batch_norm.cu",
        BatchStatisticsArguments,
        _statistics,
        workspace=statistics_workspace,
        launches=2,
        version=3,
    ),
    OwnKernel(
        "concat_statistics",
        "norm/batch_norm.cu",
        ConcatStatisticsArguments,
        _join,
        trailing=_channels_of_pairs,
        layouts=channels_first,
    ),
    OwnKernel("batch_normalize", "norm/batch_norm.cu", BatchNormalizeArguments, _normalize, _eps, version=3),
    OwnKernel(
        "batch_normalize_backward_reduce",
        "norm/batch_norm.cu",
        BatchNormalizeBackwardReduceArguments,
        _sums,
        _eps,
        workspace=sums_workspace,
        launches=2,
        accumulates=True,
        version=3,
    ),
    OwnKernel(
        "batch_normalize_backward", "norm/batch_norm.cu", BatchNormalizeBackwardArguments, _backward, _eps, version=3
    ),
    OwnKernel(
        "update_running",
        "norm/batch_norm.cu",
        UpdateRunningArguments,
        _update_running,
        _momentum,
        layouts=channels_first,
    ),
)

"""Synchronized batch normalization: combines the gathered statistics and backward reductions of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first
from mbc.kernels.launch_struct import Struct
from mbc.ops.batch_normalize import CombineStatistics


@dataclass(frozen=True, slots=True)
class CombineStatisticsArguments(Struct):
    """Integer arguments of a launch that combines statistics.

    The elements that a channel has on each rank follow, `ranks` integers.
    """

    ranks: int
    channels: int


@dataclass(frozen=True, slots=True)
class SumGatheredArguments(Struct):
    """Integer arguments of a launch that sums gathered operands."""

    ranks: int
    elements: int
    operands: int


def _combine(at: Slice) -> CombineStatisticsArguments:
    ranks, channels = at.request.inputs[0].shape
    return CombineStatisticsArguments(ranks, channels)


def _counts(at: Slice) -> tuple[int, ...]:
    a = at.request.attributes
    assert isinstance(a, CombineStatistics)
    return a.counts


def _sum(at: Slice) -> SumGatheredArguments:
    ranks = at.request.inputs[0].shape[0]
    return SumGatheredArguments(ranks, at.request.outputs[0].elements, len(at.request.inputs))


KERNELS = (
    OwnKernel(
        "combine_statistics",
        "norm/sync_batch_norm.cu",
        CombineStatisticsArguments,
        _combine,
        trailing=_counts,
        layouts=channels_first,
    ),
    OwnKernel(
        "sum_gathered",
        "norm/sync_batch_norm.cu",
        SumGatheredArguments,
        _sum,
        layouts=channels_first,
        operands="gathered[operands] sums[operands]",
    ),
)

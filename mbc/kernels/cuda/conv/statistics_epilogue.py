"""Convolutions with the batch statistics of their result in the epilogue.

The additional time is unknown until somebody measures it. The estimate is the time of the two operations one after the
other, so that the search never chooses such a kernel by an estimate (as in `mbc.kernels.cudnn_statistics`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.calibration import estimate_us
from mbc.kernels.cuda.base import OwnKernel, channels_last, effort_of
from mbc.kernels.cuda.norm.batch_norm import KERNELS as BATCH_NORM_KERNELS
from mbc.kernels.cuda.norm.batch_norm import STATISTICS_BYTES
from mbc.kernels.cuda.wiring import taking
from mbc.kernels.statistics import WITH_STATISTICS, convolution_of, statistics_of

_STATISTICS = next(kernel for kernel in BATCH_NORM_KERNELS if kernel.kind == "batch_statistics")
_wired = taking((((0, 1), (2,)), (2, 3, 4)))


def with_statistics(alone: OwnKernel, parts: Callable[[Request], int]) -> OwnKernel:
    """Return a convolution kernel with statistics in its epilogue; it writes `parts` partial states for each filter."""

    def takes(request: Request) -> bool:
        return _wired(request) and alone.takes(convolution_of(request))

    def partial_bytes(request: Request, layout: Layout) -> int:
        return parts(request) * request.outputs[0].shape[1] * STATISTICS_BYTES

    def unfused_us(request: Request, device: DeviceSpec) -> float:
        statistics = statistics_of(request)
        (layouts,) = channels_last(statistics)
        alone_us = alone.time_us(convolution_of(request), device)
        return alone_us + estimate_us(effort_of(_STATISTICS, statistics, layouts, device))

    def shared_bytes(request: Request) -> int:
        return alone.shared(convolution_of(request))

    return replace(
        alone,
        kind=WITH_STATISTICS,
        workspace=partial_bytes,
        time_us=unfused_us,
        launches=2,
        launcher=f"{alone.name}_statistics",
        takes=takes,
        shared=shared_bytes,
    )

"""Convolutions with the statistics of their result in the epilogue, of the whole batch or of each sample.

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

_ALONE = {kernel.kind: kernel for kernel in BATCH_NORM_KERNELS}
_wired = taking((((0, 1), (2,)), (2, 3, 4)))


def with_statistics(alone: OwnKernel, parts: Callable[[Request], int], kind: str = WITH_STATISTICS) -> OwnKernel:
    """Return a convolution kernel with statistics in its epilogue.

    Args:
        alone: The convolution without statistics.
        parts: Returns the number of partial states that the kernel writes for each mean.
        kind: Kind of the group, which says whether statistics are those of the batch or of each sample.
    """

    def takes(request: Request) -> bool:
        return _wired(request) and alone.takes(convolution_of(request)) and any(channels_last(statistics_of(request)))

    def partial_bytes(request: Request, layout: Layout) -> int:
        return parts(request) * request.outputs[1].elements * STATISTICS_BYTES

    def unfused_us(request: Request, device: DeviceSpec) -> float:
        statistics = statistics_of(request)
        (layouts,) = channels_last(statistics)
        alone_us = alone.time_us(convolution_of(request), device)
        return alone_us + estimate_us(effort_of(_ALONE[statistics.kind], statistics, layouts, device))

    def shared_bytes(request: Request) -> int:
        return alone.shared(convolution_of(request))

    return replace(
        alone,
        kind=kind,
        workspace=partial_bytes,
        time_us=unfused_us,
        launches=2,
        launcher=f"{alone.name}_statistics",
        takes=takes,
        shared=shared_bytes,
    )

"""Measures collectives of one communicator: their times, and how much they and concurrent kernels slow each other down.

All ranks run this code at once and must decide alike. Otherwise they would call different collectives and wait forever.
So the ranks first agree on each value that a decision depends on (`CollectiveBench.agree`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from mbc.hardware.collective_times import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel, Link
from mbc.units import show_size

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (4, KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MAX_CTAS = (1, 2, 4, 8, 16, 32, 0)  # 0: copy engines move the data, where GPUs reach each other's memory
ELEMENT_BYTES = 4  # fp32
ROW_US, MOST_IN_A_ROW = 1000.0, 32  # duration and largest number of collectives one after another
TIMED_US = 3000.0  # duration of one timing of kernels or all-reduces, alone or concurrent
ROUNDS = 3  # repetitions of a timing alone and a concurrent one
CONCURRENT_BYTES = 16 * MIB  # size of the all-reduces that run beside kernels


class CollectiveBench(Protocol):
    """Interface to one rank; times are medians of some repetitions on this rank."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the communicator."""
        ...

    def agree(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        ...

    def single_us(self, kind: CollectiveKind, size_bytes: int) -> float:
        """Return the time of one collective right after the ranks have met, in microseconds."""
        ...

    def row_us(self, kind: CollectiveKind, size_bytes: int, count: int) -> float:
        """Return the time of each of `count` collectives that run one after another, in microseconds."""
        ...

    def kernels_us(self, kernel: ConcurrentKernel, count: int, beside: bool) -> float:
        """Return the microseconds of `count` runs of a kernel, alone or while all-reduces keep the links busy."""
        ...

    def all_reduces_us(self, count: int, beside: ConcurrentKernel | None) -> float:
        """Return the time of `count` all-reduces of CONCURRENT_BYTES, alone or while kernels of one kind run."""
        ...


def sized(kind: CollectiveKind, size_bytes: int, ranks: int) -> int:
    """Return the nearest size that the ranks can share: whole elements, at least one for each rank."""
    if kind is CollectiveKind.ALL_REDUCE:
        return max(1, size_bytes // ELEMENT_BYTES) * ELEMENT_BYTES
    part = ELEMENT_BYTES * ranks
    return max(1, size_bytes // part) * part


def measure_times(
    bench: CollectiveBench, link: Link, max_ctas: int, sizes_bytes: Sequence[int], tell: Callable[[str], None]
) -> list[CollectiveTime]:
    """Return the times of every kind of collective at every size."""
    times: list[CollectiveTime] = []
    for kind in CollectiveKind:
        for asked_bytes in sizes_bytes:
            size_bytes = sized(kind, asked_bytes, bench.ranks)
            single_us = bench.agree(bench.single_us(kind, size_bytes))
            count = max(2, min(MOST_IN_A_ROW, round(ROW_US / max(single_us, 1e-3))))
            row_us = bench.agree(bench.row_us(kind, size_bytes, count))
            times.append(CollectiveTime(kind, bench.ranks, link, max_ctas, size_bytes, row_us, single_us))
        listed = ", ".join(f"{show_size(t.size_bytes)} {t.time_us:.1f}" for t in times if t.kind is kind)
        tell(f"{max_ctas} thread blocks, {kind}, us each of several: {listed}")
    return times


def measure_slowdowns(
    bench: CollectiveBench, link: Link, max_ctas: int, tell: Callable[[str], None]
) -> list[CollectiveSlowdown]:
    """Return the ratios of concurrent times to times alone, for every kind of kernel."""
    slowdowns = [
        CollectiveSlowdown(kernel, bench.ranks, link, max_ctas, *_ratios(bench, kernel)) for kernel in ConcurrentKernel
    ]
    listed = ", ".join(f"{s.kernel} {s.kernel_ratio:.2f} (all-reduce {s.collective_ratio:.2f})" for s in slowdowns)
    tell(f"{max_ctas} thread blocks, times concurrent over alone: {listed}")
    return slowdowns


def _ratios(bench: CollectiveBench, kernel: ConcurrentKernel) -> tuple[float, float]:
    """Return how much a kernel and an all-reduce slow each other down, at least 1 each.

    Both are timed alone and concurrently in turn, so that a change of clock rates affects both times.
    """
    kernels = _count(bench.agree(bench.kernels_us(kernel, 1, beside=False)))
    reduces = _count(bench.agree(bench.all_reduces_us(1, beside=None)))
    kernel_ratios: list[float] = []
    reduce_ratios: list[float] = []
    for _ in range(ROUNDS):
        alone_us = bench.kernels_us(kernel, kernels, beside=False)
        kernel_ratios.append(bench.kernels_us(kernel, kernels, beside=True) / alone_us)
        alone_us = bench.all_reduces_us(reduces, beside=None)
        reduce_ratios.append(bench.all_reduces_us(reduces, beside=kernel) / alone_us)
    ratios = (bench.agree(statistics.median(values)) for values in (kernel_ratios, reduce_ratios))
    slower, collective = (max(1.0, ratio) for ratio in ratios)
    return slower, collective


def _count(once_us: float) -> int:
    return max(1, round(TIMED_US / max(once_us, 1e-3)))

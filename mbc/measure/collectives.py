"""Measures collectives of one communicator: their times, and what they and concurrent kernels cost each other.

All ranks run this at once and must decide alike, or they would call different collectives and wait for ever: whatever
a decision hangs on is agreed upon first (`CollectiveBench.agree`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from mbc.hardware.collectives import CollectiveKind, CollectiveSlowdown, CollectiveTime, ConcurrentKernel, Link
from mbc.units import show_size

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (4, KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MAX_CTAS = (1, 2, 4, 8, 16, 32, 0)  # 0: copy engines move the data, where GPUs reach each other's memory
ELEMENT_BYTES = 4  # fp32
ROW_US, MOST_IN_A_ROW = 1000.0, 32  # collectives one after another: so long, but no more
TIMED_US = 3000.0  # of one timing of kernels or all-reduces, alone or concurrent
ROUNDS = 3  # of alone and concurrent
CONCURRENT_BYTES = 16 * MIB  # of the all-reduces concurrent with kernels


class CollectiveBench(Protocol):
    """What measuring needs of one rank. Times are medians of some repetitions on this rank."""

    @property
    def ranks(self) -> int: ...

    def agree(self, value: float) -> float:
        """The largest value of all ranks."""
        ...

    def single_us(self, kind: CollectiveKind, size_bytes: int) -> float:
        """One collective, right after the ranks have met."""
        ...

    def row_us(self, kind: CollectiveKind, size_bytes: int, count: int) -> float:
        """Each of so many, one after another."""
        ...

    def kernels_us(self, kernel: ConcurrentKernel, count: int, beside: bool) -> float:
        """So many runs of a kernel, alone or while all-reduces keep the links busy."""
        ...

    def all_reduces_us(self, count: int, beside: ConcurrentKernel | None) -> float:
        """So many all-reduces of CONCURRENT_BYTES, alone or while kernels of a kind keep the GPU busy."""
        ...


def sized(kind: CollectiveKind, size_bytes: int, ranks: int) -> int:
    """The nearest size that the ranks can share: whole elements, at least one each."""
    if kind is CollectiveKind.ALL_REDUCE:
        return max(1, size_bytes // ELEMENT_BYTES) * ELEMENT_BYTES
    part = ELEMENT_BYTES * ranks
    return max(1, size_bytes // part) * part


def measure_times(
    bench: CollectiveBench, link: Link, max_ctas: int, sizes_bytes: Sequence[int], tell: Callable[[str], None]
) -> list[CollectiveTime]:
    found: list[CollectiveTime] = []
    for kind in CollectiveKind:
        for asked_bytes in sizes_bytes:
            size_bytes = sized(kind, asked_bytes, bench.ranks)
            single_us = bench.agree(bench.single_us(kind, size_bytes))
            count = max(2, min(MOST_IN_A_ROW, round(ROW_US / max(single_us, 1e-3))))
            row_us = bench.agree(bench.row_us(kind, size_bytes, count))
            found.append(CollectiveTime(kind, bench.ranks, link, max_ctas, size_bytes, row_us, single_us))
        told = ", ".join(f"{show_size(t.size_bytes)} {t.time_us:.1f}" for t in found if t.kind is kind)
        tell(f"{max_ctas} thread blocks, {kind}, us each of several: {told}")
    return found


def measure_slowdowns(
    bench: CollectiveBench, link: Link, max_ctas: int, tell: Callable[[str], None]
) -> list[CollectiveSlowdown]:
    found = [
        CollectiveSlowdown(kernel, bench.ranks, link, max_ctas, *_ratios(bench, kernel)) for kernel in ConcurrentKernel
    ]
    told = ", ".join(f"{s.kernel} {s.kernel_ratio:.2f} (all-reduce {s.collective_ratio:.2f})" for s in found)
    tell(f"{max_ctas} thread blocks, times concurrent over alone: {told}")
    return found


def _ratios(bench: CollectiveBench, kernel: ConcurrentKernel) -> tuple[float, float]:
    """Alone and concurrent in turn, so that a change of clocks hits both."""
    kernels = _count(bench.agree(bench.kernels_us(kernel, 1, beside=False)))
    reduces = _count(bench.agree(bench.all_reduces_us(1, beside=None)))
    kernel_ratios: list[float] = []
    reduce_ratios: list[float] = []
    for _ in range(ROUNDS):
        alone_us = bench.kernels_us(kernel, kernels, beside=False)
        kernel_ratios.append(bench.kernels_us(kernel, kernels, beside=True) / alone_us)
        alone_us = bench.all_reduces_us(reduces, beside=None)
        reduce_ratios.append(bench.all_reduces_us(reduces, beside=kernel) / alone_us)
    ratios = (bench.agree(statistics.median(found)) for found in (kernel_ratios, reduce_ratios))
    slower, collective = (max(1.0, ratio) for ratio in ratios)
    return slower, collective


def _count(once_us: float) -> int:
    return max(1, round(TIMED_US / max(once_us, 1e-3)))

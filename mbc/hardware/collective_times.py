"""Collectives between GPUs: how long they take, and what they and concurrent kernels cost each other.

Times are measured by `mbc profile --gpu all` (`mbc.measure.collective_timing`). Between measured sizes they are
interpolated; for other numbers of ranks they are projected by the ring algorithm: the bytes that each link carries, at
the bandwidth that was measured, and a latency a step (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009). Where nothing was measured they are estimated from the kind of the link.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class CollectiveKind(StrEnum):
    """Sizes are those of the whole buffer of one rank: what is reduced, what is scattered, what has been gathered.

    Without thread blocks copy engines move the data: an all-reduce then is an all-to-all and an all-gather (the sum of
    the parts between them is not in its time), a reduce-scatter the all-to-all alone."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


class Link(StrEnum):
    """What carries the bytes between two GPUs."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    SHARED_MEMORY = "shared_memory"  # of the host, where GPUs cannot reach each other
    SOCKET = "socket"


class ConcurrentKernel(StrEnum):
    """Kinds of kernels by what limits them: tensor cores by way of a convolution or a GEMM, device memory, and a
    reduction over it, as batch normalization's."""

    CONVOLUTION = "convolution"
    GEMM = "gemm"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """As measured, fp32, in place, at most `max_ctas` thread blocks. `time_us`: of each of several one after another;
    `single_us`: of one on idle GPUs, in a CUDA graph."""

    kind: CollectiveKind
    ranks: int
    link: Link
    max_ctas: int
    size_bytes: int
    time_us: float
    single_us: float

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """What was measured."""
        return self.kind, self.ranks, self.link, self.max_ctas, self.size_bytes


@dataclass(frozen=True, slots=True)
class CollectiveSlowdown:
    """Time of a kernel while all-reduces run over its time alone, and that of the all-reduces while such kernels run
    over theirs alone."""

    kernel: ConcurrentKernel
    ranks: int
    link: Link
    max_ctas: int
    kernel_ratio: float
    collective_ratio: float

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What was measured."""
        return self.kernel, self.ranks, self.link, self.max_ctas


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """`measured`: at measured sizes or between them. `projected`: from another number of ranks."""

    time_us: float
    measured: bool
    projected: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    """An estimate for all-reduce between two ranks: latency and bus bandwidth, of one thread block and at most."""

    latency_us: float
    block_gb_s: float
    most_gb_s: float


# NVLink: the line through 102 MB in 0.387 ms and bus bandwidths of 76, 166, 264 and 296 GB/s at 4, 16, 64 and 256 MiB
# between two H100 (within 7 % of each). What one thread block moves, and all other links: by judgement, of PCIe 4.0 x16
# and a network of 25 Gb/s.
_LINES: Mapping[Link, _Line] = {
    Link.NVLINK: _Line(40.0, 20.0, 308.0),
    Link.PCIE: _Line(40.0, 10.0, 20.0),
    Link.SHARED_MEMORY: _Line(50.0, 5.0, 10.0),
    Link.SOCKET: _Line(100.0, 1.0, 2.5),
}
# By judgement: kernels that wait for device memory lose a little of it besides the multiprocessors.
_MEMORY_BOUND = 1.1
_COLLECTIVE_RATIO = 1.3
_MULTIPROCESSORS = 132  # of the GPU that estimates of slow-downs are for


def bus_share(kind: CollectiveKind, ranks: int) -> float:
    """Bytes that a link carries over the bytes of the buffer."""
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1) / ranks


def steps(kind: CollectiveKind, ranks: int) -> int:
    """Of the ring algorithm, one message after another."""
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1)


@dataclass(frozen=True)
class CollectiveModel:
    """Collectives over one kind of link. `stale`: measured on another machine, so that nothing counts as measured."""

    link: Link
    times: Sequence[CollectiveTime] = ()
    slowdowns: Sequence[CollectiveSlowdown] = ()
    stale: bool = False

    def choices(self, ranks: int) -> tuple[int, ...]:
        """Numbers of thread blocks to choose from, ascending: what was measured, else powers of two up to 32."""
        found = {c for (_, r), curves in self._curves.items() if r == self._nearest(ranks) for c in curves}
        return tuple(sorted(found)) or (1, 2, 4, 8, 16, 32)

    def time_us(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> float:
        return self.cost(kind, size_bytes, ranks, max_ctas).time_us

    def cost(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> CollectiveCost:
        """Of one collective among others. Nothing for one rank."""
        if ranks < 2:
            return CollectiveCost(0.0, True)
        known_ranks = self._nearest(ranks)
        curves = self._curves.get((kind, known_ranks))
        if curves is None:
            return CollectiveCost(self._estimated_us(kind, size_bytes, ranks, max_ctas), False)
        # No thread blocks is another way than few of them: nothing lies between.
        alike = {ctas: curve for ctas, curve in curves.items() if (ctas == 0) == (max_ctas == 0)}
        if not alike:
            return CollectiveCost(self._estimated_us(kind, size_bytes, ranks, max_ctas), False)
        found = {ctas: _projected(curve, kind, known_ranks, ranks, size_bytes) for ctas, curve in alike.items()}
        projected = known_ranks != ranks
        return CollectiveCost(_interpolated(found, max_ctas), not projected and not self.stale, projected)

    def slowdown(self, kernel: ConcurrentKernel, ranks: int, max_ctas: int) -> CollectiveSlowdown:
        """Measured, else an estimate; other numbers of ranks slow kernels down as the nearest that was measured."""
        here = [s for s in self.slowdowns if s.link is self.link and s.kernel is kernel]
        here = [s for s in here if (s.max_ctas == 0) == (max_ctas == 0)]
        nearest = min((s.ranks for s in here), key=lambda r: abs(r - ranks), default=0)
        here = [s for s in here if s.ranks == nearest]
        if here:
            ratios = {s.max_ctas: s.kernel_ratio for s in here}
            back = {s.max_ctas: s.collective_ratio for s in here}
            pair = _interpolated(ratios, max_ctas), _interpolated(back, max_ctas)
        else:
            # Copies take no multiprocessor.
            taken = min(max_ctas, _MULTIPROCESSORS // 2)
            bound = 1.0 if kernel in (ConcurrentKernel.CONVOLUTION, ConcurrentKernel.GEMM) else _MEMORY_BOUND
            pair = bound * _MULTIPROCESSORS / (_MULTIPROCESSORS - taken), _COLLECTIVE_RATIO
        return CollectiveSlowdown(kernel, ranks, self.link, max_ctas, *pair)

    def knows_slowdown(self, kernel: ConcurrentKernel) -> bool:
        """Whether `slowdown` was measured on this kind of link."""
        return not self.stale and any(s.link is self.link and s.kernel is kernel for s in self.slowdowns)

    @cached_property
    def _curves(self) -> Mapping[tuple[CollectiveKind, int], Mapping[int, Mapping[int, float]]]:
        """(kind, ranks) -> max_ctas -> bytes -> microseconds that never fall as the bytes grow."""
        found: dict[tuple[CollectiveKind, int], dict[int, dict[int, float]]] = {}
        for t in sorted(self.times, key=lambda t: t.size_bytes):
            if t.link is self.link:
                curve = found.setdefault((t.kind, t.ranks), {}).setdefault(t.max_ctas, {})
                curve[t.size_bytes] = max(t.time_us, *curve.values(), 0.0)
        return found

    def _nearest(self, ranks: int) -> int:
        """The measured number of ranks that is nearest, the larger of two; 0 where there is none."""
        return min((r for _, r in self._curves), key=lambda r: (abs(r - ranks), -r), default=0)

    def _estimated_us(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> float:
        line = _LINES[self.link]
        latency_us = line.latency_us * steps(kind, ranks) / steps(CollectiveKind.ALL_REDUCE, 2)
        gb_s = min(line.most_gb_s, line.block_gb_s * max_ctas) if max_ctas else line.most_gb_s
        return latency_us + bus_share(kind, ranks) * size_bytes / (gb_s * 1e3)


def _projected(curve: Mapping[int, float], kind: CollectiveKind, known: int, ranks: int, size_bytes: int) -> float:
    """The time on `ranks` of what was measured on `known`: the shortest as the steps, the rest as the bytes a link."""
    time_us = _by_size(curve, size_bytes)
    if known == ranks:
        return time_us
    latency_us = next(iter(curve.values()))
    moved_us = (time_us - latency_us) * bus_share(kind, ranks) / bus_share(kind, known)
    return latency_us * steps(kind, ranks) / steps(kind, known) + moved_us


def _by_size(curve: Mapping[int, float], size_bytes: int) -> float:
    """The smallest size's time below it, and the bandwidth of the largest beyond."""
    largest = max(curve)
    if size_bytes > largest:
        return curve[largest] * size_bytes / largest
    return _interpolated(curve, size_bytes)


def _interpolated(points: Mapping[int, float], at: int) -> float:
    """Linear between neighbours in logarithms of both; the ends' values beyond them."""
    if at in points:  # to the bit
        return points[at]
    places = sorted(points)
    above = bisect_right(places, at)
    if above in (0, len(places)):
        return points[places[min(above, len(places) - 1)]]
    low, high = places[above - 1], places[above]
    share = math.log(at / low) / math.log(high / low)
    return math.exp(math.log(points[low]) * (1 - share) + math.log(points[high]) * share)

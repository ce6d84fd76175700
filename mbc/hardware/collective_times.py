"""Collectives between GPUs: how long they take, and how much they and concurrent kernels slow each other down.

`mbc profile --gpu all` measures the times (`mbc.measure.collective_timing`). Between measured sizes they are
interpolated. For other numbers of ranks they are projected by the ring algorithm: the bytes that each link carries, at
the measured bandwidth, and one latency for each step (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009). Without measurements they are estimated from the kind of the link.

Ranks of several machines form a hierarchy: rings inside each machine, and a ring of machines. NCCL sends pieces through
both at a time, so the slower of the two determines the time of a large collective.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property


class CollectiveKind(StrEnum):
    """Kinds of collectives. The size of a collective is the size of one rank's whole buffer.

    The whole buffer is reduced, scattered or gathered. With no thread blocks, copy engines move the data: an all-reduce
    is then an all-to-all and an all-gather, and its time does not include the sum of the parts between the two. A
    reduce-scatter is then the all-to-all alone.
    """

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


class Link(StrEnum):
    """Connection between two GPUs."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    SHARED_MEMORY = "shared_memory"  # of the host, if GPUs cannot access each other's memory
    SOCKET = "socket"


class ConcurrentKernel(StrEnum):
    """Kinds of kernels by their limit.

    A convolution and a GEMM are limited by tensor cores, an elementwise kernel by device memory. A reduction reads
    device memory as batch normalization does.
    """

    CONVOLUTION = "convolution"
    GEMM = "gemm"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Measured time of a collective: fp32, in place, at most `max_ctas` thread blocks.

    `time_us` is the time of each collective in a sequence, `single_us` the time of one collective on idle GPUs, both in
    a CUDA graph.
    """

    kind: CollectiveKind
    ranks: int
    link: Link
    max_ctas: int
    size_bytes: int
    time_us: float
    single_us: float

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """The collective that was measured."""
        return self.kind, self.ranks, self.link, self.max_ctas, self.size_bytes


@dataclass(frozen=True, slots=True)
class CollectiveSlowdown:
    """Slowdowns of a kernel and of the all-reduces that run beside it.

    Each ratio is a concurrent time over a time alone: `kernel_ratio` of the kernel, `collective_ratio` of the
    all-reduces.
    """

    kernel: ConcurrentKernel
    ranks: int
    link: Link
    max_ctas: int
    kernel_ratio: float
    collective_ratio: float

    @property
    def key(self) -> tuple[str, int, str, int]:
        """The kernel and the collective that were measured."""
        return self.kernel, self.ranks, self.link, self.max_ctas


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Time of a collective.

    `measured`: whether the time was measured at its size, or interpolated between measured sizes. `projected`: whether
    it follows from measurements of another number of ranks.
    """

    time_us: float
    measured: bool
    projected: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    """An estimate for an all-reduce between two ranks.

    The bandwidths are bus bandwidths: `block_gb_s` of one thread block, `most_gb_s` of any number.
    """

    latency_us: float
    block_gb_s: float
    most_gb_s: float


# NVLink: the line through 102 MB in 0.387 ms and bus bandwidths of 76, 166, 264 and 296 GB/s at 4, 16, 64 and 256 MiB
# between two H100 (within 7 % of each). Judgements: the rate of one thread block, and all other links, which stand for
# PCIe 4.0 x16 and a network of 25 Gb/s.
_LINES: Mapping[Link, _Line] = {
    Link.NVLINK: _Line(40.0, 20.0, 308.0),
    Link.PCIE: _Line(40.0, 10.0, 20.0),
    Link.SHARED_MEMORY: _Line(50.0, 5.0, 10.0),
    Link.SOCKET: _Line(100.0, 1.0, 2.5),
}
# Judgement: the share of a network's nominal rate that collectives reach, and the latency of two messages.
_NETWORK_SHARE, _NETWORK_LATENCY_US = 0.9, 40.0
ASSUMED_NETWORK = "25Gb"  # the network that the line of Link.SOCKET stands for
# Judgement: kernels that wait for device memory lose a little bandwidth besides the multiprocessors.
_MEMORY_BOUND = 1.1
_COLLECTIVE_RATIO = 1.3
_MULTIPROCESSORS = 132  # of the GPU for which slowdowns are estimated


def bus_share(kind: CollectiveKind, ranks: int) -> float:
    """Return the ratio of the bytes that a link carries to the bytes of the buffer."""
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1) / ranks


def steps(kind: CollectiveKind, ranks: int) -> int:
    """Return the number of successive messages in the ring algorithm."""
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1)


@dataclass(frozen=True)
class CollectiveModel:
    """Times of collectives over one kind of link.

    Attributes:
        link: Link between the GPUs of one machine.
        times: Measured times, also of other links.
        slowdowns: Measured slowdowns, also of other links.
        stale: Whether the times come from another machine, so that none counts as measured.
        network_gbit: Rate of the link in Gb/s in each direction, if it is a network whose rate is known; else 0.
        gpus_per_node: Number of GPUs in one machine; 0 if all are in one.
        between: Collectives between machines, of which each is one rank; None if all GPUs are in one machine.
    """

    link: Link
    times: Sequence[CollectiveTime] = ()
    slowdowns: Sequence[CollectiveSlowdown] = ()
    stale: bool = False
    network_gbit: float = 0.0
    gpus_per_node: int = 0
    between: CollectiveModel | None = None

    def across_nodes(self, gpus_per_node: int, network_gbit: float = 0.0) -> CollectiveModel:
        """Return the model of ranks in machines of `gpus_per_node` GPUs that a network connects.

        Without the network's rate, times that were measured through sockets hold; else ASSUMED_NETWORK is assumed.
        """
        times = () if network_gbit else self.times
        network = CollectiveModel(Link.SOCKET, times, (), self.stale, network_gbit)
        return replace(self, gpus_per_node=gpus_per_node, between=network)

    @property
    def links_text(self) -> str:
        """The links that the times hold for; empty if all GPUs are in one machine."""
        if self.between is None:
            return ""
        network = "measured sockets" if self.between._curves else f"{ASSUMED_NETWORK} assumed"
        network = f"{self.between.network_gbit:g}Gb" if self.between.network_gbit else network
        count = self.gpus_per_node
        inside = f"{count} GPUs in each by {self.link.replace('_', ' ')}" if count > 1 else "1 GPU in each"
        return f"{network} between machines, {inside}"

    def choices(self, ranks: int) -> tuple[int, ...]:
        """Return the numbers of thread blocks to choose from, ascending: the measured numbers, or powers of two."""
        numbers = {c for (_, r), curves in self._curves.items() if r == self._nearest(ranks) for c in curves}
        if self._spans_nodes(ranks):
            numbers.discard(0)  # copy engines reach GPUs of their own machine only
        return tuple(sorted(numbers)) or (1, 2, 4, 8, 16, 32)

    def time_us(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> float:
        """Return the time of one collective among others, in microseconds."""
        return self.cost(kind, size_bytes, ranks, max_ctas).time_us

    def cost(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> CollectiveCost:
        """Return the cost of one collective among others; 0 for one rank."""
        if ranks < 2:
            return CollectiveCost(0.0, True)
        if self.between is not None and self._spans_nodes(ranks):
            inside, nodes = replace(self, between=None), math.ceil(ranks / self.gpus_per_node)
            levels = ((inside, self.gpus_per_node), (self.between, nodes))
            whole, least = (
                [model.cost(kind, of_bytes, count, max_ctas) for model, count in levels] for of_bytes in (size_bytes, 1)
            )
            # The pieces of a large collective are in both levels at a time; the last piece passes one after the other.
            time_us = max(cost.time_us for cost in whole) + min(cost.time_us for cost in least)
            if self.gpus_per_node > 1:  # several machines are no faster than one
                time_us = max(time_us, inside.time_us(kind, size_bytes, ranks, max_ctas))
            return CollectiveCost(time_us, False, all(cost.measured or cost.projected for cost in whole))
        measured_ranks = self._nearest(ranks)
        curves = self._curves.get((kind, measured_ranks))
        if curves is None:
            return CollectiveCost(self._estimated_us(kind, size_bytes, ranks, max_ctas), False)
        # Copy engines (no thread blocks) work differently from few thread blocks: the two are not interpolated.
        alike = {ctas: curve for ctas, curve in curves.items() if (ctas == 0) == (max_ctas == 0)}
        if not alike:
            return CollectiveCost(self._estimated_us(kind, size_bytes, ranks, max_ctas), False)
        times_us = {ctas: _projected(curve, kind, measured_ranks, ranks, size_bytes) for ctas, curve in alike.items()}
        projected = measured_ranks != ranks
        return CollectiveCost(_interpolated(times_us, max_ctas), not projected and not self.stale, projected)

    def slowdown(self, kernel: ConcurrentKernel, ranks: int, max_ctas: int) -> CollectiveSlowdown:
        """Return the slowdown, measured or estimated.

        If a number of ranks was not measured, the nearest measured number counts.
        """
        here = [s for s in self.slowdowns if s.link is self.link and s.kernel is kernel]
        here = [s for s in here if (s.max_ctas == 0) == (max_ctas == 0)]
        nearest = min((s.ranks for s in here), key=lambda r: abs(r - ranks), default=0)
        here = [s for s in here if s.ranks == nearest]
        if here:
            ratios = {s.max_ctas: s.kernel_ratio for s in here}
            back = {s.max_ctas: s.collective_ratio for s in here}
            pair = _interpolated(ratios, max_ctas), _interpolated(back, max_ctas)
        else:
            # Copy engines use no multiprocessor.
            taken = min(max_ctas, _MULTIPROCESSORS // 2)
            bound = 1.0 if kernel in (ConcurrentKernel.CONVOLUTION, ConcurrentKernel.GEMM) else _MEMORY_BOUND
            pair = bound * _MULTIPROCESSORS / (_MULTIPROCESSORS - taken), _COLLECTIVE_RATIO
        return CollectiveSlowdown(kernel, ranks, self.link, max_ctas, *pair)

    @cached_property
    def _curves(self) -> Mapping[tuple[CollectiveKind, int], Mapping[int, Mapping[int, float]]]:
        """(kind, ranks) -> max_ctas -> bytes -> microseconds, which never decrease as the bytes grow."""
        curves: dict[tuple[CollectiveKind, int], dict[int, dict[int, float]]] = {}
        for t in sorted(self.times, key=lambda t: t.size_bytes):
            if t.link is self.link:
                curve = curves.setdefault((t.kind, t.ranks), {}).setdefault(t.max_ctas, {})
                curve[t.size_bytes] = max(t.time_us, *curve.values(), 0.0)
        return curves

    def _spans_nodes(self, ranks: int) -> bool:
        return self.between is not None and ranks > self.gpus_per_node

    def _nearest(self, ranks: int) -> int:
        """Return the nearest measured number of ranks, the larger of two equally near, 0 if there is none."""
        return min((r for _, r in self._curves), key=lambda r: (abs(r - ranks), -r), default=0)

    def _estimated_us(self, kind: CollectiveKind, size_bytes: int, ranks: int, max_ctas: int) -> float:
        line = _LINES[self.link]
        if self.network_gbit:
            gb_s = self.network_gbit / 8 * _NETWORK_SHARE
            line = _Line(_NETWORK_LATENCY_US, gb_s, gb_s)
        latency_us = line.latency_us * steps(kind, ranks) / steps(CollectiveKind.ALL_REDUCE, 2)
        gb_s = min(line.most_gb_s, line.block_gb_s * max_ctas) if max_ctas else line.most_gb_s
        return latency_us + bus_share(kind, ranks) * size_bytes / (gb_s * 1e3)


def _projected(
    curve: Mapping[int, float], kind: CollectiveKind, measured_ranks: int, ranks: int, size_bytes: int
) -> float:
    """Return the time on `ranks` ranks, projected from measurements on `measured_ranks`.

    The time of the smallest size is latency and grows with the number of steps. The remaining time grows with the bytes
    that each link carries.
    """
    time_us = _by_size(curve, size_bytes)
    if measured_ranks == ranks:
        return time_us
    latency_us = next(iter(curve.values()))
    moved_us = (time_us - latency_us) * bus_share(kind, ranks) / bus_share(kind, measured_ranks)
    return latency_us * steps(kind, ranks) / steps(kind, measured_ranks) + moved_us


def _by_size(curve: Mapping[int, float], size_bytes: int) -> float:
    """Return the time of a size: below the smallest size its time, beyond the largest size its bandwidth."""
    largest = max(curve)
    if size_bytes > largest:
        return curve[largest] * size_bytes / largest
    return _interpolated(curve, size_bytes)


def _interpolated(points: Mapping[int, float], at: int) -> float:
    """Return the value at `at`, interpolated linearly in logarithms of both axes; beyond the ends, the end's value."""
    if at in points:  # the exact value, without rounding
        return points[at]
    places = sorted(points)
    above = bisect_right(places, at)
    if above in (0, len(places)):
        return points[places[min(above, len(places) - 1)]]
    low, high = places[above - 1], places[above]
    share = math.log(at / low) / math.log(high / low)
    return math.exp(math.log(points[low]) * (1 - share) + math.log(points[high]) * share)

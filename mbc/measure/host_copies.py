"""Measures copies between a GPU and pinned host memory, alone, in both directions concurrently, and concurrently with
kernels.

What is timed runs on one stream while copies keep another one busy in each direction that is asked for: they start
before it and end after it. Kernels are timed alone and concurrently with copies in turn, so that a change of clocks
hits both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.transfers import HostLink, Slowdown
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.plan.model import Stream

MIB = 1 << 20
SIZES_BYTES = tuple(mib * MIB for mib in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
BESIDE_BYTES = 64 * MIB  # of each copy that only keeps its direction busy
TIMED_US = 4000.0  # of one timing of a kernel or of concurrent copies
REPEATS = 5  # of each timing, after one that is left out
ROUNDS = 3  # of alone and concurrent
BUSY_GB_S = 100.0  # no direction is faster: rather too many concurrent copies than too few
MOST_SHARE = 4  # a buffer takes no more than one in so many bytes of the GPU's block
MOST_TRIES = 4  # until the concurrent copies last longer than what is timed

ALONE: tuple[Stream, ...] = ()
TO_HOST, TO_DEVICE = (Stream.TO_HOST,), (Stream.TO_DEVICE,)
BOTH = (Stream.TO_HOST, Stream.TO_DEVICE)
Work = Callable[[], None]


class TransferBench(Protocol):
    """What measuring copies needs of a GPU. Times are medians of some repetitions."""

    @property
    def most_bytes(self) -> int:
        """The longest copy that fits."""
        ...

    def copies_us(self, direction: Stream, size_bytes: int, count: int, beside: Sequence[Stream]) -> float:
        """So many copies of a size, one after another, while those directions are busy too."""
        ...

    def kernels_us(self, kind: str, count: int, beside: Sequence[Stream]) -> float:
        """So many runs of the `streaming`, `cached` or `computing` kernel, likewise."""
        ...


def measure_link(bench: TransferBench) -> HostLink:
    """The whole link. Takes some seconds."""
    to_host_gb_s, to_host_latency_us = _line(bench, Stream.TO_HOST)
    to_device_gb_s, to_device_latency_us = _line(bench, Stream.TO_DEVICE)
    return HostLink(
        to_host_gb_s,
        to_device_gb_s,
        min(to_host_gb_s, _rate(bench, Stream.TO_HOST, TO_DEVICE)),
        min(to_device_gb_s, _rate(bench, Stream.TO_DEVICE, TO_HOST)),
        max(to_host_latency_us, to_device_latency_us),
        _slowdown(bench, "streaming"),
        _slowdown(bench, "cached"),
        _slowdown(bench, "computing"),
        measured=True,
    )


def _line(bench: TransferBench, direction: Stream) -> tuple[float, float]:
    """Rate in GB/s and latency of the line through the times of all sizes: the median of the slopes of all pairs of
    sizes (Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968), each pair counting by the bytes
    that it is apart, and the median of what is left of the times."""
    sizes = [size for size in SIZES_BYTES if size <= bench.most_bytes]
    times = [(size, bench.copies_us(direction, size, 1, ALONE)) for size in sizes]
    slopes = sorted(
        ((time - other) / (size - less), size - less) for (less, other), (size, time) in combinations(times, 2)
    )
    us_per_byte = _weighted_median(slopes)
    latency_us = statistics.median(time - size * us_per_byte for size, time in times)
    return 1e-3 / us_per_byte, max(0.0, latency_us)


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Of sorted (value, weight)."""
    half = sum(weight for _, weight in values) / 2
    reached = 0
    for value, weight in values:
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")


def _rate(bench: TransferBench, direction: Stream, beside: Sequence[Stream]) -> float:
    """In GB/s, of copies one after another while `beside` is busy."""
    size = min(BESIDE_BYTES, bench.most_bytes)
    count = max(1, round(TIMED_US / bench.copies_us(direction, size, 1, ALONE)))
    return count * size / (bench.copies_us(direction, size, count, beside) * 1e3)


def _slowdown(bench: TransferBench, kind: str) -> Slowdown:
    count = max(1, round(TIMED_US / bench.kernels_us(kind, 1, ALONE)))
    ratios: dict[tuple[Stream, ...], list[float]] = {TO_HOST: [], TO_DEVICE: [], BOTH: []}
    for _ in range(ROUNDS):
        for beside, found in ratios.items():
            alone_us = bench.kernels_us(kind, count, ALONE)
            found.append(bench.kernels_us(kind, count, beside) / alone_us)
    return Slowdown(*(max(1.0, statistics.median(found)) for found in ratios.values()))


@dataclass(frozen=True)
class _Lane:
    """One direction: a stream for what only keeps it busy, and memory at both ends for that and for what is timed."""

    stream: Any
    device: int
    host: NDArray[np.uint8]
    beside_device: int
    beside_host: NDArray[np.uint8]


class GpuTransfers:
    """The bench of a real GPU. `kernels` run each kind once on the GPU's stream, for long enough that the CPU keeps up.
    `DoesNotFit` where not even a copy of the smallest size fits the GPU's block."""

    def __init__(self, gpu: Gpu, kernels: Mapping[str, Work]) -> None:
        self._gpu = gpu
        self._kernels = kernels
        fitting = [size for size in SIZES_BYTES if size * MOST_SHARE <= gpu.left_bytes]
        if not fitting:
            raise DoesNotFit(f"{SIZES_BYTES[0] * MOST_SHARE} bytes are needed, {gpu.left_bytes} are left")
        self.most_bytes = fitting[-1]
        self._beside_bytes = min(BESIDE_BYTES, self.most_bytes)
        self._lanes = {direction: self._lane() for direction in BOTH}

    def _lane(self) -> _Lane:
        gpu = self._gpu
        return _Lane(
            gpu.new_stream(),
            gpu.take(self.most_bytes),
            gpu.pinned(self.most_bytes),
            gpu.take(self._beside_bytes),
            gpu.pinned(self._beside_bytes),
        )

    def copies_us(self, direction: Stream, size_bytes: int, count: int, beside: Sequence[Stream]) -> float:
        lane = self._lanes[direction]
        data = lane.host[:size_bytes]

        def work() -> None:
            for _ in range(count):
                self._copy(direction, lane.device, data, None)

        return self._timed(work, beside)

    def kernels_us(self, kind: str, count: int, beside: Sequence[Stream]) -> float:
        launch = self._kernels[kind]

        def work() -> None:
            for _ in range(count):
                launch()

        return self._timed(work, beside)

    def _copy(self, direction: Stream, device: int, host: NDArray[np.uint8], stream: Any) -> None:
        if direction is Stream.TO_HOST:
            self._gpu.copy_to_host(host, device, stream)
        else:
            self._gpu.copy_to_device(device, host, stream)

    def _timed(self, work: Work, beside: Sequence[Stream]) -> float:
        time_us = self._median_us(work)
        lasting_us = 2 * (REPEATS + 1) * time_us
        for _ in range(MOST_TRIES if beside else 0):
            ends = [self._keep_busy(direction, lasting_us) for direction in beside]
            time_us = self._median_us(work)
            done = self._gpu.mark_time()
            for event in (done, *ends):
                event.synchronize()
            # What ended before `done` may have left alone what was timed.
            if all(end.time_since(done) > 0 for end in ends):
                break
            lasting_us *= 2
        return time_us

    def _median_us(self, work: Work) -> float:
        # Queued behind one another, so that no time is that of the CPU; the first one may find the GPU idle.
        return statistics.median(self._gpu.times_us(work, REPEATS + 1)[1:])

    def _keep_busy(self, direction: Stream, lasting_us: float) -> Any:
        """Copies that take at least so long; the event after the last."""
        lane = self._lanes[direction]
        for _ in range(1 + round(lasting_us * BUSY_GB_S * 1e3 / self._beside_bytes)):
            self._copy(direction, lane.beside_device, lane.beside_host, lane.stream)
        return self._gpu.mark_time(lane.stream)

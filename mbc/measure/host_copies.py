"""Measures copies between a GPU and pinned host memory or another GPU.

Copies are measured alone, in both directions concurrently, and concurrently with kernels and with copies of the other
link. The timed work runs on one stream while copies keep another stream busy in each requested direction: those copies
start before the work and end after it. Kernels are timed alone and concurrently with copies in turn, so that a change
of clock rates affects both times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.hardware.transfers import HostLink, PeerLink, Slowdown
from mbc.measure.gpu import DoesNotFit, Gpu

MIB = 1 << 20
SIZES_BYTES = tuple(mib * MIB for mib in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
TIMED_BYTES = {Space.HOST: 64 * MIB, Space.PEER: 512 * MIB}  # sizes at which latency hardly counts
BESIDE_BYTES = 64 * MIB  # size of each copy that only keeps its direction busy
TIMED_US = 4000.0  # duration of one timing of a kernel or of concurrent copies
REPEATS = 5  # repetitions of each timing, after one that is left out
ROUNDS = 3  # repetitions of a timing alone and a concurrent one
# No direction is faster: rather too many concurrent copies than too few.
BUSY_GB_S = {Space.HOST: 100.0, Space.PEER: 1000.0}
MOST_SHARE = 2  # a buffer takes at most 1 / MOST_SHARE of a direction's part of the GPU's block
MOST_TRIES = 4  # attempts to make the concurrent copies last longer than the timed work

ALONE: tuple[Stream, ...] = ()
BOTH = (STREAM_TO[Space.HOST], STREAM_FROM[Space.HOST])
PEER_BOTH = (STREAM_TO[Space.PEER], STREAM_FROM[Space.PEER])
Work = Callable[[], None]
Outside = NDArray[np.uint8] | int  # pinned memory, or an address in another GPU's memory


class TransferBench(Protocol):
    """Interface to a GPU for measuring copies; times are medians of some repetitions."""

    @property
    def most_bytes(self) -> int:
        """Size of the longest copy that fits."""
        ...

    def copies_us(self, direction: Stream, size_bytes: int, count: int, beside: Sequence[Stream]) -> float:
        """Return the time of `count` copies, one after another, while the directions in `beside` are busy too."""
        ...

    def kernels_us(self, kind: str, count: int, beside: Sequence[Stream]) -> float:
        """Return the time of `count` runs of the `streaming`, `cached` or `computing` kernel while `beside` is busy."""
        ...


def measure_link(bench: TransferBench) -> HostLink:
    """Measure the link to the host, in some seconds."""
    return HostLink(*_measured(bench, BOTH), measured=True)


def measure_peer_link(bench: TransferBench) -> PeerLink:
    """Measure the link to another GPU, and how much it and the link to the host slow each other down."""
    measured = _measured(bench, PEER_BOTH)
    return PeerLink(
        *measured,
        measured=True,
        beside_host=_beside(bench, PEER_BOTH, BOTH),
        host_beside=_beside(bench, BOTH, PEER_BOTH),
    )


def _measured(
    bench: TransferBench, lanes: tuple[Stream, Stream]
) -> tuple[float, float, float, float, float, Slowdown, Slowdown, Slowdown]:
    """Return the rates of both directions, alone and at once, the latency, and the slowdown of each kind of kernel."""
    out, back = lanes
    out_gb_s, out_latency_us = _line(bench, out)
    back_gb_s, back_latency_us = _line(bench, back)
    return (
        out_gb_s,
        back_gb_s,
        min(out_gb_s, _rate(bench, out, (back,))),
        min(back_gb_s, _rate(bench, back, (out,))),
        max(out_latency_us, back_latency_us),
        _slowdown(bench, "streaming", lanes),
        _slowdown(bench, "cached", lanes),
        _slowdown(bench, "computing", lanes),
    )


def _beside(bench: TransferBench, lanes: Sequence[Stream], busy: Sequence[Stream]) -> float:
    """Return the ratio of copy times beside `busy` copies to those alone, in the direction that loses most."""
    return max(1.0, *(_rate(bench, lane, ALONE) / _rate(bench, lane, busy) for lane in lanes))


def _line(bench: TransferBench, direction: Stream) -> tuple[float, float]:
    """Return the rate in GB/s and the latency in microseconds of a line through the times of all sizes.

    The slope is the median of the slopes of all pairs of sizes (Sen, "Estimates of the regression coefficient based on
    Kendall's tau", 1968), each weighted by its difference in bytes. The latency is the median of the remaining times.
    """
    sizes = [size for size in SIZES_BYTES if size <= bench.most_bytes]
    times = [(size, bench.copies_us(direction, size, 1, ALONE)) for size in sizes]
    slopes = sorted(
        ((time - other) / (size - less), size - less) for (less, other), (size, time) in combinations(times, 2)
    )
    us_per_byte = _weighted_median(slopes)
    latency_us = statistics.median(time - size * us_per_byte for size, time in times)
    return 1e-3 / us_per_byte, max(0.0, latency_us)


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Return the weighted median of sorted (value, weight) pairs."""
    half = sum(weight for _, weight in values) / 2
    reached = 0
    for value, weight in values:
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no values")


def _rate(bench: TransferBench, direction: Stream, beside: Sequence[Stream]) -> float:
    """Return the rate in GB/s of copies one after another while `beside` is busy."""
    size = min(TIMED_BYTES[Space.PEER if direction in PEER_BOTH else Space.HOST], bench.most_bytes)
    count = max(1, round(TIMED_US / bench.copies_us(direction, size, 1, ALONE)))
    return count * size / (bench.copies_us(direction, size, count, beside) * 1e3)


def _slowdown(bench: TransferBench, kind: str, lanes: tuple[Stream, Stream]) -> Slowdown:
    count = max(1, round(TIMED_US / bench.kernels_us(kind, 1, ALONE)))
    ratios: dict[tuple[Stream, ...], list[float]] = {lanes[:1]: [], lanes[1:]: [], lanes: []}
    for _ in range(ROUNDS):
        for beside, values in ratios.items():
            alone_us = bench.kernels_us(kind, count, ALONE)
            values.append(bench.kernels_us(kind, count, beside) / alone_us)
    return Slowdown(*(max(1.0, statistics.median(values)) for values in ratios.values()))


@dataclass(frozen=True)
class _Lane:
    """One direction of copies: a stream for the copies that keep it busy, and memory at both ends.

    `device` and `outside` are memory of the timed copies, on the GPU and outside it; the `beside_` fields are memory of
    the copies that keep the direction busy.
    """

    stream: Any
    device: int
    outside: Outside
    beside_device: int
    beside_outside: Outside


class GpuTransfers:
    """The `TransferBench` of a real GPU."""

    def __init__(self, gpu: Gpu, kernels: Mapping[str, Work], lend: Callable[[int], int] | None = None) -> None:
        """Allocate the memory of the copies.

        Args:
            gpu: The GPU.
            kernels: Runs each kind of kernel once on the GPU's stream, for long enough that the CPU keeps up.
            lend: Returns the address of memory of another GPU, of the size in bytes that it is called with; None if
                copies to another GPU are not measured.

        Raises:
            DoesNotFit: Not even a copy of the smallest size fits the GPU's block.
        """
        self._gpu = gpu
        self._kernels = kernels
        takers = {BOTH: gpu.pinned} if lend is None else {BOTH: gpu.pinned, PEER_BOTH: lend}
        share = MOST_SHARE * sum(map(len, takers))
        fitting = [size for size in SIZES_BYTES if size * share <= gpu.left_bytes]
        if not fitting:
            raise DoesNotFit(f"{SIZES_BYTES[0] * share} bytes are needed, {gpu.left_bytes} are left")
        self.most_bytes = fitting[-1]
        self._beside_bytes = min(BESIDE_BYTES, self.most_bytes)
        self._lanes = {direction: self._lane(take) for lanes, take in takers.items() for direction in lanes}

    def _lane(self, take: Callable[[int], Outside]) -> _Lane:
        gpu = self._gpu
        return _Lane(
            gpu.new_stream(),
            gpu.take(self.most_bytes),
            take(self.most_bytes),
            gpu.take(self._beside_bytes),
            take(self._beside_bytes),
        )

    def copies_us(self, direction: Stream, size_bytes: int, count: int, beside: Sequence[Stream]) -> float:
        """Return the time of `count` copies while `beside` is busy, in microseconds."""
        lane = self._lanes[direction]

        def work() -> None:
            for _ in range(count):
                self._copy(direction, lane.device, lane.outside, size_bytes, None)

        return self._timed(work, beside)

    def kernels_us(self, kind: str, count: int, beside: Sequence[Stream]) -> float:
        """Return the time of `count` runs of a kernel while `beside` is busy, in microseconds."""
        launch = self._kernels[kind]

        def work() -> None:
            for _ in range(count):
                launch()

        return self._timed(work, beside)

    def _copy(self, direction: Stream, device: int, outside: Outside, size_bytes: int, stream: Any) -> None:
        gpu = self._gpu
        if isinstance(outside, int):
            target, source = (outside, device) if direction is Stream.TO_PEER else (device, outside)
            gpu.copy(target, source, size_bytes, stream)
        elif direction is Stream.TO_HOST:
            gpu.copy_to_host(outside[:size_bytes], device, stream)
        else:
            gpu.copy_to_device(device, outside[:size_bytes], stream)

    def _timed(self, work: Work, beside: Sequence[Stream]) -> float:
        time_us = self._median_us(work)
        lasting_us = 2 * (REPEATS + 1) * time_us
        for _ in range(MOST_TRIES if beside else 0):
            ends = [self._keep_busy(direction, lasting_us) for direction in beside]
            time_us = self._median_us(work)
            done = self._gpu.mark_time()
            for event in (done, *ends):
                event.synchronize()
            # If a concurrent copy ended before `done`, a part of the timed work may have run alone.
            if all(end.time_since(done) > 0 for end in ends):
                break
            lasting_us *= 2
        return time_us

    def _median_us(self, work: Work) -> float:
        # Queued behind one another, so that the times do not include the CPU's; at the first the GPU may be idle.
        return statistics.median(self._gpu.times_us(work, REPEATS + 1)[1:])

    def _keep_busy(self, direction: Stream, lasting_us: float) -> Any:
        """Enqueue copies that take at least `lasting_us`, and return the event after the last."""
        lane = self._lanes[direction]
        busy_gb_s = BUSY_GB_S[Space.PEER if direction in PEER_BOTH else Space.HOST]
        for _ in range(1 + round(lasting_us * busy_gb_s * 1e3 / self._beside_bytes)):
            self._copy(direction, lane.beside_device, lane.beside_outside, self._beside_bytes, lane.stream)
        return self._gpu.mark_time(lane.stream)

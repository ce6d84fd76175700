"""Measuring copies on a GPU that is simulated by a clock returns the simulated link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mbc.hardware.streams import Stream
from mbc.hardware.transfers import IN_STEP, HostLink, PeerLink, Slowdown, link_constants
from mbc.ir.types import Layout, Precision
from mbc.kernels.base import Request
from mbc.measure.gpu import DoesNotFit
from mbc.measure.host_copies import MIB, GpuTransfers, measure_link, measure_peer_link
from mbc.measure.offers import Offered
from tests.measure.test_harness import Kernels, Memory, bench_of, engine

TRUE = HostLink(
    50.0, 40.0, 35.0, 30.0, 8.0, Slowdown(1.02, 1.04, 1.08), Slowdown(1.1, 1.2, 1.4), Slowdown(1.0, 1.01, 1.02), True
)
TRUE_PEER = PeerLink(
    400.0, 380.0, 220.0, 210.0, 9.0, Slowdown(1.1, 1.12, 1.2), Slowdown(1.3, 1.3, 1.5), Slowdown(1.0, 1.0, 1.05), True,
    beside_host=1.25, host_beside=1.5,
)  # fmt: skip
LENT = 1 << 50  # from here on addresses are another GPU's
DIRECTIONS = ("to_host", "to_device")
KERNELS_US = {"streaming": 900.0, "cached": 500.0, "computing": 3000.0}


@dataclass
class Op:
    """A queued copy (with a `direction`) or kernel, with its remaining time if it runs alone."""

    what: Stream | str
    left_us: float


class Event:
    def __init__(self, at: Callable[[], float]) -> None:
        self._at = at

    def synchronize(self) -> None:
        self._at()

    def time_since(self, earlier: Event) -> float:
        return (self._at() - earlier._at()) / 1e3


class Line:
    """A simulated stream: its queued work, and the times at which each piece ended."""

    def __init__(self) -> None:
        self.queue: list[Op] = []
        self.ends_us: list[float] = []

    @property
    def running(self) -> Op | None:
        return self.queue[len(self.ends_us)] if len(self.ends_us) < len(self.queue) else None


class CopyingGpu(Memory):
    """A simulated GPU. Work of all streams begins when somebody waits; concurrent work slows down as the link says."""

    def __init__(self, link: HostLink = TRUE, size_bytes: int = 1 << 33) -> None:
        super().__init__(0)
        self._block_bytes = size_bytes
        self.link, self.pinned_bytes, self.lent_bytes = link, 0, 0
        self.own = Line()
        self.lines = [self.own]

    def pinned(self, size_bytes: int) -> np.ndarray:
        self.pinned_bytes += size_bytes
        return np.broadcast_to(np.uint8(0), (size_bytes,))

    def lend(self, size_bytes: int) -> int:
        self.lent_bytes += size_bytes
        return LENT + self.lent_bytes

    def new_stream(self) -> Line:
        self.lines.append(Line())
        return self.lines[-1]

    def mark_time(self, stream: Line | None = None) -> Event:
        line = stream or self.own
        place = len(line.queue)

        def at() -> float:
            self.run()
            return line.ends_us[place - 1] if place else 0.0

        return Event(at)

    def copy_to_host(self, target: np.ndarray, source: int, stream: Line | None = None) -> None:
        (stream or self.own).queue.append(Op(Stream.TO_HOST, self.alone_us(target.size, self.link.to_host_gb_s)))

    def copy_to_device(self, target: int, source: np.ndarray, stream: Line | None = None) -> None:
        (stream or self.own).queue.append(Op(Stream.TO_DEVICE, self.alone_us(source.size, self.link.to_device_gb_s)))

    def copy(self, target: int, source: int, size_bytes: int, stream: Line | None = None) -> None:
        direction = Stream.TO_PEER if target >= LENT else Stream.FROM_PEER
        assert (source >= LENT) is (direction is Stream.FROM_PEER)
        rate = TRUE_PEER.gb_s(direction) / IN_STEP
        (stream or self.own).queue.append(Op(direction, TRUE_PEER.latency_us + size_bytes / (rate * 1e3)))

    def alone_us(self, size_bytes: int, gb_s: float) -> float:
        return self.link.latency_us + size_bytes / (gb_s * 1e3)

    def launch(self, kind: str) -> None:
        self.own.queue.append(Op(kind, KERNELS_US[kind]))

    def times_us(self, work: Callable[[], None], count: int) -> list[float]:
        edges = [len(self.own.queue)]
        for _ in range(count):
            work()
            edges.append(len(self.own.queue))
        self.run(self.own)
        ends = [self.own.ends_us[edge - 1] if edge else 0.0 for edge in edges]
        return [after - before for before, after in pairwise(ends)]

    def run(self, until: Line | None = None) -> None:
        """Advance the clock until a stream, or every stream, has nothing left."""
        while any(line.running for line in ([until] if until else self.lines)):
            ops = [(line, line.running) for line in self.lines if line.running]
            factors = [self.factor(op.what, [other.what for _, other in ops]) for _, op in ops]
            step_us = min(op.left_us * factor for (_, op), factor in zip(ops, factors, strict=True))
            self.now_us += step_us
            for (line, op), factor in zip(ops, factors, strict=True):
                op.left_us -= step_us / factor
                if op.left_us < 1e-9:
                    line.ends_us.append(self.now_us)

    def factor(self, what: Stream | str, running: Sequence[Stream | str]) -> float:
        busy = {link: [direction in running for direction in link.directions] for link in (self.link, TRUE_PEER)}
        if isinstance(what, Stream):
            link, other = (TRUE_PEER, self.link) if what in TRUE_PEER.directions else (self.link, TRUE_PEER)
            beside = TRUE_PEER.beside_host if link is TRUE_PEER else TRUE_PEER.host_beside
            alone = link.gb_s(what) / link.gb_s(what, busy_both=all(busy[link]))
            return alone * (beside if all(busy[other]) else 1.0)
        factor = 1.0
        for link, (out, back) in busy.items():
            slowdown = getattr(link, what)
            factor *= (slowdown.both if back else slowdown.out) if out else slowdown.back if back else 1
        return factor


def measured(gpu: CopyingGpu) -> HostLink:
    return measure_link(GpuTransfers(gpu, {kind: lambda kind=kind: gpu.launch(kind) for kind in KERNELS_US}))


def rates(link: HostLink) -> tuple[float, ...]:
    return link.to_host_gb_s, link.to_device_gb_s, link.to_host_both_gb_s, link.to_device_both_gb_s


def test_the_whole_link_is_found() -> None:
    link = measured(CopyingGpu())
    assert rates(link) == pytest.approx(rates(TRUE), rel=0.01)
    assert link.latency_us == pytest.approx(TRUE.latency_us, rel=0.01)
    for kind in KERNELS_US:
        one, other = getattr(link, kind), getattr(TRUE, kind)
        assert (one.out, one.back, one.both) == pytest.approx((other.out, other.back, other.both))
    assert link.measured


def test_the_peer_link_and_the_contention_of_both_links_are_measured() -> None:
    gpu = CopyingGpu()
    kernels = {kind: lambda kind=kind: gpu.launch(kind) for kind in KERNELS_US}
    link = measure_peer_link(GpuTransfers(gpu, kernels, gpu.lend))
    for name, value in link_constants(TRUE_PEER).items():
        assert link_constants(link)[name] == pytest.approx(value, rel=0.02), name
    assert link.measured and 0 < gpu.lent_bytes <= gpu.mark()


@pytest.mark.parametrize("size_bytes", [1 << 33, 1 << 30, 64 * MIB])
def test_a_small_gpu_gives_all_its_blocks(size_bytes: int) -> None:
    gpu = CopyingGpu(size_bytes=size_bytes)
    assert rates(measured(gpu)) == pytest.approx(rates(TRUE), rel=0.03)  # shorter copies, for which latency counts
    assert 0 < gpu.mark() <= size_bytes and gpu.pinned_bytes <= size_bytes / 2 + 128 * MIB
    with pytest.raises(DoesNotFit, match="needed"):
        measured(CopyingGpu(size_bytes=MIB))


def test_small_copies_that_take_long_do_not_bend_the_rate() -> None:
    class Stumbling(CopyingGpu):
        def copy_to_host(self, target: np.ndarray, source: int, stream: Line | None = None) -> None:
            super().copy_to_host(target, source, stream)
            if target.size <= 4 * MIB:
                (stream or self.own).queue[-1].left_us *= 3

    link = measured(Stumbling())
    assert link.to_host_gb_s == pytest.approx(TRUE.to_host_gb_s, rel=0.01)


def test_the_concurrent_kernel_runs_until_the_end() -> None:
    """On a bus faster than any real one, the concurrent kernel must be lengthened until it outlasts the copy."""
    both, alone = {f"{to}_both_gb_s": 400.0 for to in DIRECTIONS}, {f"{to}_gb_s": 800.0 for to in DIRECTIONS}
    fast = replace(TRUE, latency_us=0.0, **both, **alone)
    assert rates(measured(CopyingGpu(fast))) == pytest.approx(rates(fast), rel=0.02)


@pytest.mark.parametrize(
    ("layout", "computing"), [(Layout.CHANNELS_LAST, "convolution"), (Layout.CHANNELS_FIRST, "linear")]
)
def test_a_bench_measures_with_kernels_of_three_kinds(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, computing: str
) -> None:
    """A GEMM takes the convolution's place if there is no engine for channels last."""

    def offers(gpu: object, request: Request, limit_bytes: int) -> Offered:
        return Offered((engine(request, layout),))

    monkeypatch.setattr("mbc.measure.workbench.WARM_SIDE", 8)
    monkeypatch.setattr("mbc.measure.workbench.offers", offers)
    gpu = Memory(1 << 29)
    kernels = Kernels(gpu)
    seen: dict[str, tuple[int, ...]] = {}

    def measure(bench: SimpleNamespace) -> HostLink:
        for launch in bench.kernels.values():
            before = len(kernels.prepared)
            launch()
            assert len(kernels.prepared) == before, "nothing is prepared while it is timed"
        seen.update({request.kind: () for _, request, _, _ in kernels.prepared})
        return TRUE

    monkeypatch.setattr("mbc.measure.workbench.GpuTransfers", lambda gpu, kernels: SimpleNamespace(kernels=kernels))
    monkeypatch.setattr("mbc.measure.workbench.measure_link", measure)
    monkeypatch.setattr("mbc.measure.workbench.Graph", graph_of)
    monkeypatch.setattr("mbc.measure.clock.Graph", graph_of)
    bench = bench_of(gpu, kernels)
    assert bench.host_link(Precision.FP32) == TRUE
    assert set(seen) == {"scale", computing} and gpu.mark() == 0
    sizes = [request.inputs[0].size_bytes for _, request, _, _ in kernels.prepared if request.kind == "scale"]
    assert sizes[0] > 2 * gpu.l2_bytes and 2 * sizes[1] < gpu.l2_bytes


def graph_of(gpu: Memory, body: Callable[[], None]) -> SimpleNamespace:
    return SimpleNamespace(launch=body, close=lambda: None)

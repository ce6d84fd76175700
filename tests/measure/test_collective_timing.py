"""Collectives measured on a GPU that is simulated with a clock.

The measured times equal those of the simulation, and every rank decides by figures that all ranks agree on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mbc.hardware.collective_times import CollectiveKind, ConcurrentKernel, Link
from mbc.measure.collective_harness import GpuCollectives, urgent_stream
from mbc.measure.collective_timing import MIB, SIZES_BYTES, measure_slowdowns, measure_times, sized
from mbc.measure.gpu import Graph
from mbc.runtime.nccl_library import Reduction

MAIN, URGENT = 1, 2
KERNEL_RATIO, COLLECTIVE_RATIO = 1.25, 1.5  # where both run
KERNELS_US = {ConcurrentKernel.CONVOLUTION: 250.0, ConcurrentKernel.GEMM: 900.0, ConcurrentKernel.ELEMENTWISE: 400.0,
              ConcurrentKernel.REDUCTION: 300.0}  # fmt: skip
WORD, BUFFER = 0x100, 0x1000


def true_us(size_bytes: int) -> float:
    return 8.0 + size_bytes / 150e3


class ClockGpu:
    """The driver's calls on two streams, simulated with a clock.

    Queued work begins when the caller asks for its progress. Work that runs on both streams at once takes longer.
    """

    def __init__(self) -> None:
        self.stream_handle = ctypes.c_void_p(MAIN)
        self.now_us = 0.0
        self.queues: dict[int, list[float]] = {MAIN: [], URGENT: []}  # microseconds alone
        self.ends: dict[int, list[float]] = {MAIN: [], URGENT: []}
        self.captured: list[float] | None = None
        self.capturing = 0
        self.graphs: dict[int, list[float]] = {}
        self.events: dict[int, tuple[int, int]] = {}
        self.word = np.zeros(1, np.float32)
        self.number = 100

    def enqueue(self, stream: int, time_us: float) -> None:
        if self.captured is not None:
            assert stream == self.capturing
            self.captured.append(time_us)
        else:
            self.queues[stream].append(time_us)

    def upload(self, address: int, data: Any) -> None:
        assert address == WORD and self.captured is None
        self.word = data.view(np.float32).copy()

    def download(self, address: int, size_bytes: int) -> Any:
        return self.word.view(np.uint8)

    def driver_status(self, function: str, *arguments: Any) -> int:
        getattr(self, function)(*arguments)
        return 0

    driver_call = driver_status

    def _new(self, out: Any) -> int:
        self.number += 1
        out._obj.value = self.number
        return self.number

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> None:
        least._obj.value, greatest._obj.value = 0, -5

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: Any) -> None:
        assert flags == 1 and priority.value == -5
        stream._obj.value = URGENT

    def cuStreamDestroy_v2(self, stream: Any) -> None:
        assert not self.graphs, "graphs that are not destroyed"

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> None:
        self.captured, self.capturing = [], stream.value

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> None:
        assert stream.value == self.capturing and self.captured is not None
        self.graphs[self._new(graph)] = self.captured
        self.captured = None

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> None:
        self.graphs[self._new(executable)] = self.graphs[graph.value]

    def cuGraphDestroy(self, graph: Any) -> None:
        del self.graphs[graph.value]

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphLaunch(self, executable: Any, stream: Any) -> None:
        self.queues[stream.value] += self.graphs[executable.value]

    def cuEventCreate(self, event: Any, flags: int) -> None:
        self._new(event)

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self.events[event.value] = stream.value, len(self.queues[stream.value])

    def cuEventQuery(self, event: Any) -> None:
        self.run()

    def cuEventElapsedTime(self, milliseconds: Any, start: Any, stop: Any) -> None:
        milliseconds._obj.value = (self._at(stop.value) - self._at(start.value)) / 1e3

    def cuEventDestroy_v2(self, event: Any) -> None:
        self.events.pop(event.value, None)

    def _at(self, event: int) -> float:
        stream, place = self.events[event]
        return self.ends[stream][place - 1] if place else 0.0

    def run(self) -> None:
        left = dict.fromkeys(self.queues, 0.0)
        while running := [s for s in self.queues if len(self.ends[s]) < len(self.queues[s])]:
            for s in running:
                left[s] = left[s] or self.queues[s][len(self.ends[s])]
            factor = {MAIN: KERNEL_RATIO, URGENT: COLLECTIVE_RATIO} if len(running) == 2 else dict.fromkeys(left, 1.0)
            step_us = min(left[s] * factor[s] for s in running)
            self.now_us += step_us
            for s in running:
                left[s] -= step_us / factor[s]
                if left[s] < 1e-6:
                    left[s] = 0.0
                    self.ends[s].append(self.now_us)


class ClockCommunicator:
    """Rank 0 of two; the other rank always answers `other`."""

    size, rank = 2, 0

    def __init__(self, gpu: ClockGpu, other: float = 0.0) -> None:
        self.gpu, self.other, self.agreed = gpu, other, 0

    def all_reduce(self, address: int, count: int, stream: int, by: Reduction = Reduction.SUM) -> None:
        if by is Reduction.MAX:
            assert (address, count) == (WORD, 1)
            self.agreed += 1
            self.gpu.word = np.maximum(self.gpu.word, np.float32(self.other))
        self.gpu.enqueue(stream, true_us(count * 4))

    def reduce_scatter(self, address: int, count: int, stream: int) -> None:
        self.gpu.enqueue(stream, true_us(count * 4 * self.size) / 2)

    def all_gather(self, address: int, count: int, stream: int) -> None:
        self.gpu.enqueue(stream, true_us(count * 4 * self.size) / 4)

    def all_to_all(self, address: object, to: object, count: int, stream: int) -> None:
        self.gpu.enqueue(stream, true_us(count * 4 * self.size) / 2)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        assert done()


@pytest.fixture
def opened() -> Any:
    gpu: Any = ClockGpu()
    graphs: list[Graph] = []
    with urgent_stream(gpu) as stream:
        for us in KERNELS_US.values():
            graphs.append(Graph(gpu, lambda us=us: gpu.enqueue(MAIN, us)))
        kernels = dict(zip(KERNELS_US, graphs, strict=True))
        communicator: Any = ClockCommunicator(gpu)
        with GpuCollectives(gpu, communicator, stream, kernels, BUFFER, WORD) as bench:
            yield bench, communicator
        for graph in graphs:
            graph.close()


def test_times_are_those_of_the_clock(opened: Any):
    bench, _ = opened
    notes: list[str] = []
    times = measure_times(bench, Link.NVLINK, 8, SIZES_BYTES, notes.append)
    assert len(times) == 3 * len(SIZES_BYTES) and len(notes) == 3
    part = {CollectiveKind.ALL_REDUCE: 1, CollectiveKind.REDUCE_SCATTER: 2, CollectiveKind.ALL_GATHER: 4}
    for t in times:
        assert (t.ranks, t.link, t.max_ctas) == (2, Link.NVLINK, 8)
        expected = true_us(t.size_bytes) / part[t.kind]
        assert t.time_us == pytest.approx(expected, rel=1e-3) and t.single_us == pytest.approx(expected, rel=1e-3)
    assert {t.size_bytes for t in times if t.kind is CollectiveKind.ALL_REDUCE} == set(SIZES_BYTES)


def test_slowdowns_are_those_of_the_clock(opened: Any):
    bench, _ = opened
    slowdowns = measure_slowdowns(bench, Link.NVLINK, 8, lambda text: None)
    assert [s.kernel for s in slowdowns] == list(ConcurrentKernel)
    for s in slowdowns:
        assert s.kernel_ratio == pytest.approx(KERNEL_RATIO, rel=0.01)
        assert s.collective_ratio == pytest.approx(COLLECTIVE_RATIO, rel=0.01)


def test_the_slowest_rank_decides(opened: Any):
    bench, communicator = opened
    assert bench.agree(3.0) == 3.0
    communicator.other = 5000.0
    assert bench.agree(3.0) == 5000.0
    times = measure_times(bench, Link.NVLINK, 8, (4,), lambda text: None)
    assert all(t.time_us == t.single_us == 5000.0 for t in times)


def test_divisions_among_ranks():
    reduce, scatter = CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER
    assert [sized(reduce, 4, 2), sized(scatter, 4, 2), sized(scatter, MIB, 2)] == [4, 8, MIB]
    assert sized(scatter, 1024, 3) == 1020

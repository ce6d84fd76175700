"""The bench for collectives on a real GPU: one rank's communicator, and kernels on the GPU's own stream.

Collectives run on a separate stream of the highest priority, so that their blocks need not queue behind those of a
kernel that fills all multiprocessors. The measurements are valid for plans that do this, too.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np

from mbc.hardware.collective_times import CollectiveKind, ConcurrentKernel
from mbc.measure.collective_timing import CONCURRENT_BYTES, ELEMENT_BYTES, MOST_IN_A_ROW, ROW_US
from mbc.measure.gpu import Gpu, Graph
from mbc.runtime.communicator import Communicator, Reduction

REPEATS = 5  # repetitions of each timing, after one that is left out
SINGLES = 11  # repetitions of a single collective, whose times vary more
MOST_TRIES = 4  # attempts to keep the other stream busy for longer than the timed work
WAIT_S = 30.0  # longest wait for other ranks, and for the GPU
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
Work = Callable[[], None]


class Mark:
    """An event on any stream."""

    def __init__(self, gpu: Gpu, stream: ctypes.c_void_p) -> None:
        """Record an event on `stream`."""
        self._gpu, self._event = gpu, ctypes.c_void_p()
        gpu.driver_call("cuEventCreate", ctypes.byref(self._event), 0)
        gpu.driver_call("cuEventRecord", self._event, stream)

    def passed(self) -> bool:
        """Return whether the stream has reached the event."""
        return self._gpu.driver_status("cuEventQuery", self._event) == 0

    def us_since(self, earlier: Mark) -> float:
        """Return the microseconds between two events that the stream has reached."""
        milliseconds = ctypes.c_float()
        self._gpu.driver_call("cuEventElapsedTime", ctypes.byref(milliseconds), earlier._event, self._event)
        return milliseconds.value * 1e3

    def __del__(self) -> None:
        """Destroy the event."""
        self._gpu.driver_status("cuEventDestroy_v2", self._event)


@contextmanager
def urgent_stream(gpu: Gpu) -> Generator[ctypes.c_void_p]:
    """Yield a stream of the highest priority."""
    least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    gpu.driver_call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    gpu.driver_call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest)
    try:
        yield stream
    finally:
        gpu.driver_status("cuStreamDestroy_v2", stream)


class GpuCollectives:
    """The `CollectiveBench` of a real GPU.

    Use as a context manager: it destroys its graphs, which must be gone before the communicator is closed.
    """

    def __init__(
        self, gpu: Gpu, communicator: Communicator, stream: ctypes.c_void_p, kernels: Mapping[ConcurrentKernel, Graph],
        address: int, word: int, parts: int | None = None,
    ) -> None:  # fmt: skip
        """Prepare graphs, and measure the times of one unit of work of each kind.

        Args:
            gpu: The GPU of this rank.
            communicator: The communicator of all ranks.
            stream: The stream of the collectives.
            kernels: Graphs of kernels on the GPU's own stream.
            address: Memory of the longest collective.
            word: Memory of one element, which the ranks use to agree on a value.
            parts: Memory as large as `address`, which receives the copies where copy engines move the data and no
                kernel sums; None if kernels sum.
        """
        self._gpu, self._communicator, self._stream = gpu, communicator, stream
        self._kernels, self._address, self._word, self._parts = kernels, address, word, parts
        self.ranks = communicator.size
        self._closing = ExitStack()
        self._meeting = self._closing.enter_context(self._graph(lambda: self._reduce_word(Reduction.SUM)))
        once_us = self.agree(self.single_us(CollectiveKind.ALL_REDUCE, CONCURRENT_BYTES))
        reduces = max(1, min(MOST_IN_A_ROW, round(ROW_US / once_us)))
        self._reduces = self._closing.enter_context(
            self._collectives(CollectiveKind.ALL_REDUCE, CONCURRENT_BYTES, reduces)
        )
        self._unit_us: dict[ConcurrentKernel | None, float] = {
            kernel: self.agree(self._median_us(graph.launch, gpu.stream_handle)) for kernel, graph in kernels.items()
        }
        self._unit_us[None] = self.agree(self._median_us(self._reduces.launch, stream))

    def __enter__(self) -> GpuCollectives:
        """Return this bench."""
        return self

    def __exit__(self, *_: object) -> None:
        """Destroy the graphs."""
        self._closing.close()

    def agree(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        self._gpu.upload(self._word, np.array([value], np.float32).view(np.uint8))
        self._reduce_word(Reduction.MAX)
        self._wait(Mark(self._gpu, self._stream))
        return float(self._gpu.download(self._word, ELEMENT_BYTES).view(np.float32)[0])

    def single_us(self, kind: CollectiveKind, size_bytes: int) -> float:
        """Return the median time of one collective right after the ranks have met, in microseconds."""
        gpu, stream = self._gpu, self._stream
        times: list[tuple[Mark, Mark]] = []
        with self._collectives(kind, size_bytes, 1) as graph:
            for _ in range(SINGLES + 1):
                self._meeting.launch()
                start = Mark(gpu, stream)
                graph.launch()
                times.append((start, Mark(gpu, stream)))
            self._wait(times[-1][1])
        return statistics.median(stop.us_since(start) for start, stop in times[1:])

    def row_us(self, kind: CollectiveKind, size_bytes: int, count: int) -> float:
        """Return the time of one of `count` collectives that run one after another, in microseconds."""
        with self._collectives(kind, size_bytes, count) as graph:
            return self._median_us(graph.launch, self._stream) / count

    def kernels_us(self, kernel: ConcurrentKernel, count: int, beside: bool) -> float:
        """Return the time of `count` runs of a kernel, alone or beside all-reduces, in microseconds."""
        work = _repeated(self._kernels[kernel].launch, count)
        return self._timed(work, self._gpu.stream_handle, self._reduces.launch if beside else None, None, self._stream)

    def all_reduces_us(self, count: int, beside: ConcurrentKernel | None) -> float:
        """Return the time of `count` all-reduces, alone or beside kernels of one kind, in microseconds."""
        busy = self._kernels[beside].launch if beside is not None else None
        return self._timed(
            _repeated(self._reduces.launch, count), self._stream, busy, beside, self._gpu.stream_handle
        )  # fmt: skip

    def _timed(
        self,
        work: Work,
        stream: ctypes.c_void_p,
        busy: Work | None,
        unit: ConcurrentKernel | None,
        other: ctypes.c_void_p,
    ) -> float:
        """Return the median time of `work` on its stream while `busy` fills the `other` stream.

        `busy` starts before `work` and ends after it, on every rank. `unit` names the work whose time alone is that of
        one `busy`.
        """
        time_us = self.agree(self._median_us(work, stream))
        lasting_us = 2 * (REPEATS + 1) * time_us
        for _ in range(MOST_TRIES if busy is not None else 0):
            assert busy is not None
            _repeated(busy, 1 + round(lasting_us / self._unit_us[unit]))()
            end = Mark(self._gpu, other)
            own_us = self._median_us(work, stream)
            done = Mark(self._gpu, stream)
            self._wait(done, end)
            time_us = self.agree(own_us)
            # If the busy work of some rank ended before `done`, a part of the timed work may have run alone.
            if not self.agree(float(end.us_since(done) <= 0)):
                break
            lasting_us *= 2
        return time_us

    def _median_us(self, work: Work, stream: ctypes.c_void_p) -> float:
        """Return the median time of `work`, in microseconds.

        The runs are queued behind one another, so that the times do not include the CPU's. The first run is left out:
        the GPU may have been idle.
        """
        marks = [Mark(self._gpu, stream)]
        for _ in range(REPEATS + 1):
            work()
            marks.append(Mark(self._gpu, stream))
        self._wait(marks[-1])
        return statistics.median(b.us_since(a) for a, b in pairwise(marks[1:]))

    def _wait(self, *marks: Mark) -> None:
        """Wait for all `marks`; raise MBC272 or MBC273 if a rank has died or does not answer."""
        self._communicator.wait(lambda: all(mark.passed() for mark in marks), WAIT_S)

    def _reduce_word(self, by: Reduction) -> None:
        self._communicator.all_reduce(self._word, 1, self._stream.value or 0, by=by)

    @contextmanager
    def _collectives(self, kind: CollectiveKind, size_bytes: int, count: int) -> Generator[Graph]:
        """Yield a graph of `count` collectives in place.

        The collective runs once before: NCCL connects at the first call, which must not happen within a capture.
        """
        enqueue = self._enqueue(kind, size_bytes // ELEMENT_BYTES)
        enqueue()
        self._wait(Mark(self._gpu, self._stream))
        with self._graph(_repeated(enqueue, count)) as graph:
            yield graph

    def _enqueue(self, kind: CollectiveKind, elements: int) -> Work:
        stream, call, address, parts = self._stream.value or 0, self._communicator, self._address, self._parts
        part = max(1, elements // self.ranks)

        def gather() -> None:
            call.all_gather(address, part, stream)

        if kind is CollectiveKind.ALL_GATHER:
            return gather
        if parts is None:
            if kind is CollectiveKind.ALL_REDUCE:
                return lambda: call.all_reduce(address, elements, stream)
            return lambda: call.reduce_scatter(address, part, stream)

        def copy() -> None:
            call.all_to_all(address, parts, part, stream)
            if kind is CollectiveKind.ALL_REDUCE:
                gather()

        return copy

    @contextmanager
    def _graph(self, body: Work) -> Generator[Graph]:
        graph = Graph(self._gpu, body, self._stream)
        try:
            yield graph
        finally:
            graph.close()


def _repeated(work: Work, count: int) -> Work:
    def repeat() -> None:
        for _ in range(count):
            work()

    return repeat

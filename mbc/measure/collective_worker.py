"""The process of one rank that measures collectives, for `mbc.measure.collective_fleet`: a task comes in by stdin, then
the communicators' unique ids; messages go out by stdout."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.collectives import ConcurrentKernel
from mbc.ir.types import Precision
from mbc.kernels.nccl import BY_COPIES
from mbc.measure.collective_fleet import CollectiveTask, Measured
from mbc.measure.collective_harness import WAIT_S, GpuCollectives, Mark, urgent_stream
from mbc.measure.collectives import CONCURRENT_BYTES, ELEMENT_BYTES, measure_slowdowns, measure_times
from mbc.measure.gpu import DoesNotFit, Gpu, Graph
from mbc.measure.kernel_library import KernelLibrary
from mbc.measure.processes import received, speaker
from mbc.measure.workbench import Bench
from mbc.profile.model import Overhead, collective_subject
from mbc.runtime.nccl import Communicator, SymmetricMemory, connect, load_nccl
from mbc.runtime.nccl_library import Nccl, version_text
from mbc.units import show_size

MEMORY_SHARE = 0.5  # of what is free: the rest is for NCCL
SETTLED_S, MOST_READINGS = 0.05, 40  # between two readings of the free memory, until it changes no more
Say = Callable[[object], None]


def serve(work: Callable[[Any, Say, Callable[[], Any]], None]) -> None:
    """Do the one task; whoever started this ends it by SIGKILL."""
    say = speaker()
    try:
        work(received(), say, received)
    except MbcError as error:
        say(("error", MbcError(error.code, error.message, error.remedy)))
    except DoesNotFit as error:
        say(("error", MbcError("MBC275", f"memory to measure with is missing: {error}", "end what else uses the GPUs")))
    except (BrokenPipeError, EOFError):
        pass  # nobody listens any more


def measure(task: CollectiveTask, say: Say, receive: Callable[[], Any]) -> None:
    """All communicators of a task, one after another: each has its own number of thread blocks."""

    def open_library(gpu: Gpu, precision: Precision) -> KernelLibrary:
        return KernelLibrary(Path(task.library), gpu.stream_handle.value or 0)

    with (
        Gpu(MEMORY_SHARE) as gpu,
        urgent_stream(gpu) as stream,
        Bench(gpu, open_library) as bench,
        bench.kernels_for_collectives(task.precision) as kernels,
    ):
        nccl = load_nccl()
        rank = _Rank(task, say, nccl, gpu, stream, kernels)
        rank.tell(f"{task.ranks} GPUs over {task.link}, NCCL {version_text(nccl.version)}")
        bench.warm(task.precision)
        if task.rank == 0:
            say(("identity", bench.identity()))
            say(("ids", tuple(nccl.unique_id() for _ in task.max_ctas)))
        for max_ctas, unique_id in zip(task.max_ctas, receive(), strict=True):
            if max_ctas != BY_COPIES or nccl.has_copies:
                rank.measure(max_ctas, unique_id)
            else:
                rank.tell(f"NCCL {version_text(nccl.version)} has no collectives by copy engines")


class _Rank:
    def __init__(
        self, task: CollectiveTask, say: Say, nccl: Nccl, gpu: Gpu, stream: ctypes.c_void_p,
        kernels: Mapping[ConcurrentKernel, Graph],
    ) -> None:  # fmt: skip
        self._task, self._say, self._nccl = task, say, nccl
        self._gpu, self._stream, self._kernels = gpu, stream, kernels
        self._address, self._word = gpu.take(max(task.sizes_bytes)), gpu.take(ELEMENT_BYTES)
        gpu.fill(self._address, 0, max(task.sizes_bytes))
        # Before the first communicator: what stays loaded of NCCL counts for each.
        self._free_bytes = _free_bytes(gpu)

    def tell(self, text: str) -> None:
        if self._task.rank == 0:
            self._say(("note", text))

    def measure(self, max_ctas: int, unique_id: bytes) -> None:
        """One communicator, and what was measured of it."""
        communicator = Communicator(self._nccl, unique_id, self._task.rank, self._task.ranks, max_ctas, WAIT_S)
        own: list[SymmetricMemory] = []  # which only copies need
        found: Measured | None = None
        try:
            if max_ctas == BY_COPIES and not self._registered(communicator, own):
                self.tell("these GPUs do not reach each other's memory: no collectives by copy engines")
            else:
                found = self._measured(communicator, max_ctas, own)
        except BaseException:
            communicator.abort()  # closing the GPU waits for it, and it for the other ranks
            raise
        communicator.close()
        for memory in own:
            memory.free()
        if found is not None and self._task.rank == 0:
            self._say(("rows", found))

    def _registered(self, communicator: Communicator, own: list[SymmetricMemory]) -> bool:
        """Adds what collectives by copies work in, and between: registered with the communicator, if that can be."""
        size_bytes = max(*self._task.sizes_bytes, CONCURRENT_BYTES)
        own += (SymmetricMemory(self._nccl, size_bytes), SymmetricMemory(self._nccl, size_bytes))
        registered = [communicator.register(memory, size_bytes) for memory in own]  # each is a collective call
        return all(registered)

    def _measured(self, communicator: Communicator, max_ctas: int, own: Sequence[SymmetricMemory]) -> Measured:
        task, gpu, stream = self._task, self._gpu, self._stream
        address, parts = own or (self._address, None)
        own_bytes = sum(memory.size_bytes for memory in own)
        connect(communicator, address, task.sizes_bytes, stream.value or 0)
        communicator.wait(Mark(gpu, stream).passed, WAIT_S)
        taken_bytes = self._taken_bytes() - own_bytes
        how = f"{max_ctas} thread blocks" if max_ctas != BY_COPIES else "copy engines"
        self.tell(f"{how}: connected, NCCL takes {show_size(taken_bytes)} of the GPU's memory")
        with GpuCollectives(gpu, communicator, stream, self._kernels, address, self._word, parts) as bench:
            times = measure_times(bench, task.link, max_ctas, task.sizes_bytes, self.tell)
            slowdowns = measure_slowdowns(bench, task.link, max_ctas, self.tell)
            # With graphs that hold collectives, for which NCCL may register memory.
            taken_bytes = max(taken_bytes, self._taken_bytes() - own_bytes)
        memory = Overhead("collectives", collective_subject(task.ranks, max_ctas), taken_bytes)
        return Measured(tuple(times), tuple(slowdowns), (memory,))

    def _taken_bytes(self) -> int:
        return max(0, self._free_bytes - _free_bytes(self._gpu))


def _free_bytes(gpu: Gpu) -> int:
    """Once it has settled: a communicator that was closed gives its memory back in a thread of its own."""
    found = -1
    for _ in range(MOST_READINGS):
        before, found = found, int(gpu.driver.mem_get_info()[0])
        if before == found:
            break
        time.sleep(SETTLED_S)
    return found


if __name__ == "__main__":
    serve(measure)

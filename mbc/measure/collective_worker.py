"""The process of one rank that `mbc.measure.collective_fleet` starts to measure collectives."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mbc.hardware.collective_times import ConcurrentKernel
from mbc.ir.types import Precision
from mbc.kernels.nccl import BY_COPIES
from mbc.measure.collective_fleet import CollectiveTask, Measured
from mbc.measure.collective_harness import WAIT_S, GpuCollectives, Mark, urgent_stream
from mbc.measure.collective_timing import CONCURRENT_BYTES, ELEMENT_BYTES, measure_slowdowns, measure_times
from mbc.measure.gpu import Gpu, Graph
from mbc.measure.gpu_processes import Say, serve
from mbc.measure.kernel_library import KernelLibrary
from mbc.measure.workbench import Bench
from mbc.profile.model import Overhead, collective_subject
from mbc.runtime.communicator import Communicator, SymmetricMemory, connect, load_nccl
from mbc.runtime.nccl_library import Nccl, version_text
from mbc.units import show_size

MEMORY_SHARE = 0.5  # of the free memory; the rest is for NCCL
SETTLED_S, MOST_READINGS = 0.05, 40  # time between readings of the free memory, and their largest number


def measure(task: CollectiveTask, say: Say) -> Generator[Any, tuple[int, bytes]]:
    """Yield the first rank's identity and ids, then the results of one communicator after another.

    The first rank yields its identity and a unique id for each communicator. A later task is the number of thread
    blocks of a communicator, and its id.
    """

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
        communicator = yield (
            (bench.identity(), tuple(nccl.unique_id() for _ in task.max_ctas)) if task.rank == 0 else None
        )
        while True:
            communicator = yield rank.measured(*communicator)


class _Rank:
    def __init__(
        self, task: CollectiveTask, say: Say, nccl: Nccl, gpu: Gpu, stream: ctypes.c_void_p,
        kernels: Mapping[ConcurrentKernel, Graph],
    ) -> None:  # fmt: skip
        self._task, self._say, self._nccl = task, say, nccl
        self._gpu, self._stream, self._kernels = gpu, stream, kernels
        self._address, self._word = gpu.take(max(task.sizes_bytes)), gpu.take(ELEMENT_BYTES)
        gpu.fill(self._address, 0, max(task.sizes_bytes))
        # Before the first communicator: the parts of NCCL that stay loaded count for each communicator.
        self._free_bytes = _free_bytes(gpu)

    def tell(self, text: str) -> None:
        if self._task.rank == 0:
            self._say(text)

    def measured(self, max_ctas: int, unique_id: bytes) -> Measured:
        """Return the results of one communicator; they are empty for copy engines that cannot be used."""
        if max_ctas == BY_COPIES and not self._nccl.has_copies:
            self.tell(f"NCCL {version_text(self._nccl.version)} has no collectives by copy engines")
            return Measured()
        communicator = Communicator(self._nccl, unique_id, self._task.rank, self._task.ranks, max_ctas, WAIT_S)
        own: list[SymmetricMemory] = []  # buffers that only collectives by copy engines need
        results = Measured()
        try:
            if max_ctas == BY_COPIES and not self._registered(communicator, own):
                self.tell("these GPUs cannot access each other's memory: no collectives by copy engines")
            else:
                results = self._measured_on(communicator, max_ctas, own)
        except BaseException:
            communicator.abort()  # otherwise closing the GPU would wait for the other ranks
            raise
        communicator.close()
        for memory in own:
            memory.free()
        return results

    def _registered(self, communicator: Communicator, own: list[SymmetricMemory]) -> bool:
        """Add to `own` the two buffers of collectives by copy engines, and return whether both could be registered."""
        size_bytes = max(*self._task.sizes_bytes, CONCURRENT_BYTES)
        own += (SymmetricMemory(self._nccl, size_bytes), SymmetricMemory(self._nccl, size_bytes))
        registered = [communicator.register(memory, size_bytes) for memory in own]  # each is a collective call
        return all(registered)

    def _measured_on(self, communicator: Communicator, max_ctas: int, own: Sequence[SymmetricMemory]) -> Measured:
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
            # Measured again, because NCCL may register memory for collectives in graphs.
            taken_bytes = max(taken_bytes, self._taken_bytes() - own_bytes)
        memory = Overhead("collectives", collective_subject(task.ranks, max_ctas), taken_bytes)
        return Measured(tuple(times), tuple(slowdowns), (memory,))

    def _taken_bytes(self) -> int:
        return max(0, self._free_bytes - _free_bytes(self._gpu))


def _free_bytes(gpu: Gpu) -> int:
    """Return the free bytes of the GPU once they no longer change.

    A closed communicator frees its memory in a separate thread.
    """
    free_bytes = -1
    for _ in range(MOST_READINGS):
        before, free_bytes = free_bytes, int(gpu.driver.mem_get_info()[0])
        if before == free_bytes:
            break
        time.sleep(SETTLED_S)
    return free_bytes


if __name__ == "__main__":
    serve(measure)

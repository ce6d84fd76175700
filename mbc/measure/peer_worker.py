"""The process that `mbc.measure.peer_fleet` starts to measure copies between two GPUs."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from mbc.ir.types import Precision
from mbc.measure.gpu import Gpu
from mbc.measure.gpu_processes import Say, serve
from mbc.measure.kernel_library import KernelLibrary
from mbc.measure.peer_fleet import PeerTask
from mbc.measure.workbench import Bench

MEMORY_SHARE = 0.25  # of the free memory; copies have at most 512 MiB


def measure(task: PeerTask, say: Say) -> Generator[object]:
    """Yield the GPU's identity with the link to the host, then with the link to the other GPU, which may not exist."""

    def open_library(gpu: Gpu, precision: Precision) -> KernelLibrary:
        return KernelLibrary(Path(task.library), gpu.stream_handle.value or 0)

    with Gpu(MEMORY_SHARE) as gpu, Bench(gpu, open_library) as bench:
        bench.warm(task.precision)
        for link in (bench.host_link, bench.peer_link):
            yield bench.identity(), link(task.precision)


if __name__ == "__main__":
    serve(measure)

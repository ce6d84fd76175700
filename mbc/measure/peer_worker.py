"""The process that `mbc.measure.peer_fleet` starts to measure copies between two GPUs.

It receives a task by stdin and sends links by stdout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.measure.collective_worker import serve
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.measure.kernel_library import KernelLibrary
from mbc.measure.peer_fleet import PeerTask
from mbc.measure.workbench import Bench

MEMORY_SHARE = 0.25  # of the free memory; copies have at most 512 MiB


def measure(task: PeerTask, say: Callable[[object], None], receive: Callable[[], Any]) -> None:
    """Measure the link to the host, then that to the other GPU, which may not exist."""

    def open_library(gpu: Gpu, precision: Precision) -> KernelLibrary:
        return KernelLibrary(Path(task.library), gpu.stream_handle.value or 0)

    with Gpu(MEMORY_SHARE) as gpu, Bench(gpu, open_library) as bench:
        bench.warm(task.precision)
        try:
            for link in (bench.host_link, bench.peer_link):
                say(("link", bench.identity(), link(task.precision)))
        except DoesNotFit as error:
            raise MbcError(
                "MBC275",
                f"there is too little free memory for copies to the host or between GPUs: {error}",
                "end other programs that use the GPUs",
            ) from error


if __name__ == "__main__":
    serve(measure)

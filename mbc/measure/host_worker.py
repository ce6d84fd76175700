"""The process that `mbc.measure.host_fleet` starts to copy between the host and one GPU."""

from __future__ import annotations

from collections.abc import Generator

from mbc.hardware.streams import Stream
from mbc.measure.gpu import Gpu
from mbc.measure.gpu_processes import Say, serve
from mbc.measure.host_fleet import BACK, OUT, CopyTask
from mbc.measure.shared_copies import COPY_BYTES, Mark, shared_rates
from mbc.measure.workbench import identity

MEMORY_SHARE = 0.1  # of the free memory, for the buffers of two copies


def measure(index: int, say: Say) -> Generator[object, CopyTask]:
    """Yield the identity of the GPU, then the rates of each task."""
    with Gpu(MEMORY_SHARE) as gpu:
        ends = {direction: (gpu.take(COPY_BYTES), gpu.pinned(COPY_BYTES)) for direction in (OUT, BACK)}
        streams = {direction: gpu.new_stream() for direction in ends}

        def copy(direction: Stream) -> Mark:
            device, host = ends[direction]
            if direction is OUT:
                gpu.copy_to_host(host, device, streams[direction])
            else:
                gpu.copy_to_device(device, host, streams[direction])
            return gpu.mark_time(streams[direction])

        asked = yield identity(gpu)
        while True:
            asked = yield shared_rates(copy, asked.directions, asked.begin_s)


if __name__ == "__main__":
    serve(measure)

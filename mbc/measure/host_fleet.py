"""Measures copies between the host and several GPUs of this machine at a time, with one process for each GPU.

One GPU copies alone, then the first two, and so on up to all of them, in each direction and in both. This process tells
the others when to begin, and they answer with their rates. The rate of the slowest GPU counts, because the other GPUs
of a training step wait for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbc.hardware.host_sharing import SharedRates, sharing_constants
from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.measure.gpu_processes import SILENT_S, Failure, GpuProcesses
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.host_worker")
FAILURE = Failure("MBC362", "copies of several GPUs with the host")
LEAD_S = 0.05  # from sending the time at which to begin until that time
OUT, BACK = STREAM_TO[Space.HOST], STREAM_FROM[Space.HOST]
DIRECTIONS: tuple[tuple[Stream, ...], ...] = ((OUT,), (BACK,), (OUT, BACK))


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A request to copy in `directions` from the time `begin_s` of the monotonic clock on."""

    directions: tuple[Stream, ...]
    begin_s: float


def measure_host_sharing(
    gpus: Sequence[str],
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    silent_s: float = SILENT_S,
) -> tuple[SharedRates, ...]:
    """Measure copies of 1, 2, … of `gpus` with the host and write them to the profile at `path`.

    This takes about 2 s for each number of GPUs, and some seconds to begin.

    Args:
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them.
        path: The profile.
        tell: Receives a line of results for each number of GPUs.
        worker: Command that starts the process of a GPU.
        silent_s: Longest time without a message from any process.

    Raises:
        MbcError: MBC362, a process died, hung or copied almost nothing; or the error of a process.
    """
    with GpuProcesses(worker, gpus, FAILURE) as processes:
        identity, *_ = processes.ask(range(len(gpus)), silent_s)

        def slowest(count: int, way: tuple[Stream, ...]) -> Mapping[Stream, float]:
            task = CopyTask(way, time.monotonic() + LEAD_S)
            answers = processes.ask([task] * count, silent_s)
            rates = {direction: min(answer[direction] for answer in answers) for direction in way}
            if min(rates.values()) <= 0:
                raise FAILURE.error("a GPU copied almost nothing")
            return rates

        shared: list[SharedRates] = []
        for count in range(1, len(gpus) + 1):
            one, other, both = (slowest(count, way) for way in DIRECTIONS)
            shared.append(SharedRates(count, one[OUT], other[BACK], both[OUT], both[BACK]))
            tell(_line(shared[-1]))
    with ProfileWriter(path, identity) as writer, writer.all_at_once():
        for name, value in sharing_constants(shared).items():
            writer.record_constant(name, value)
    return tuple(shared)


def _line(rates: SharedRates) -> str:
    return (
        f"copies of {rates.gpus} GPU{'' if rates.gpus == 1 else 's'}, GB/s each: to the host {rates.to_host_gb_s:.1f}, "
        f"back {rates.to_device_gb_s:.1f}, both ways {rates.to_host_both_gb_s:.1f} and {rates.to_device_both_gb_s:.1f}"
    )

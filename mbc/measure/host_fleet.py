"""Measuring copies between the host and several GPUs of this machine at a time: a process for each.

One GPU copies alone, then the first two, and so on to all, in each direction and in both. Processes are told when to
begin, and say what they reached; of the GPUs the slowest counts, for which the others of a step wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.host_sharing import SharedRates, sharing_constants
from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.measure.processes import Process, Told, send, started
from mbc.profile.model import Identity
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.host_worker")
SILENT_S = 60.0  # longer than a process takes to open its GPU
LEAD_S = 0.05  # from telling all when to begin until then
OUT, BACK = STREAM_TO[Space.HOST], STREAM_FROM[Space.HOST]
DIRECTIONS: tuple[tuple[Stream, ...], ...] = ((OUT,), (BACK,), (OUT, BACK))


@dataclass(frozen=True, slots=True)
class CopyTask:
    """To copy in `directions`, from a moment of the monotonic clock on."""

    directions: tuple[Stream, ...]
    begin_s: float


def measure_host_sharing(
    gpus: Sequence[str],
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    silent_s: float = SILENT_S,
) -> tuple[SharedRates, ...]:
    """Measure copies of 1, 2, … of `gpus` (named as CUDA_VISIBLE_DEVICES names them) into the profile at `path`. Takes
    some 2 s for each, and some to begin. MBC362 where a process died, hung or reached nothing, and what one of them
    failed with."""
    told: Told = SimpleQueue()
    with started(worker, [(gpu, index) for index, gpu in enumerate(gpus)], told) as processes:
        try:
            identity, found = _Fleet(processes, told, tell, silent_s).run()
        finally:
            for process in processes:
                process.kill()
    with ProfileWriter(path, identity) as writer, writer.all_at_once():
        for name, value in sharing_constants(found).items():
            writer.record_constant(name, value)
    return found


class _Fleet:
    """Processes by the index of their GPU."""

    def __init__(self, processes: Sequence[Process], told: Told, tell: Callable[[str], None], silent_s: float) -> None:
        self._processes, self._told, self._tell, self._silent_s = processes, told, tell, silent_s

    def run(self) -> tuple[Identity, tuple[SharedRates, ...]]:
        identities: Mapping[int, Identity] = self._answers(len(self._processes))
        return identities[0], tuple(self._rates(gpus) for gpus in range(1, len(self._processes) + 1))

    def _rates(self, gpus: int) -> SharedRates:
        one, other, both = (self._slowest(gpus, way) for way in DIRECTIONS)
        found = SharedRates(gpus, one[OUT], other[BACK], both[OUT], both[BACK])
        self._tell(
            f"copies of {gpus} GPU{'' if gpus == 1 else 's'}, GB/s each: to the host {found.to_host_gb_s:.1f}, back "
            f"{found.to_device_gb_s:.1f}, both ways {found.to_host_both_gb_s:.1f} and {found.to_device_both_gb_s:.1f}"
        )
        return found

    def _slowest(self, gpus: int, way: tuple[Stream, ...]) -> Mapping[Stream, float]:
        begin_s = time.monotonic() + LEAD_S
        for process in self._processes[:gpus]:
            send(process, CopyTask(way, begin_s))
        rates: Mapping[int, Mapping[Stream, float]] = self._answers(gpus)
        slowest = {direction: min(of[direction] for of in rates.values()) for direction in way}
        if min(slowest.values()) <= 0:
            raise _failed("a GPU copied next to nothing", "end other programs that use the GPUs")
        return slowest

    def _answers(self, count: int) -> Mapping[int, Any]:
        """Of the first `count` processes."""
        found: dict[int, Any] = {}
        while len(found) < count:
            try:
                index, message = self._told.get(timeout=self._silent_s)
            except Empty:
                raise _failed(
                    f"no process said anything for {self._silent_s:.0f} s", "look whether another program uses the GPUs"
                ) from None
            match message:
                case None:
                    status = self._processes[index].wait()
                    raise _failed(
                        f"the process of GPU {index} died (exit status {status})", "mbc doctor checks the GPUs"
                    )
                case "error", MbcError() as error:
                    raise error
                case _, answer:
                    found[index] = answer
                case _:
                    raise AssertionError(f"unknown message {message!r}")
        return found


def _failed(why: str, remedy: str) -> MbcError:
    return MbcError("MBC362", f"copies of several GPUs with the host were not measured: {why}", remedy)

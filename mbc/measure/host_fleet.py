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
from queue import Empty, SimpleQueue
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.host_sharing import SharedRates, sharing_constants
from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.measure.processes import MessageQueue, Process, send, started
from mbc.profile.model import Identity
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.host_worker")
SILENT_S = 60.0  # longer than a process takes to open its GPU
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
    messages: MessageQueue = SimpleQueue()
    with started(worker, [(gpu, index) for index, gpu in enumerate(gpus)], messages) as processes:
        try:
            identity, rates = _Fleet(processes, messages, tell, silent_s).run()
        finally:
            for process in processes:
                process.kill()
    with ProfileWriter(path, identity) as writer, writer.all_at_once():
        for name, value in sharing_constants(rates).items():
            writer.record_constant(name, value)
    return rates


class _Fleet:
    """The processes, in the order of their GPUs."""

    def __init__(
        self, processes: Sequence[Process], messages: MessageQueue, tell: Callable[[str], None], silent_s: float
    ) -> None:
        """Receive from the queue `messages`."""
        self._processes, self._messages, self._tell, self._silent_s = processes, messages, tell, silent_s

    def run(self) -> tuple[Identity, tuple[SharedRates, ...]]:
        """Return the first GPU's identity, and the rates for each number of GPUs."""
        identities: Mapping[int, Identity] = self._answers(len(self._processes))
        return identities[0], tuple(self._rates(gpus) for gpus in range(1, len(self._processes) + 1))

    def _rates(self, gpus: int) -> SharedRates:
        one, other, both = (self._slowest(gpus, way) for way in DIRECTIONS)
        rates = SharedRates(gpus, one[OUT], other[BACK], both[OUT], both[BACK])
        self._tell(
            f"copies of {gpus} GPU{'' if gpus == 1 else 's'}, GB/s each: to the host {rates.to_host_gb_s:.1f}, back "
            f"{rates.to_device_gb_s:.1f}, both ways {rates.to_host_both_gb_s:.1f} and {rates.to_device_both_gb_s:.1f}"
        )
        return rates

    def _slowest(self, gpus: int, way: tuple[Stream, ...]) -> Mapping[Stream, float]:
        begin_s = time.monotonic() + LEAD_S
        for process in self._processes[:gpus]:
            send(process, CopyTask(way, begin_s))
        rates: Mapping[int, Mapping[Stream, float]] = self._answers(gpus)
        slowest = {direction: min(of[direction] for of in rates.values()) for direction in way}
        if min(slowest.values()) <= 0:
            raise _failed("a GPU copied almost nothing", "end other programs that use the GPUs")
        return slowest

    def _answers(self, count: int) -> Mapping[int, Any]:
        """Wait for one answer of each of the first `count` processes, and return the answers by index."""
        answers: dict[int, Any] = {}
        while len(answers) < count:
            try:
                index, message = self._messages.get(timeout=self._silent_s)
            except Empty:
                raise _failed(
                    f"no process sent a message for {self._silent_s:.0f} s",
                    "check whether another program uses the GPUs",
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
                    answers[index] = answer
                case _:
                    raise AssertionError(f"unknown message {message!r}")
        return answers


def _failed(why: str, remedy: str) -> MbcError:
    return MbcError("MBC362", f"copies of several GPUs with the host were not measured: {why}", remedy)

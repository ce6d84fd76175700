"""Measures collectives between the GPUs of this machine: one process for each, all in one communicator at a time.

The processes join a communicator by NCCL's unique id. The first process creates the ids, and this process passes them
to all others. No wait is unlimited: if one process dies, fails or is silent for too long, all are ended.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveSlowdown, CollectiveTime, Link
from mbc.hardware.spec import spec_like
from mbc.hardware.target import local_gpus
from mbc.hardware.topology import link_between
from mbc.ir.types import Precision
from mbc.measure.collective_timing import MAX_CTAS, SIZES_BYTES
from mbc.measure.processes import MessageQueue, Process, send, started
from mbc.measure.workbench import CONCURRENT_KERNELS
from mbc.profile.model import Identity, Overhead
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.collective_worker")
SILENT_S = 60.0  # longer than the harness's WAIT_S, so that a rank can report what it waits for
MOST_S = 240.0  # limit for all measurements once the kernels are built


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """Measurements that the process of one rank makes; `library` is the path of the built kernels."""

    rank: int
    ranks: int
    link: Link
    precision: Precision
    library: str
    max_ctas: tuple[int, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of some communicators; `overheads` is the device memory that NCCL takes."""

    times: tuple[CollectiveTime, ...] = ()
    slowdowns: tuple[CollectiveSlowdown, ...] = ()
    overheads: tuple[Overhead, ...] = ()

    def __add__(self, more: Measured) -> Measured:
        """Return the results of both."""
        return Measured(
            self.times + more.times, self.slowdowns + more.slowdowns, self.overheads + more.overheads
        )  # fmt: skip


def link_of(gpus: Sequence[str]) -> Link:
    """Return the slowest link between any two of these GPUs, which are named as in CUDA_VISIBLE_DEVICES."""
    here = local_gpus()
    return link_between([here[int(g)].uuid if g.isdecimal() and int(g) < len(here) else g for g in gpus])


def measure_collectives(
    gpus: Sequence[str],
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    build: Callable[[str, Precision, Path], None] | None = None,
    max_ctas: Sequence[int] = MAX_CTAS,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    silent_s: float = SILENT_S,
) -> Measured:
    """Measure collectives between `gpus` and write them to the profile at `path`, in under 90 s.

    The results of each communicator are written as soon as it has been measured.

    Args:
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them, one rank each.
        path: The profile.
        tell: Receives lines that say what is being measured.
        worker: Command that starts the process of a rank.
        build: Builds the kernels that run beside collectives; None for `build_kernels`.
        max_ctas: Numbers of thread blocks, one communicator for each.
        sizes_bytes: Sizes of the collectives.
        silent_s: Longest time without a message from any process.

    Raises:
        MbcError: MBC274, there are fewer than two GPUs; MBC275, a process died or hung; or the error of a process.
    """
    if len(gpus) < 2:
        raise MbcError(
            "MBC274",
            f"collectives need two GPUs or more, but this machine has {len(gpus)} that can be used",
            "mbc gpus lists them; CUDA_VISIBLE_DEVICES may hide some",
        )
    here = local_gpus()[0]
    precision = Precision.BF16 if spec_like(here.name, here.architecture).has_bf16 else Precision.FP16
    with tempfile.TemporaryDirectory(prefix="mbc-kernels-") as folder:
        library = Path(folder) / "libkernels.so"
        tell("building the kernels that run beside collectives")
        (build or build_kernels)(here.architecture, precision, library)
        link, ctas, sizes = link_of(gpus), tuple(max_ctas), tuple(sizes_bytes)
        first = CollectiveTask(0, len(gpus), link, precision, str(library), ctas, sizes)
        tasks = [replace(first, rank=rank) for rank in range(len(gpus))]
        messages: MessageQueue = SimpleQueue()
        with started(worker, list(zip(gpus, tasks, strict=True)), messages) as processes:
            return _Watch(processes, messages, path, tell, silent_s).run()


def build_kernels(architecture: str, precision: Precision, library: Path) -> None:
    """Build the library of kernels that run beside collectives and copies."""
    build_kernel_library(architecture, precision, library, find_toolchain(), CONCURRENT_KERNELS)


class _Watch:
    """Receives the messages of the processes until all have ended."""

    def __init__(
        self,
        processes: Sequence[Process],
        messages: MessageQueue,
        path: Path,
        tell: Callable[[str], None],
        silent_s: float,
    ) -> None:
        """Receive from the queue `messages`, and write results to the profile at `path`."""
        self._processes, self._messages, self._path, self._tell = processes, messages, path, tell
        self._silent_s = silent_s
        self._left = set(range(len(processes)))
        self._identity: Identity | None = None
        self._results = Measured()

    def run(self) -> Measured:
        """Return all results once the processes have ended, and kill those that have not."""
        try:
            return self._run()
        finally:
            # A process that waits for another rank on the GPU does not notice that its stdin ends.
            for process in self._processes:
                process.kill()
            self._write_remaining_results()

    def _run(self) -> Measured:
        until_s = time.monotonic() + MOST_S
        while self._left:
            patience_s = min(self._silent_s, until_s - time.monotonic())
            try:
                index, message = self._messages.get(timeout=max(0.0, patience_s))
            except Empty:
                raise MbcError(
                    "MBC275",
                    f"measuring collectives was ended: no process sent a message for {max(0.0, patience_s):.0f} s",
                    "check whether another process uses the GPUs; NCCL_DEBUG=INFO shows why NCCL waits",
                ) from None
            self._hear(index, message)
        return self._results

    def _hear(self, index: int, message: Any) -> None:
        match message:
            case None:
                self._left.discard(index)
                status = self._processes[index].wait()
                if status:
                    raise MbcError(
                        "MBC275",
                        f"the process that measured collectives as rank {index} died (exit status {status})",
                        "run the same command again with NCCL_DEBUG=INFO; mbc doctor checks the GPU",
                    )
            case "note", text:
                self._tell(text)
            case "identity", identity:
                self._identity = identity
            case "ids", ids:
                for process in self._processes:
                    send(process, ids)
            case "rows", results:
                self._write(results)
            case "error", error:
                raise error
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _write_remaining_results(self) -> None:
        """Write the results that a process sent before another process failed."""
        while self._left:
            match self._messages.get():
                case index, None:
                    self._left.discard(index)
                case _, ("rows", results):
                    self._write(results)
                case _:
                    pass

    def _write(self, results: Measured) -> None:
        assert self._identity is not None
        with ProfileWriter(self._path, self._identity) as writer, writer.all_at_once():
            writer.record_collectives(results.times, results.slowdowns)
            for overhead in results.overheads:
                writer.record_overhead(overhead)
        self._results += results

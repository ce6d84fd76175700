"""Measuring collectives between the GPUs of this machine: a process for each, all in one communicator at a time.

The processes meet by NCCL's unique ids, which the first makes and this one hands to all. None of them can be waited for
without limit: one that has died, failed, or says nothing for too long ends them all.
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
from mbc.hardware.collectives import CollectiveSlowdown, CollectiveTime, Link
from mbc.hardware.spec import spec_like
from mbc.hardware.target import local_gpus
from mbc.hardware.topology import link_between
from mbc.ir.types import Precision
from mbc.measure.collectives import MAX_CTAS, SIZES_BYTES
from mbc.measure.processes import Process, Told, send, started
from mbc.measure.workbench import CONCURRENT_KERNELS
from mbc.profile.model import Identity, Overhead
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.collective_worker")
SILENT_S = 60.0  # longer than WAIT_S of the harness, so that a rank can say what it waits for
MOST_S = 240.0  # of everything once the kernels are built


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """What the process of one rank is to measure. `library`: path of the built kernels."""

    rank: int
    ranks: int
    link: Link
    precision: Precision
    library: str
    max_ctas: tuple[int, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of some communicators. `overheads`: device memory that NCCL takes."""

    times: tuple[CollectiveTime, ...] = ()
    slowdowns: tuple[CollectiveSlowdown, ...] = ()
    overheads: tuple[Overhead, ...] = ()

    def __add__(self, more: Measured) -> Measured:
        return Measured(
            self.times + more.times, self.slowdowns + more.slowdowns, self.overheads + more.overheads
        )  # fmt: skip


def link_of(gpus: Sequence[str]) -> Link:
    """The slowest between any two of these GPUs, named as CUDA_VISIBLE_DEVICES names them."""
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
    """Measure collectives between `gpus` into the profile at `path`, a communicator's results as soon as it is done.

    Takes under 90 s. MBC274 for fewer than two GPUs, MBC275 where a process died or hung, and whatever one of them
    failed with.
    """
    if len(gpus) < 2:
        raise MbcError(
            "MBC274",
            f"collectives need two GPUs or more, and {len(gpus)} can be used here",
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
        told: Told = SimpleQueue()
        with started(worker, list(zip(gpus, tasks, strict=True)), told) as processes:
            return _Watch(processes, told, path, tell, silent_s).run()


def build_kernels(architecture: str, precision: Precision, library: Path) -> None:
    """The library of kernels that run beside collectives and copies."""
    build_kernel_library(architecture, precision, library, find_toolchain(), CONCURRENT_KERNELS)


class _Watch:
    """Follows the processes until all have ended."""

    def __init__(
        self,
        processes: Sequence[Process],
        told: Told,
        path: Path,
        tell: Callable[[str], None],
        silent_s: float,
    ) -> None:
        self._processes, self._told, self._path, self._tell = processes, told, path, tell
        self._silent_s = silent_s
        self._left = set(range(len(processes)))
        self._identity: Identity | None = None
        self._found = Measured()

    def run(self) -> Measured:
        try:
            return self._run()
        finally:
            # One that waits for another on the GPU does not notice that its stdin ends.
            for process in self._processes:
                process.kill()
            self._keep_what_was_said()

    def _run(self) -> Measured:
        until_s = time.monotonic() + MOST_S
        while self._left:
            patience_s = min(self._silent_s, until_s - time.monotonic())
            try:
                index, message = self._told.get(timeout=max(0.0, patience_s))
            except Empty:
                raise MbcError(
                    "MBC275",
                    f"measuring collectives was ended: no process said anything for {max(0.0, patience_s):.0f} s",
                    "look whether another process uses the GPUs; NCCL_DEBUG=INFO tells what NCCL waits for",
                ) from None
            self._hear(index, message)
        return self._found

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
            case "rows", found:
                self._write(found)
            case "error", error:
                raise error
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _keep_what_was_said(self) -> None:
        """Results that a process has told before another failed."""
        while self._left:
            match self._told.get():
                case index, None:
                    self._left.discard(index)
                case _, ("rows", found):
                    self._write(found)
                case _:
                    pass

    def _write(self, found: Measured) -> None:
        assert self._identity is not None
        with ProfileWriter(self._path, self._identity) as writer, writer.all_at_once():
            writer.record_collectives(found.times, found.slowdowns)
            for overhead in found.overheads:
                writer.record_overhead(overhead)
        self._found += found

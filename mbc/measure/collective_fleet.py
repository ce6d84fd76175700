"""Measures collectives between the GPUs of this machine: one process for each, all in one communicator at a time.

The processes join a communicator by NCCL's unique id. The first process creates the ids, and this process passes them
to all others.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveSlowdown, CollectiveTime, Link
from mbc.hardware.spec import spec_like
from mbc.hardware.target import local_gpus
from mbc.hardware.topology import link_between
from mbc.ir.types import Precision
from mbc.kernels.cuda.generated.lowering import lower
from mbc.measure.collective_timing import MAX_CTAS, SIZES_BYTES
from mbc.measure.gpu_processes import SILENT_S, Failure, GpuProcesses
from mbc.measure.workbench import CONCURRENT_KERNELS, scaling
from mbc.profile.model import Overhead
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.collective_worker")
FAILURE = Failure(
    "MBC275", "collectives", "end other programs that use the GPUs; NCCL_DEBUG=INFO shows why NCCL waits or fails"
)


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


def build_kernels(architecture: str, precision: Precision, library: Path) -> None:
    """Build the library of kernels that run beside collectives and copies."""
    lowered = lower(scaling(precision, precision.working.size_bytes))
    programs = () if lowered is None else (lowered.program,)
    build_kernel_library(architecture, precision, library, find_toolchain(), CONCURRENT_KERNELS, programs)


def measure_collectives(
    gpus: Sequence[str],
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    build: Callable[[str, Precision, Path], None] = build_kernels,
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
        build: Builds the kernels that run beside collectives.
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
    results = Measured()
    tell("building the kernels that run beside collectives")
    with (
        kernels_beside(build) as (precision, library),
        GpuProcesses(worker, gpus, FAILURE, lambda rank, text: tell(text)) as processes,
    ):
        first = CollectiveTask(0, len(gpus), link_of(gpus), precision, library, tuple(max_ctas), tuple(sizes_bytes))
        (identity, unique_ids), *_ = processes.ask([replace(first, rank=rank) for rank in range(len(gpus))], silent_s)
        for communicator in zip(max_ctas, unique_ids, strict=True):
            measured, *_ = processes.ask([communicator] * len(gpus), silent_s)
            with ProfileWriter(path, identity) as writer, writer.all_at_once():
                writer.record_collectives(measured.times, measured.slowdowns)
                for overhead in measured.overheads:
                    writer.record_overhead(overhead)
            results += measured
    return results


@contextmanager
def kernels_beside(build: Callable[[str, Precision, Path], None]) -> Generator[tuple[Precision, str]]:
    """Build the kernels that run beside collectives and copies; yield their precision and the library's path."""
    here = local_gpus()[0]
    precision = Precision.BF16 if spec_like(here.name, here.architecture).has_bf16_and_tf32 else Precision.FP16
    with tempfile.TemporaryDirectory(prefix="mbc-kernels-") as folder:
        library = Path(folder) / "libkernels.so"
        build(here.architecture, precision, library)
        yield precision, str(library)

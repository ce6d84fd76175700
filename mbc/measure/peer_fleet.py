"""Measures copies between two GPUs of this machine with one process that sees both and copies from the first.

The process also measures the first GPU's link to the host again: other GPUs may have copied at the time of the first
measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbc.hardware.transfers import PeerLink, link_constants
from mbc.ir.types import Precision
from mbc.measure.collective_fleet import build_kernels, kernels_beside
from mbc.measure.gpu_processes import Failure, GpuProcesses
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.peer_worker")
FAILURE = Failure("MBC275", "copies between GPUs")


@dataclass(frozen=True, slots=True)
class PeerTask:
    """The task of the process; `library` is the path of the built kernels that run beside copies."""

    precision: Precision
    library: str


def measure_peer_link(
    gpus: Sequence[str],
    path: Path,
    tell: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    build: Callable[[str, Precision, Path], None] = build_kernels,
) -> PeerLink:
    """Measure copies between the first two of `gpus`, and between the first and the host, in under a minute.

    Args:
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them.
        path: The profile, to which both links are written.
        tell: Receives a line that says what is being measured.
        worker: Command that starts the process.
        build: Builds the kernels that run beside copies.

    Raises:
        MbcError: MBC275, the process died; or its own error: MBC105 or MBC106, the second GPU cannot lend memory to the
            first.
    """
    tell("copies between two GPUs, beside kernels and beside copies to the host")
    with (
        kernels_beside(build) as (precision, library),
        GpuProcesses(worker, [",".join(gpus[:2])], FAILURE) as processes,
    ):

        def link(task: PeerTask | None) -> PeerLink:
            ((identity, measured),) = processes.ask([task])
            with ProfileWriter(path, identity) as writer, writer.all_at_once():
                for name, value in link_constants(measured).items():
                    writer.record_constant(name, value)
            return measured

        link(PeerTask(precision, library))
        return link(None)

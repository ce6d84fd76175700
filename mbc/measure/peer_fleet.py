"""Measures copies between two GPUs of this machine with one process that sees both and copies from the first.

The process also measures the first GPU's link to the host again: other GPUs may have copied at the time of the first
measurement.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.spec import spec_like
from mbc.hardware.target import local_gpus
from mbc.hardware.transfers import HostLink, PeerLink, link_constants
from mbc.ir.types import Precision
from mbc.measure.collective_fleet import build_kernels
from mbc.measure.processes import MessageQueue, started
from mbc.profile.model import Identity
from mbc.profile.writer import ProfileWriter

WORKER = (sys.executable, "-m", "mbc.measure.peer_worker")


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
    here = local_gpus()[0]
    precision = Precision.BF16 if spec_like(here.name, here.architecture).has_bf16 else Precision.FP16
    tell("copies between two GPUs, beside kernels and beside copies to the host")
    with tempfile.TemporaryDirectory(prefix="mbc-kernels-") as folder:
        library = Path(folder) / "libkernels.so"
        build(here.architecture, precision, library)
        messages: MessageQueue = SimpleQueue()
        with started(worker, [(",".join(gpus[:2]), PeerTask(precision, str(library)))], messages) as processes:
            said: list[Any] = []
            while (message := messages.get()[1]) is not None:
                said.append(message)
            status = processes[0].wait()
    for message in said:
        match message:
            case ("link", Identity() as identity, HostLink() | PeerLink() as link):
                with ProfileWriter(path, identity) as writer, writer.all_at_once():
                    for name, value in link_constants(link).items():
                        writer.record_constant(name, value)
                if isinstance(link, PeerLink):
                    return link
            case ("error", MbcError() as error):
                raise error
            case _:
                raise AssertionError(f"unknown message {message!r}")
    raise MbcError(
        "MBC275",
        f"the process that measured copies between GPUs died (exit status {status})",
        "run the same command again; mbc doctor checks the GPUs",
    )

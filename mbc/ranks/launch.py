"""Starts the ranks of one machine and waits for them: the processes of `mbc train --gpus N`.

On GPUs each rank runs the same command line, with variables such as `MBC_RANK`; its CUDA device is its local rank. On
the CPU mpiexec starts the ranks, since sums go through MPI there. Rank 0 has this process's output. A rank that fails
ends all ranks: the others have time to end by themselves (`mbc.ranks.rank_group`), and are killed then.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from mbc.errors import OTHER_RANK_FAILED, MbcError
from mbc.ranks.environment import RankEnvironment
from mbc.ranks.mpi import INSTALL
from mbc.version import PACKAGE

# Seconds that the other ranks have after the first failure: to end by themselves, then to end after SIGTERM.
PATIENCE_S = 7.0
TERMINATION_S = 1.5
_POLL_S = 0.05
_SHOWN_BYTES = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# If there are more ranks than cores, waits must not spin (Open MPI 4 and 5; MPICH needs no setting).
_OPEN_MPI = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def starts(gpus: int | None, environment: RankEnvironment | None) -> bool:
    """Return whether `--gpus` asks this process to start ranks.

    Raises:
        MbcError: MBC266 if a launcher has started another number of ranks.
    """
    size = 1 if environment is None else environment.size
    if environment is not None and gpus is not None and gpus != size:
        raise MbcError(
            "MBC266", f"--gpus {gpus} was asked for, but {environment.launcher} started {size} ranks",
            f"leave --gpus out, or start {gpus} processes",
        )  # fmt: skip
    return gpus is not None and gpus > size


def check_gpus(wanted: int, available: int) -> None:
    """Raise an error if this machine has fewer GPUs than `wanted`.

    Raises:
        MbcError: MBC266 with both numbers.
    """
    if wanted > available:
        raise MbcError(
            "MBC266",
            f"--gpus {wanted} was asked for, but this machine has {available} GPU{'' if available == 1 else 's'}",
            "ask for fewer, or start ranks on several machines with mpirun, srun or torchrun",
        )  # fmt: skip


def launch(command: Sequence[str], count: int, output: IO[bytes] | None = None) -> int:
    """Run `command` as `count` ranks, one for each GPU, and return the exit code of the first that fails, or 0.

    Args:
        command: Program and arguments.
        count: Number of ranks.
        output: Where rank 0's standard output goes; None: to this process's.
    """
    job = secrets.token_hex(16)
    with _Watch(output) as watch:
        for rank in range(count):
            watch.start(command, {
                "MBC_RANK": str(rank), "MBC_RANKS": str(count), "MBC_JOB": job,
                "MBC_LOCAL_RANK": str(rank), "MBC_LOCAL_RANKS": str(count),
            }, shown=rank == 0)  # fmt: skip
        return watch.run()


def launch_with_mpi(command: Sequence[str], count: int, output: IO[bytes] | None = None) -> int:
    """Run `command` as `count` ranks on the CPU through mpiexec, and return mpiexec's exit code.

    Args:
        command: Program and arguments.
        count: Number of ranks.
        output: Where mpiexec's standard output goes; None: to this process's.

    Raises:
        MbcError: MBC265 if there is no mpiexec.
    """
    words = [str(mpiexec()), "-n", str(count), *command]
    with _Watch(output) as watch:
        watch.start(words, {"MBC_JOB": secrets.token_hex(16)} | for_mpiexec(), shown=True)
        return watch.run()


def for_mpiexec() -> dict[str, str]:
    """Return the variables with which mpiexec is started, except those that the user has set."""
    return {name: value for name, value in _OPEN_MPI.items() if name not in os.environ}


def mpiexec() -> Path:
    """Return the mpiexec of Python's environment, which pip installs with its MPI, or else the system's.

    Raises:
        MbcError: MBC265 if there is none.
    """
    path = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if path is None:
        raise MbcError("MBC265", "ranks on CPUs are started by mpiexec, which is not installed", INSTALL)
    return Path(path)


def command_line(words: Sequence[str]) -> list[str]:
    """Return the command line for `mbc` with these words; the current folder does not change which mbc runs."""
    return [sys.executable, "-P", "-m", "mbc.cli", *words]


class _Watch:
    """Processes that end together. `output` receives the output of shown processes; None: this process's output."""

    def __init__(self, output: IO[bytes] | None = None) -> None:
        self._output = output
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes] | None] = []  # errors of processes that are not shown
        self._closing = ExitStack()

    def __enter__(self) -> _Watch:
        self._closing.enter_context(_passing_on(self._send))  # before the first process starts
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._closing.close()

    def start(self, command: Sequence[str], variables: Mapping[str, str], shown: bool) -> None:
        here = str(PACKAGE.parent)
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        errors = None if shown else self._closing.enter_context(os.fdopen(os.memfd_create("errors"), "w+b"))
        self._errors.append(errors)
        # Each rank has a session of its own: the terminal's Ctrl-C reaches only this process, which passes it on once.
        self._processes.append(subprocess.Popen(
            list(command),
            env=os.environ | {"PYTHONPATH": paths} | dict(variables),
            stdin=subprocess.DEVNULL, stdout=self._output if shown else subprocess.DEVNULL, stderr=errors,
            start_new_session=True, preexec_fn=_end_with_parent(os.getpid()),
        ))  # fmt: skip

    def run(self) -> int:
        """Wait until all processes have ended, and return the exit code of the first that failed by itself."""
        ended: dict[int, int] = {}  # exit codes, in the order of the ends
        killed: dict[int, int] = {}
        deadlines = {signal.SIGTERM: float("inf"), signal.SIGKILL: float("inf")}
        while len(ended) + len(killed) < len(self._processes):
            for index, process in enumerate(self._processes):
                code = process.poll()
                if code is not None and index not in ended and index not in killed:
                    # Processes that this process has killed have not failed by themselves.
                    (killed if deadlines[signal.SIGTERM] == 0 else ended)[index] = code
            now_s = time.monotonic()
            if any(ended.values()) and deadlines[signal.SIGKILL] == float("inf"):
                deadlines = {signal.SIGTERM: now_s + PATIENCE_S, signal.SIGKILL: now_s + PATIENCE_S + TERMINATION_S}
            for number, deadline_s in deadlines.items():
                if deadline_s and now_s >= deadline_s:
                    deadlines[number] = 0.0
                    self._send(number)
            time.sleep(_POLL_S)
        failed = [index for index, code in ended.items() if code]
        if not failed:
            return 0
        first = next((index for index in failed if ended[index] != OTHER_RANK_FAILED), failed[0])
        self._show(first)
        return ended[first] if ended[first] > 0 else 128 - ended[first]

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # does nothing if the process has ended

    def _show(self, index: int) -> None:
        """Print a rank's failure and errors; rank 0 has printed its own already, unless a signal has ended it."""
        file, code = self._errors[index], self._processes[index].returncode
        said = ""
        if file is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            said = file.read().decode(errors="replace")
        elif code > 0:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"rank {index} failed ({how}){':' if said.strip() else ' without a message'}", file=sys.stderr)
        print(said, end="", file=sys.stderr, flush=True)


@contextmanager
def _passing_on(send: Callable[[int], None]) -> Generator[None]:
    """Pass Ctrl-C and SIGTERM on to the ranks, which end in their own way and set this process's exit code."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Return a function with which a new process asks for SIGTERM when this process is killed."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent has ended already
            os._exit(1)

    return ask

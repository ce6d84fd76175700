"""The ranks of one machine, started and watched: the processes of `mbc train --gpus N`.

On GPUs each rank is the same command line again, with `MBC_RANK` and the like; its CUDA device is its local rank. On
the CPU mpiexec starts them, since sums go through MPI there. Rank 0 has this process's output. A rank that fails ends
all: the others have time to end by themselves (`mbc.ranks.rank_group`), and are killed then.
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

# Seconds after the first failure: for the others to end by themselves, then after SIGTERM.
PATIENCE_S = 7.0
TERMINATION_S = 1.5
_POLL_S = 0.05
_SHOWN_BYTES = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# More ranks than cores are waited for, not spun for (Open MPI 4 and 5; MPICH needs no telling).
_OPEN_MPI = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def starts(gpus: int | None, environment: RankEnvironment | None) -> bool:
    """Whether `--gpus` asks this process to start ranks; MBC266 where a launcher started another number."""
    size = 1 if environment is None else environment.size
    if environment is not None and gpus is not None and gpus != size:
        raise MbcError(
            "MBC266", f"--gpus {gpus} was asked for, but {environment.launcher} started {size} ranks",
            f"leave --gpus out, or start {gpus} processes",
        )  # fmt: skip
    return gpus is not None and gpus > size


def check_gpus(wanted: int, found: int) -> None:
    """MBC266 where this machine has fewer GPUs."""
    if wanted > found:
        raise MbcError(
            "MBC266", f"--gpus {wanted} was asked for, but there {'is' if found == 1 else 'are'} {found} here",
            "ask for fewer, or start ranks on several machines with mpirun, srun or torchrun",
        )  # fmt: skip


def launch(command: Sequence[str], count: int, output: IO[bytes] | None = None) -> int:
    """Run `command` as `count` ranks, one a GPU; returns the exit code of the first that fails, else 0. `output`: that
    of rank 0, None: this process's."""
    job = secrets.token_hex(16)
    with _Watch(output) as watch:
        for rank in range(count):
            watch.start(command, {
                "MBC_RANK": str(rank), "MBC_RANKS": str(count), "MBC_JOB": job,
                "MBC_LOCAL_RANK": str(rank), "MBC_LOCAL_RANKS": str(count),
            }, shown=rank == 0)  # fmt: skip
        return watch.run()


def launch_with_mpi(command: Sequence[str], count: int, output: IO[bytes] | None = None) -> int:
    """The same on the CPU, through mpiexec, whose exit code is returned. MBC265 where there is none."""
    words = [str(mpiexec()), "-n", str(count), *command]
    with _Watch(output) as watch:
        watch.start(words, {"MBC_JOB": secrets.token_hex(16)} | for_mpiexec(), shown=True)
        return watch.run()


def for_mpiexec() -> dict[str, str]:
    """Variables that mpiexec is started with, where the user has not set them."""
    return {name: value for name, value in _OPEN_MPI.items() if name not in os.environ}


def mpiexec() -> Path:
    """That of the environment that Python runs in, which pip installs with its MPI, else the system's."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise MbcError("MBC265", "ranks on CPUs are started by mpiexec, which is not there", INSTALL)
    return Path(found)


def command_line(words: Sequence[str]) -> list[str]:
    """`mbc` with these words, by this Python and this mbc, whatever lies in the current folder."""
    return [sys.executable, "-P", "-m", "mbc.cli", *words]


class _Watch:
    """Processes that end together. `output` is that of those that are shown, None: this process's."""

    def __init__(self, output: IO[bytes] | None = None) -> None:
        self._output = output
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes] | None] = []  # what those that are not shown say
        self._closing = ExitStack()

    def __enter__(self) -> _Watch:
        self._closing.enter_context(_passing_on(self._send))  # before there is anything to pass on to
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
        # A session of its own: Ctrl-C of the terminal is for this process, which passes it on, once.
        self._processes.append(subprocess.Popen(
            list(command),
            env=os.environ | {"PYTHONPATH": paths} | dict(variables),
            stdin=subprocess.DEVNULL, stdout=self._output if shown else subprocess.DEVNULL, stderr=errors,
            start_new_session=True, preexec_fn=_end_with_parent(os.getpid()),
        ))  # fmt: skip

    def run(self) -> int:
        """Until all have ended; the exit code of the first that failed by itself."""
        ended: dict[int, int] = {}  # exit codes, in the order in which they came
        killed: dict[int, int] = {}
        deadlines = {signal.SIGTERM: float("inf"), signal.SIGKILL: float("inf")}
        while len(ended) + len(killed) < len(self._processes):
            for index, process in enumerate(self._processes):
                code = process.poll()
                if code is not None and index not in ended and index not in killed:
                    # Those that this process has killed have not failed by themselves.
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
            process.send_signal(number)  # nothing, to one that has ended

    def _show(self, index: int) -> None:
        """How a rank has failed, and what it has said; rank 0 has said it already, unless a signal has ended it."""
        file, code = self._errors[index], self._processes[index].returncode
        said = ""
        if file is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            said = file.read().decode(errors="replace")
        elif code > 0:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"rank {index} failed ({how}){':' if said.strip() else ' without a word'}", file=sys.stderr)
        print(said, end="", file=sys.stderr, flush=True)


@contextmanager
def _passing_on(send: Callable[[int], None]) -> Generator[None]:
    """Ctrl-C and SIGTERM go to the ranks, which end in their own way; their exit codes are then this process's."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """In a new process: SIGTERM when this one is killed, so that no rank stays behind."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it is gone already
            os._exit(1)

    return ask

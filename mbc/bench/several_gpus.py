"""One contender on several GPUs: a process for each GPU, and their combined result; and the same parts on one GPU each.

Every process computes an equal part of the rows of the global mini-batch. If a process fails, all of them are ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mbc.bench.contender_messages import MBC, Contender, Job, Result, Share
from mbc.ranks.launch import for_mpiexec, mpiexec

LOG_LINES = 6  # last lines of the log of a process that died
_LOOK_S = 0.05
_STAGE_SHARE = 0.6  # share of the remaining time
_TERMINATION_S = 2.0  # after SIGTERM
_GRACE_S = 5.0  # time for ranks to report their own reasons after one has ended
# Prefixes of a launcher's variables: those of this process must not reach its ranks.
_LAUNCHERS = (
    "MBC_RANK", "MBC_LOCAL_RANK", "MBC_JOB", "MBC_MASTER", "OMPI_COMM_", "OMPI_MCA_ess_", "PMI_", "PMIX_", "MPI_LOCAL",
    "SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_BY_MPIEXEC = ("MBC_RANK", "MBC_RANKS", "MBC_LOCAL_RANK", "MBC_LOCAL_RANKS")  # mpiexec has its own variables for ranks
# No contender uses multicast objects, because a static plan must run on machines that forbid them. Each process has
# one thread, because ranks share the processor.
_MANNERS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
}
_MPI_LOG = "mpiexec.log"
_ENDED = "was ended"


@dataclass(frozen=True, slots=True)
class _Process:
    running: subprocess.Popen[bytes]
    answer: Path
    log: Path


def run_alone(job: Job, contender: Contender, ranks: int, timeout_s: float) -> Result:
    """Run the part of every rank on its GPU as a mini-batch of its own, all at once.

    The slowest result counts, because GPUs of one machine differ. The losses are those of rank 0.
    """
    results = _run([replace(job, share=Share(rank, ranks)) for rank in range(ranks)], contender, timeout_s)
    return _slowest(results)


def run_ranks(job: Job, contender: Contender, ranks: int, timeout_s: float) -> Result:
    """Run `ranks` processes that share each mini-batch.

    Where PyTorch cannot capture or compile a whole step of DDP, simpler variants follow within the time limit; `stage`
    of the result names the variant that ran.
    """
    deadline = time.monotonic() + timeout_s
    problems: list[str] = []
    variants = list(stages(contender))
    for number, (stage, variant) in enumerate(variants, 1):
        with tempfile.TemporaryDirectory(prefix="mbc-ranks-") as folder:
            meeting = str(Path(folder) / "meeting")
            jobs = [replace(job, share=Share(rank, ranks, False, meeting, job.share.sizes)) for rank in range(ranks)]
            left_s = max(0.0, deadline - time.monotonic())  # creating the folder may use up a short time
            # A variant that hangs leaves time for the next.
            share = 1.0 if number == len(variants) else _STAGE_SHARE
            results = combined(_run(jobs, variant, left_s * share))
        if not results.problem:
            return replace(results, stage="; ".join((stage, *problems)) if stage else "")
        problems.append(f"{stage} failed: {results.problem}" if stage else results.problem)
        if "not installed" in results.problem or time.monotonic() >= deadline:
            break
    return Result(problem="; ".join(problems))


def stages(contender: Contender) -> Iterator[tuple[str, Contender]]:
    """Yield the variants of a step with DDP in one CUDA graph, the best first. Other contenders yield themselves."""
    if not (contender.graph and contender.bucket_mb):
        yield "", contender
        return
    if contender.mode:
        yield "captured, compiled around DDP", contender
        yield "captured, compiled within DDP", replace(contender, inner=True)
    yield "captured, not compiled", replace(contender, mode="")
    if contender.mode:
        yield "compiled around DDP, not captured", replace(contender, graph=False)


def combined(results: Sequence[Result]) -> Result:
    """Combine the results of all ranks as `_slowest` does; all ranks must report the loss of the global mini-batch."""
    first_losses = results[0].losses
    return _slowest(
        [
            replace(result, problem=f"has the losses {result.losses}, rank 0 {first_losses}")
            if not (result.problem or results[0].problem)
            and repr(result.losses) != repr(first_losses)  # NaN equals NaN
            else result
            for result in results
        ]
    )


def _slowest(results: Sequence[Result]) -> Result:
    """Return the slowest step and the largest memory of all ranks, or the first failure."""
    failed = [f"rank {rank}: {result.problem}" for rank, result in enumerate(results) if result.problem]
    if failed:
        return Result(problem=failed[0])
    return replace(
        max(results, key=lambda result: result.step_ms),
        losses=results[0].losses,
        recorded=results[0].recorded,
        each_ms=tuple(result.step_ms for result in results),
        first_step_s=max(result.first_step_s for result in results),
        peak_bytes=max(result.peak_bytes for result in results),
        device_bytes=max(result.device_bytes for result in results),
    )


def rank_environment(share: Share, contender: Contender) -> dict[str, str]:
    """Return the environment of a rank's process.

    It has no variables of this process's launcher. A rank that runs alone sees only its own GPU.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    # With -m Python searches the working directory first, where a package may have the name of a module.
    kept |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_MANNERS}
    if not share.alone:
        rank, ranks = str(share.rank), str(share.ranks)
        kept |= {"MBC_RANK": rank, "MBC_RANKS": ranks, "MBC_LOCAL_RANK": rank, "MBC_LOCAL_RANKS": ranks}
        kept["MBC_JOB"] = Path(share.meeting).parent.name
    elif share.ranks > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = [str(rank) for rank in range(share.ranks)] if visible is None else visible.split(",")
        kept["CUDA_VISIBLE_DEVICES"] = "".join(shown[share.rank : share.rank + 1])
    if contender.graph:
        kept["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog could end a capture (PyTorch's manual)
    return kept | dict(contender.environment)


def _run(jobs: Sequence[Job], contender: Contender, timeout_s: float) -> list[Result]:
    """Run a process for each job, all at once; processes that die or take too long are the problem of their results."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="mbc-rank-") as folder:
        processes: list[_Process] = []
        try:
            for process in _started(jobs, contender, Path(folder)):
                processes.append(process)
            waited = _wait([process.running for process in processes], deadline)
        finally:
            for process in processes:
                _end(process.running)
        late = f"took longer than {timeout_s:.0f} s"
        results = [_result(process, waited) for process in processes]
    reasons = [result.problem for result in results if result.problem]
    own = next((reason for reason in reasons if reason != _ENDED), late)
    return [replace(result, problem=own) if result.problem == _ENDED else result for result in results]


def _started(jobs: Sequence[Job], contender: Contender, folder: Path) -> Iterator[_Process]:
    commands: list[list[str]] = []
    for job in jobs:
        files = [folder / f"{job.share.rank}.{kind}" for kind in ("job", "answer", "log")]
        files[0].write_bytes(pickle.dumps((job, contender)))
        commands.append([sys.executable, "-m", "mbc.bench.contender", *map(str, files)])
    share = jobs[0].share
    if contender.peer == MBC and jobs[0].device == "cpu" and not share.alone:  # mbc sums through MPI on CPUs
        environment = {
            name: value for name, value in rank_environment(share, contender).items() if name not in _BY_MPIEXEC
        }
        words = [word for command in commands for word in (":", "-n", "1", *command)]
        running = _start([str(mpiexec()), *words[1:]], environment | for_mpiexec(), folder / _MPI_LOG)
        yield from (_Process(running, Path(command[-2]), Path(command[-1])) for command in commands)
        return
    for job, command in zip(jobs, commands, strict=True):
        log = Path(command[-1])
        yield _Process(_start(command, rank_environment(job.share, contender), log), Path(command[-2]), log)


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as err:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=environment,
            start_new_session=True,  # one group with the compilers that it starts
        )  # fmt: skip


def _wait(running: Sequence[subprocess.Popen[bytes]], deadline: float) -> set[int]:
    """Wait until all processes have ended, a process has failed, or the time is over.

    Return those that ended by themselves.
    """
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if None not in codes:
            break
        if any(codes):  # the other ranks wait for the failed one
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_LOOK_S)
    return {process.pid for process in running if process.poll() is not None}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it started."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:  # mpiexec then ends its ranks
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_TERMINATION_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(process: _Process, ended: set[int]) -> Result:
    if process.running.pid not in ended:
        return Result(problem=_ENDED)
    if process.running.returncode == 0:
        return pickle.loads(process.answer.read_bytes())
    logs = (process.log, process.log.with_name(_MPI_LOG))
    texts = (log.read_text(encoding="utf-8", errors="replace").strip() for log in logs if log.exists())
    log = next(filter(None, texts), "").splitlines()
    return Result(problem=f"died with {process.running.returncode}: " + " | ".join(log[-LOG_LINES:]))

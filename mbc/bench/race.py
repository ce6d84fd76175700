"""The race: runs the contenders, each in a process of its own and alone on the GPU, and compares them with mbc.

mbc runs first and last, so that a drift of the machine between its two turns is visible.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mbc.bench.contender_messages import MBC, Contender, Job, Result, contenders, ddp_contenders
from mbc.bench.several_gpus import LOG_LINES, run_alone, run_ranks
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.options import MODES
from mbc.record.step import RecordedStep

# Largest relative distance of the losses of the first steps. Kernels round differently, and training increases the
# difference: PyTorch's own fp32 kernels, old and new API, differ by 1.5e-3 after three steps of ResNet-50. A wrong
# gradient, update or statistic is visible in the second loss already.
TOLERANCES = {
    Precision.FP64: 1e-6,
    Precision.FP32: 2e-3,
    Precision.TF32: 1e-2,
    Precision.BF16: 3e-2,
    Precision.FP16: 1e-2,
}
INTERRUPTED = "interrupted while it ran"


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender and its result.

    Attributes:
        contender: Contender.
        result: Its measurements.
        apart: Largest relative distance of a loss from mbc's; None without losses.
        same: Whether that distance is within the tolerance.
        alone: Measurements of one GPU with its rows alone, in a race on several GPUs.
    """

    contender: Contender
    result: Result
    apart: float | None = None
    same: bool = True
    alone: Result | None = None


@dataclass(frozen=True, slots=True)
class Race:
    """The results of a race.

    Attributes:
        ours: mbc's two turns as one, with the mean of their times.
        drift: Relative change from the first turn to the second; None without a second turn.
        tolerance: Largest relative distance of losses.
        entries: Results of the peers.
        gpus: Number of GPUs that share each mini-batch.
        ours_alone: mbc on one GPU with its rows alone, in a race on several GPUs.
        batch: Rows of the global mini-batch, in a race on several GPUs.
    """

    ours: Result
    drift: float | None
    tolerance: float
    entries: tuple[Entry, ...]
    gpus: int = 1
    ours_alone: Result | None = None
    batch: int = 0

    def best(self, peer: str) -> Entry | None:
        """Return the fastest setting of a peer that computed equal losses; None if there is none."""
        ran = [e for e in self.entries if e.contender.peer == peer and not e.result.problem and e.same]
        return min(ran, key=lambda entry: entry.result.step_ms, default=None)

    def efficiency(self, entry: Entry | None = None) -> float | None:
        """Return the time of one GPU alone over that of all GPUs; None if one of them is unknown.

        Args:
            entry: Peer; None for mbc.
        """
        result, alone = (self.ours, self.ours_alone) if entry is None else (entry.result, entry.alone)
        if alone is None or alone.problem or result.problem:
            return None
        return alone.step_ms / result.step_ms

    @property
    def fair(self) -> bool:
        """True if all contenders that ran computed equal losses."""
        return all(entry.same for entry in self.entries)


def race(
    job: Job,
    peers: Sequence[str],
    precision: Precision,
    timeout_s: float,
    say: Callable[[str], None] = lambda _: None,
    modes: Sequence[str] = MODES,
    gpus: int = 1,
) -> Race:
    """Run every setting of every peer, and mbc before and after them.

    Ctrl-C ends the race with the results so far. On several GPUs each contender also runs on one GPU, with its rows
    alone.

    Args:
        job: Network and package.
        peers: Names of the peers.
        precision: Precision of the network.
        timeout_s: Time limit of a contender.
        say: Callback for progress.
        modes: Modes of torch.compile to try.
        gpus: Number of GPUs.

    Raises:
        MbcError: MBC220, mbc itself fails.
    """
    on_gpu = job.device == "cuda"
    lanes = _Lanes(job, gpus, timeout_s, {})
    batch = job.graph().batch if gpus > 1 else 0
    say(MBC)
    ours = lanes.run(Contender(MBC))
    if ours.problem:
        raise MbcError("MBC220", f"mbc's own step cannot be timed: {ours.problem}", "see mbc doctor")
    ours_alone = lanes.alone(Contender(MBC))
    entries: list[Entry] = []
    again = ours
    try:
        for peer in peers:
            for contender in (contenders if gpus == 1 else ddp_contenders)(peer, precision, on_gpu, modes):
                say(contender.name)
                entries.append(Entry(contender, Result(problem=INTERRUPTED)))
                result = lanes.run(contender)
                entries[-1] = compared(contender, result, ours, TOLERANCES[precision])
                if not result.problem:
                    entries[-1] = replace(entries[-1], alone=lanes.alone(contender))
                if "not installed" in result.problem:
                    break
        say(f"{MBC} again")
        again = lanes.run(Contender(MBC))
    except KeyboardInterrupt:
        pass  # keep the results so far
    if again.problem or again is ours:  # keep the results of the peers
        return Race(ours, None, TOLERANCES[precision], tuple(entries), gpus, ours_alone, batch)
    both = replace(ours, step_ms=(ours.step_ms + again.step_ms) / 2, steps=ours.steps + again.steps)
    drift = again.step_ms / ours.step_ms - 1
    return Race(both, drift, TOLERANCES[precision], tuple(entries), gpus, ours_alone, batch)


def record(job: Job, gpus: int, timeout_s: float) -> RecordedStep:
    """Record mbc's step node by node, on the first of several GPUs.

    Nothing is timed meanwhile, because CUPTI takes time and memory.

    Raises:
        MbcError: MBC220, the step cannot be recorded.
    """
    result = _Lanes(replace(job, record=True), gpus, timeout_s, {}).run(Contender(MBC))
    if result.recorded is None:
        raise MbcError("MBC220", f"mbc's own step cannot be recorded: {result.problem}", "see mbc doctor")
    return result.recorded


@dataclass(frozen=True, slots=True)
class _Lanes:
    """A runner of contenders on `gpus` GPUs and on one.

    Results on one GPU do not depend on the size of buckets, and are kept in `results_alone`.
    """

    job: Job
    gpus: int
    timeout_s: float
    results_alone: dict[Contender, Result]

    def run(self, contender: Contender) -> Result:
        if self.gpus == 1:
            return run_apart(self.job, contender, self.timeout_s)
        return run_ranks(self.job, contender, self.gpus, self.timeout_s)

    def alone(self, contender: Contender) -> Result | None:
        if self.gpus == 1:
            return None
        if contender.alone not in self.results_alone:
            self.results_alone[contender.alone] = run_alone(self.job, contender, self.gpus, self.timeout_s)
        return self.results_alone[contender.alone]


def compared(contender: Contender, result: Result, ours: Result, tolerance: float) -> Entry:
    """Compare the losses of a contender with mbc's.

    Losses that are not finite on both sides count as equal; on one side only, they are infinitely far apart.
    """
    if result.problem:
        return Entry(contender, result)
    apart = max(map(_distance, result.losses, ours.losses), default=0.0)
    return Entry(contender, result, apart, apart <= tolerance and len(result.losses) == len(ours.losses))


def _distance(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    distance = abs(a - b) / max(abs(b), 1e-6)
    return distance if distance == distance else float("inf")


def run_apart(job: Job, contender: Contender, timeout_s: float) -> Result:
    """Run a contender in a process of its own; a process that dies or takes too long is the problem of its result."""
    command = [sys.executable, "-m", "mbc.bench.contender"]
    # With -m Python searches the working directory first, where a package may have the name of a module.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= dict(contender.environment)
    try:
        done = subprocess.run(
            command, input=pickle.dumps((job, contender)), capture_output=True, env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Result(problem=f"took longer than {timeout_s:.0f} s")
    if done.returncode == 0:
        return pickle.loads(done.stdout)
    log = done.stderr.decode(errors="replace").strip().splitlines()
    return Result(problem=f"died with {done.returncode}: " + " | ".join(log[-LOG_LINES:]))

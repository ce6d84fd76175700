"""Runs the contenders, each in a process of its own and alone on the GPU, and holds them against mbc.

mbc runs first and last, so that a drift of the machine between its two turns shows.
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

# How far the losses of the first steps may be apart, relatively: other kernels round otherwise, and training makes the
# difference grow: PyTorch's own fp32 kernels, old and new API, are 1.5e-3 apart after three steps of ResNet-50. A wrong
# gradient, update or statistic is seen in the second loss already.
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
    """A contender and its result. `apart`: the largest relative distance of a loss from mbc's; None where it has none.
    `same`: whether that is within the tolerance. `alone`, of a race on several GPUs: the part of one GPU by itself."""

    contender: Contender
    result: Result
    apart: float | None = None
    same: bool = True
    alone: Result | None = None


@dataclass(frozen=True, slots=True)
class Race:
    """`ours` is mbc's two turns as one: the mean of their times. `drift`: of the second turn from the first,
    relatively; None where there was no second. `gpus` share each mini-batch; where they are several, of `batch`
    rows, and `ours_alone` is mbc's part of one GPU by itself."""

    ours: Result
    drift: float | None
    tolerance: float
    entries: tuple[Entry, ...]
    gpus: int = 1
    ours_alone: Result | None = None
    batch: int = 0

    def best(self, peer: str) -> Entry | None:
        """The fastest of a peer's settings that computed the same; None where none did."""
        ran = [e for e in self.entries if e.contender.peer == peer and not e.result.problem and e.same]
        return min(ran, key=lambda entry: entry.result.step_ms, default=None)

    def efficiency(self, entry: Entry | None = None) -> float | None:
        """How much of a GPU's speed is left where all share a mini-batch: its time alone over theirs; of mbc, where
        there is no `entry`. None where either is not known."""
        result, alone = (self.ours, self.ours_alone) if entry is None else (entry.result, entry.alone)
        if alone is None or alone.problem or result.problem:
            return None
        return alone.step_ms / result.step_ms

    @property
    def fair(self) -> bool:
        """Whether everybody that ran computed the same."""
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
    """Every setting of every peer in turn, of torch.compile those in `modes`. Ctrl-C ends the race with what was timed.
    On several GPUs each runs on one of them, too, with the rows that it has of all. Raises MBC220 where mbc itself
    fails."""
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
                found = lanes.run(contender)
                entries[-1] = compared(contender, found, ours, TOLERANCES[precision])
                if not found.problem:
                    entries[-1] = replace(entries[-1], alone=lanes.alone(contender))
                if "not installed" in found.problem:
                    break
        say(f"{MBC} again")
        again = lanes.run(Contender(MBC))
    except KeyboardInterrupt:
        pass  # what has been timed is worth keeping
    if again.problem or again is ours:  # what the others took is worth keeping all the same
        return Race(ours, None, TOLERANCES[precision], tuple(entries), gpus, ours_alone, batch)
    both = replace(ours, step_ms=(ours.step_ms + again.step_ms) / 2, steps=ours.steps + again.steps)
    drift = again.step_ms / ours.step_ms - 1
    return Race(both, drift, TOLERANCES[precision], tuple(entries), gpus, ours_alone, batch)


def record(job: Job, gpus: int, timeout_s: float) -> RecordedStep:
    """mbc's step node by node; of several GPUs on the first. Not while anything is timed: CUPTI takes time
    and memory of its own. Raises MBC220 where that fails."""
    found = _Lanes(replace(job, record=True), gpus, timeout_s, {}).run(Contender(MBC))
    if found.recorded is None:
        raise MbcError("MBC220", f"mbc's own step cannot be recorded: {found.problem}", "see mbc doctor")
    return found.recorded


@dataclass(frozen=True, slots=True)
class _Lanes:
    """How contenders are run: on `gpus`, and on one. `known`: what ran alone, whatever its buckets."""

    job: Job
    gpus: int
    timeout_s: float
    known: dict[Contender, Result]

    def run(self, contender: Contender) -> Result:
        if self.gpus == 1:
            return run_apart(self.job, contender, self.timeout_s)
        return run_ranks(self.job, contender, self.gpus, self.timeout_s)

    def alone(self, contender: Contender) -> Result | None:
        if self.gpus == 1:
            return None
        if contender.alone not in self.known:
            self.known[contender.alone] = run_alone(self.job, contender, self.gpus, self.timeout_s)
        return self.known[contender.alone]


def compared(contender: Contender, found: Result, ours: Result, tolerance: float) -> Entry:
    """Losses that are not finite on both sides count as equal; on one side they are infinitely far apart."""
    if found.problem:
        return Entry(contender, found)
    apart = max(map(_distance, found.losses, ours.losses), default=0.0)
    return Entry(contender, found, apart, apart <= tolerance and len(found.losses) == len(ours.losses))


def _distance(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    distance = abs(a - b) / max(abs(b), 1e-6)
    return distance if distance == distance else float("inf")


def run_apart(job: Job, contender: Contender, timeout_s: float) -> Result:
    """In a process of its own. A process that dies or takes too long is the problem of the result."""
    command = [sys.executable, "-m", "mbc.bench.contender"]
    # With -m Python looks in the working directory first, where a package may be called as a module is.
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

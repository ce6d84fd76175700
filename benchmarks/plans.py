"""Many plans made and built side by side. The steps of different plans are timed one after another.

Plans of one network under several limits often have equal steps; such a step is built and run once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ahead import build, failure_of
from modules import Job
from planner import processes
from shelf import pack
from stepping import time_packages

from mbc.plan.model import Copy, Plan
from mbc.plan.summary import OperationSummary, summarise
from mbc.report.devices import library_launches


@dataclass(frozen=True)
class Planned:
    """The figures of a job's plan, or the reason why there is none.

    Attributes:
        step: Digest, equal for plans with equal steps.
        predicted_ms: Predicted time of the step.
        operations: Operations of the step.
        failed: Why there is no plan; empty if there is one.
        interval_ms: Ends of the prediction interval.
        library_launches: Launches of libraries' kernels.
    """

    step: str
    predicted_ms: float
    operations: tuple[OperationSummary, ...]
    failed: str = ""
    interval_ms: tuple[float, float] = (0.0, 0.0)
    library_launches: int = 0

    @property
    def divided(self) -> int:
        """Number of operations that are divided into several parts."""
        return sum(len(o.micro_batches) > 1 for o in self.operations)


def step_digest(plan: Plan) -> str:
    """Return a digest of the launches of a plan's step in their order. Addresses and inference do not count."""
    digest = hashlib.sha256(repr((plan.graph.name, plan.graph.batch, plan.graph.precision)).encode())
    for launch in plan.train.launches:
        work = launch.work
        what = ("copy",) if isinstance(work, Copy) else (work.provider, work.name, work.settings)
        buffers = (plan.buffers[access.buffer] for access in launch.accesses)
        rows = [(a.rows.start, a.rows.stop, str(a.mode)) for a in launch.accesses]
        kept = [(b.value, str(b.layout), str(b.dtype), b.size_bytes) for b in buffers]
        digest.update(repr((what, launch.operations, str(launch.stream), rows, kept)).encode())
    return digest.hexdigest()[:16]


def make_plan(job: Job, folder: Path) -> Planned:
    """Plan one job; the first plan of a step is left in `folder` as STEP.json.gz. Failures are returned, not raised."""
    try:
        plan = job.plan()
    except Exception as error:
        return Planned("", 0.0, (), f"{type(error).__name__}: {error}")
    step = step_digest(plan)
    path = folder / f"{step}.json.gz"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(pack(plan))
        part.replace(path)
    p = plan.predictions
    return Planned(
        step, p.train_us / 1e3, summarise(plan, plan.train),
        interval_ms=(p.train_low_us / 1e3, p.train_high_us / 1e3), library_launches=library_launches(plan),
    )  # fmt: skip


def make_plans(jobs: Mapping[str, Job], folder: Path, workers: int) -> dict[str, Planned]:
    """Return the plans by the names of the jobs, each made in a process of its own."""
    with processes(workers) as pool:
        waiting = {name: pool.submit(make_plan, job, folder) for name, job in jobs.items()}
        return {name: _planned(future) for name, future in waiting.items()}


def _planned(future: Future[Planned]) -> Planned:
    try:
        return future.result()
    except Exception as error:  # the process died
        return Planned("", 0.0, (), f"{type(error).__name__}: {error}")


def run_steps(
    steps: Iterable[str], folder: Path, workers: int, count: int, runs: int = 1, digest_after: int = 0
) -> list[dict[str, dict[str, Any]]]:
    """Return for each run, by step, the result of `stepping.time_package`, or `failed`.

    Packages of the plans in `folder` are built side by side and timed one after another.
    """
    wanted = list(dict.fromkeys(step for step in steps if step))
    with processes(workers) as pool:
        waiting = {step: pool.submit(build, folder / f"{step}.json.gz", folder / step) for step in wanted}
        failed = {step: failure_of(future) for step, future in waiting.items()}
    packages = {step: folder / step for step in wanted if not failed[step]}
    print(f"{len(wanted)} different steps, {len(packages)} of them built", flush=True)
    unbuilt = {step: {"failed": why} for step, why in failed.items() if why}
    return [{**time_packages(packages, count, digest_after), **unbuilt} for _ in range(runs)]

"""Planning time and predicted step of networks within smaller and smaller parts of their memory. Needs no GPU.

Budgets are shares of the arena of the plan without a limit, beside what the GPU's context takes. Each row has the CPU
seconds of one plan or refusal, the predicted step over the lower bound of all plans within the budget, and the arena.
A row with `less_is_faster` breaks the rule that more memory is never slower: the results have a faster plan for less
memory. To compare two checkouts, run the script of one with the other in PYTHONPATH. `--drawn 40` plans 40 drawn
networks of 20 to 60 launches instead, each at 20 budgets. `--for 600` begins no network after 600 CPU seconds.

    python benchmarks/planner_curve.py [--only NAME ...] [--shares 0.8 0.45 ...] [--again]
    python benchmarks/planner_curve.py --drawn 40 [--for 600]
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from drawn_networks import drawn_network
from imported_sources import written
from modules import Job, example
from record import Results, attempt, results, show, start

from mbc.errors import BudgetError
from mbc.plan.model import Plan
from mbc.source import Source

SHARES = (0.98, 0.93, 0.8, 0.6, 0.5, 0.45, 0.33, 0.3)
LIMIT_S = 180  # CPU seconds after which a plan is given up
# By name: the example, and its settings.
NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "resnet18 32": ("resnet", {"depth": "18", "batch": "32"}),
    "resnet50 64": ("resnet", {"depth": "50", "batch": "64"}),
    "resnet 1200 layers 1": ("resnet_deep", {"n1": "6", "n2": "32", "n3": "356", "n4": "6", "batch": "1"}),
    "densenet121 32": ("densenet121", {"batch": "32"}),
    "inception_v4 32": ("inception_v4", {"batch": "32"}),
    "mobilenet_v2 64": ("mobilenet_v2", {"batch": "64"}),
    "unet 16": ("unet", {"batch": "16"}),
    "alexnet 256": ("alexnet", {"batch": "256"}),
    "nnunet 2": ("nnunet", {}),
    "nnunet_resenc 2": ("nnunet_resenc", {}),
    "vgg16 64": ("vgg16", {"batch": "64"}),
    "googlenet 64": ("googlenet", {"batch": "64"}),
    "efficientnet_b0 64": ("torchvision/efficientnet_b0", {}),
}


def planned(job: Job, budget_bytes: int | None) -> tuple[Plan | BudgetError, float]:
    """Return the plan of a job within a budget, or the refusal, and the CPU seconds it took."""
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        here = job if budget_bytes is None else job.with_settings(("memory.device", f"{budget_bytes} B"))
        return here.plan(), time.process_time() - started
    except BudgetError as refusal:
        return refusal, time.process_time() - started
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def job_of(name: str) -> Job:
    """Return the job of a network, in bf16; a network of torchvision is imported."""
    network, settings = NETWORKS[name]
    if "/" not in network:
        return example(network, ("train.precision", "bf16"), *settings.items())
    path = written(network)
    return Job(name, Source(path.name, path.read_text("utf-8")), (("train.precision", "bf16"),), path.stem)


def curve(name: str, job: Job, shares: Sequence[float], table: Results) -> None:
    """Plan a network without a limit, and at the shares that the table lacks, smallest share first."""
    names = {share: f"{name} at {100 * share:.4g}%" for share in sorted(shares)}
    lacking = [share for share, row in names.items() if not table.done(row)]
    if not lacking:
        return
    free, cpu_s = planned(job, None)
    assert isinstance(free, Plan)
    predictions = free.predictions
    whole = {"cpu_s": cpu_s, "step_ms": predictions.train_us / 1e3, "arena_bytes": predictions.arena_bytes}
    table.put({"name": f"{name} at 100%", **whole})

    def within(share: float) -> dict[str, Any]:
        plan, cpu_s = planned(job, int(share * predictions.arena_bytes) + predictions.overhead_bytes)
        row: dict[str, Any] = {"cpu_s": cpu_s}
        if isinstance(plan, BudgetError):
            needed_bytes = plan.needed_bytes - predictions.overhead_bytes
            return {**row, "refused": plan.code, "needed_share": needed_bytes / predictions.arena_bytes}
        step_us = plan.predictions.train_us
        row |= {"step_ms": step_us / 1e3, "over_bound": step_us / plan.bounds.within_budget_us - 1}
        return {**row, "arena_share": plan.predictions.arena_bytes / predictions.arena_bytes}

    for share in lacking:
        row = attempt(lambda share=share: within(share), names[share])
        less = [table.rows[r].get("step_ms", math.inf) for s, r in names.items() if s < share and r in table.rows]
        table.put({**row, "less_is_faster": row.get("step_ms", 0.0) > min(less, default=math.inf)})


def drawn_jobs(count: int, only: Sequence[str] = ("",)) -> Iterator[tuple[str, Job]]:
    """Yield small drawn networks, each for its own GPU and in its own precision.

    Only those whose names are in `only` are yielded; all if it has an empty text.
    """
    for number in range(count):
        if "" not in only and f"drawn {number}" not in only:
            continue
        drawn = drawn_network(random.Random(number))
        settings = (("train.precision", drawn.precision),)
        yield (
            f"drawn {number}",
            replace(Job(f"drawn{number}", Source("drawn.mbc", drawn.source), settings), gpu=drawn.gpu),
        )


def main() -> None:
    """Plan the networks that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="networks whose names contain one of these")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--drawn", type=int, help="number of drawn networks to plan instead")
    parser.add_argument("--for", dest="for_s", type=float, default=math.inf, help="CPU seconds, then none begins")
    parser.add_argument("--again", action="store_true", help="plan also what the results have")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPROF, _give_up)
    file = "planner_curve" if arguments.drawn is None else "planner_curve_drawn"
    table = results(file, again=arguments.again, planned_for="h200")
    named = ((name, replace(job_of(name), gpu="h200")) for name in NETWORKS if any(o in name for o in arguments.only))
    shares = [0.98 - 0.034 * k for k in range(20)] if arguments.drawn else arguments.shares
    for name, job in named if arguments.drawn is None else drawn_jobs(arguments.drawn, arguments.only):
        if time.process_time() < arguments.for_s:
            curve(name, job, shares, table)
    show(
        list(table.rows.values()), ["name", "cpu_s", "step_ms", "over_bound", "arena_share", "refused", "needed_share"]
    )


def _give_up(*_: object) -> None:
    raise TimeoutError(f"no plan in {LIMIT_S} CPU seconds")


if __name__ == "__main__":
    start(main)

"""Planning time and predicted step of networks within smaller and smaller parts of their memory. Needs no GPU.

Budgets are shares of the arena of the plan without a limit, beside what the GPU's context takes. Each row has the CPU
seconds of one plan or refusal, the predicted step over the lower bound of all plans within the budget, and the arena.
A row with `less_is_faster` breaks the rule that more memory is never slower. Two checkouts are compared by running
the script of one with the other in PYTHONPATH.

    python benchmarks/planner_curve.py [--only NAME ...] [--shares 0.8 0.45 ...] [--again]
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from dataclasses import replace
from typing import Any

from modules import Job, example
from record import attempt, results, show, start

from mbc.errors import BudgetError
from mbc.plan.model import Plan

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


def curve(name: str, shares: list[float], gpu: str) -> list[dict[str, Any]]:
    """Return the rows of one network, with all of its memory first."""
    network, settings = NETWORKS[name]
    job = replace(example(network, ("train.precision", "bf16"), *settings.items()), gpu=gpu)
    free, cpu_s = planned(job, None)
    assert isinstance(free, Plan)
    predictions = free.predictions

    def within(share: float) -> dict[str, Any]:
        plan, cpu_s = planned(job, int(share * predictions.arena_bytes) + predictions.overhead_bytes)
        row: dict[str, Any] = {"cpu_s": cpu_s}
        if isinstance(plan, BudgetError):
            needed_bytes = plan.needed_bytes - predictions.overhead_bytes
            return {**row, "refused": plan.code, "needed_share": needed_bytes / predictions.arena_bytes}
        step_us = plan.predictions.train_us
        row |= {"step_ms": step_us / 1e3, "over_bound": step_us / plan.bounds.within_budget_us - 1}
        return {**row, "arena_share": plan.predictions.arena_bytes / predictions.arena_bytes}

    rows = [attempt(lambda share=share: within(share), f"{name} at {share:.0%}") for share in sorted(shares)]
    least_ms = math.inf
    for row in rows:
        row["less_is_faster"] = row.get("step_ms", 0.0) > least_ms
        least_ms = min(least_ms, row.get("step_ms", math.inf))
    whole = {"cpu_s": cpu_s, "step_ms": predictions.train_us / 1e3, "arena_bytes": predictions.arena_bytes}
    return [{"name": f"{name} at 100%", **whole}, *reversed(rows)]


def main() -> None:
    """Plan the networks that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="networks whose names contain one of these")
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--gpu", default="h200", help="what to plan for (default h200)")
    parser.add_argument("--again", action="store_true", help="plan also what the results have")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPROF, _give_up)
    table = results("planner_curve", again=arguments.again, planned_for=arguments.gpu)
    for name in NETWORKS:
        if any(only in name for only in arguments.only) and not table.done(f"{name} at 100%"):
            for row in curve(name, arguments.shares, arguments.gpu):
                table.put(row)
    show(
        list(table.rows.values()), ["name", "cpu_s", "step_ms", "over_bound", "arena_share", "refused", "needed_share"]
    )


def _give_up(*_: object) -> None:
    raise TimeoutError(f"no plan in {LIMIT_S} CPU seconds")


if __name__ == "__main__":
    start(main)

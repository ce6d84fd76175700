"""The effect of `deterministic = true`: the same bits in every run, and its price in time.

Each network is planned with and without it. Each package is opened several times, each time in a new process, and makes
some steps from equal states; the bits of all states are compared. Without `deterministic` the bits may differ.

    python benchmarks/deterministic.py [--profile FILE] [--precisions fp32,tf32,bf16] [--only NAME ...] [--runs 3]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from modules import Job, example
from plans import Planned, make_plans, run_steps
from record import need_gpu, show, start, write

NETWORKS = {"resnet18": ("resnet", (("batch", "128"),)), "alexnet": ("alexnet", (("batch", "256"),))}
DIGEST_AFTER = 5  # steps


def jobs(arguments: argparse.Namespace) -> dict[tuple[str, str, bool], Job]:
    """Return the jobs by network, precision, and whether they are deterministic."""
    result: dict[tuple[str, str, bool], Job] = {}
    for name, (source, settings) in NETWORKS.items():
        for precision in arguments.precisions.split(","):
            for fixed in (False, True):
                pairs = (("train.precision", precision), ("train.deterministic", str(fixed).lower()))
                job = replace(example(source, *settings, *pairs), gpu=arguments.gpu)
                if not arguments.only or name in arguments.only:
                    result[name, precision, fixed] = job.with_options(profile=arguments.profile)
    return result


def row_of(
    name: str, precision: str, free: Planned, fixed: Planned, runs: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Return the row of a network; `runs` has figures by step for each run.

    `price` is the time of the deterministic step over the time of the other step.
    """
    row: dict[str, Any] = {"name": f"{name} {precision}", "price_predicted": None, "price": None}
    for label, created in (("free", free), ("deterministic", fixed)):
        result = [run.get(created.step, {"failed": created.failed or "not run"}) for run in runs]
        row[f"{label}_predicted_ms"] = created.predicted_ms or None
        row[f"{label}_ms"] = min((f["step_ms"] for f in result if "step_ms" in f), default=None)
        if failed := [f["failed"] for f in result if "failed" in f]:
            row["failed"] = failed[0]
        elif result:
            row[f"{label}_states"] = states = [f["states"] for f in result]
            row[f"{label}_equal"] = len(set(states)) == 1
    row["same_plan"] = free.step == fixed.step
    for suffix in ("_predicted", ""):
        before, after = row[f"free{suffix}_ms"], row[f"deterministic{suffix}_ms"]
        if before and after:
            row[f"price{suffix}"] = after / before
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    parser.add_argument("--only", nargs="*", default=[], choices=list(NETWORKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed, in each run")
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="plans made and built side by side")
    parser.add_argument("--plan-only", action="store_true", help="the price as predicted only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    wanted = jobs(arguments)
    runs: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        created = make_plans({str(key): job for key, job in wanted.items()}, folder, arguments.workers)
        planned = {key: created[str(key)] for key in wanted}
        steps = [p.step for p in planned.values()]
        if not arguments.plan_only:
            runs = run_steps(steps, folder, arguments.workers, arguments.steps, arguments.runs, DIGEST_AFTER)
    rows = [
        row_of(name, precision, planned[name, precision, False], planned[name, precision, True], runs)
        for name, precision in dict.fromkeys(key[:2] for key in wanted)
    ]
    path = write("deterministic", rows, runs=len(runs), steps_compared=DIGEST_AFTER)
    show(
        rows,
        ["name", "free_predicted_ms", "deterministic_predicted_ms", "price_predicted", "free_ms", "deterministic_ms",
         "price", "free_equal", "deterministic_equal", "same_plan"],
    )  # fmt: skip
    print(path.name)


if __name__ == "__main__":
    start(main)

"""Predicted and measured step time and arena of every example network that fits the GPU.

Plans come from a profile, as `mbc compile` makes them. A step is timed with its inputs in device memory. Their copies
into the arena are part of the measured time, but not of the prediction.

    python benchmarks/predictions.py [--profile FILE] [--precisions fp32,tf32,bf16] [--only NAME ...] [--steps 30]
                                     [--plan-only]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from modules import Job, examples
from plans import Planned, make_plans, run_steps
from record import need_gpu, show, start, write

LONG_MS = 5.0
WITHIN_LONG, WITHIN_SHORT = 0.05, 0.10  # of the measured time


def jobs(arguments: argparse.Namespace) -> dict[str, Job]:
    """Return the jobs of every example in every precision, and of the deeper ResNets that pages show."""
    result: dict[str, Job] = {}
    for example in examples():
        variants = {example.name: example}
        if example.name == "resnet":
            variants["resnet50"] = example.with_settings(("depth", "50"))
        for name, job in variants.items():
            for precision in arguments.precisions.split(","):
                if not arguments.only or name in arguments.only:
                    created = replace(job, gpu=arguments.gpu).with_settings(("train.precision", precision))
                    result[f"{name} {precision}"] = created.with_options(profile=arguments.profile)
    return result


def row_of(name: str, planned: Planned, timed: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a plan and its measured step.

    `passed`: whether the prediction is within the limit and the arena has the planned size.
    """
    row: dict[str, Any] = {"name": name, "predicted_ms": planned.predicted_ms or None, **timed}
    row["divided_operations"] = planned.divided
    if planned.failed:
        row["failed"] = planned.failed
    if "step_ms" in timed:
        row["predicted_over_measured"] = ratio = planned.predicted_ms / timed["step_ms"]
        row["allowed"] = WITHIN_LONG if timed["step_ms"] >= LONG_MS else WITHIN_SHORT
        row["arena_equal"] = timed["arena_predicted"] == timed["arena_taken"]
        row["passed"] = abs(ratio - 1) <= row["allowed"] and row["arena_equal"]
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="plans made and built side by side")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    wanted = jobs(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planned = make_plans(wanted, folder, arguments.workers)
        timed: dict[str, dict[str, Any]] = {}
        if not arguments.plan_only:
            steps = [created.step for created in planned.values()]
            (timed,) = run_steps(steps, folder, arguments.workers, arguments.steps)
    rows = [row_of(name, created, timed.get(created.step, {})) for name, created in planned.items()]
    show(
        rows,
        ["name", "predicted_ms", "step_ms", "spread_ms", "predicted_over_measured", "allowed", "measured_share",
         "divided_operations", "arena_equal", "passed"],
    )  # fmt: skip
    for precision in arguments.precisions.split(","):
        these = [r for r in rows if r["name"].endswith(f" {precision}")]
        ran = sum("predicted_over_measured" in r for r in these)
        passed = sum(bool(r.get("passed")) for r in these)
        print(write(f"predictions_{precision}", these, passed=passed, of=ran).name)


if __name__ == "__main__":
    start(main)

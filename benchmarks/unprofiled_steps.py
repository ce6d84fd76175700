"""Steps of a GPU that poses, predicted without any profile, beside measured ones.

Twelve networks train in bf16 on this GPU as sm_80, as sm_86, and on 64 of its multiprocessors as sm_80. Their plans see
no profile: times are estimates, as for a GPU that nobody has measured. Estimates were fitted to four of the networks as
sm_80 (`posed_kernels.py`), and to none of the others. Libraries do not pose; `library_launches` counts theirs.

    python benchmarks/unprofiled_steps.py [--only NAME ...] [--workers N] [--again]
    python benchmarks/unprofiled_steps.py --plan-only [--gpu h200] [--only NAME ...]

`error` is the distance of the predicted step from the measured one, `within` whether the step is in its prediction
interval. Asked are a median error of at most 15 % and a worst one of 35 %, which the last lines compare.

Writes `results/unprofiled_steps.json`, with `--plan-only` `results/unprofiled_steps_planned.json`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modules import Job, median
from plans import Planned, make_plans, run_steps
from posed import CASES, Case
from posed_kernels import NETWORKS
from record import need_gpu, results, show, start

from mbc.source import Source

POSES = ("@sm_80", "@64@sm_80", "@sm_86")
MEDIAN_ERROR, WORST_ERROR = 0.15, 0.35
COLUMNS = (
    "name", "fitted", "predicted_ms", "low_ms", "high_ms", "step_ms", "spread_ms", "error", "within",
    "library_launches",
)  # fmt: skip


def cases() -> dict[str, Case]:
    """Return the networks: those of `posed.py` as sm_80 with any kernel, and one more."""
    suffix = " sm_80, any kernel"
    named = {name.removesuffix(suffix): case for name, case in CASES.items() if name.endswith(suffix)}
    batch, half = ("batch", "128"), ("train.precision", "bf16")
    return {**named, "googlenet 128": Case("googlenet", "sm_80", 0.0, (batch, half))}


def jobs(gpu: str, only: Sequence[str]) -> dict[str, Job]:
    """Return the jobs whose names contain one of the words, by name; all jobs without words.

    A network that cannot be imported here is left out, with a message.
    """
    wanted: dict[str, Job] = {}
    for name, case in cases().items():
        rows = {f"{name} as {pose[1:]}": f"{gpu}{pose}" for pose in POSES}
        rows = {row: posed for row, posed in rows.items() if not only or any(word in row for word in only)}
        try:
            source = Source(case.path.name, case.path.read_text(encoding="utf-8")) if rows else None
        except SystemExit as why:
            print(f"{name} is left out: {why}")
            continue
        if source is not None:
            wanted |= {row: Job(name, source, case.settings, gpu=posed) for row, posed in rows.items()}
    return wanted


def row_of(name: str, planned: Planned, timed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a plan and its measured step."""
    fitted = any(name.startswith(network) for network, *_ in NETWORKS)
    row: dict[str, Any] = {"name": name, "fitted": fitted, **timed}
    if planned.failed:
        return {**row, "failed": planned.failed}
    low_ms, high_ms = planned.interval_ms
    row |= {"predicted_ms": planned.predicted_ms, "low_ms": low_ms, "high_ms": high_ms}
    row["library_launches"] = planned.library_launches
    if "step_ms" in timed:
        row["error"] = abs(planned.predicted_ms / timed["step_ms"] - 1)
        row["within"] = low_ms <= timed["step_ms"] <= high_ms
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst error, how many steps are in their intervals, and whether that was asked for."""
    errors = [row["error"] for row in rows if "error" in row]
    if not errors:
        return {}
    within = sum(row["within"] for row in rows if "within" in row)
    figures = {"median_error": median(errors), "worst_error": max(errors), "within": within, "of": len(errors)}
    return {**figures, "passed": figures["median_error"] <= MEDIAN_ERROR and figures["worst_error"] <= WORST_ERROR}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="rows whose names contain a word")
    parser.add_argument("--gpu", default="auto", help="the GPU that poses (default: that of this machine)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="plans made and built side by side")
    parser.add_argument("--again", action="store_true", help="also rows that have results")
    parser.add_argument("--plan-only", action="store_true", help="predictions only; needs no GPU")
    arguments = parser.parse_args()
    if not arguments.plan_only:
        need_gpu("--plan-only --gpu h200 predicts without running")
    kept = results("unprofiled_steps_planned" if arguments.plan_only else "unprofiled_steps", arguments.again)
    wanted = {name: job for name, job in jobs(arguments.gpu, arguments.only).items() if not kept.done(name)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_DATA_HOME"] = name  # the user's own profiles are not there
        planned = make_plans(wanted, folder, arguments.workers)
        timed: dict[str, dict[str, Any]] = {}
        if not arguments.plan_only:
            (timed,) = run_steps([p.step for p in planned.values()], folder, arguments.workers, arguments.steps)
    for row, plan in planned.items():
        kept.put(row_of(row, plan, timed.get(plan.step, {})))
    rows = list(kept.rows.values())
    show(rows, COLUMNS)
    for chosen, where in ((rows, "all steps"), ([row for row in rows if not row["fitted"]], "steps of other networks")):
        print(f"{where}: {summary(chosen)}")


if __name__ == "__main__":
    start(main)

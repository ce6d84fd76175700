"""All results on correctness, computed by today's code. One call does what it can in its time; the next call continues.

Stages that time nothing share the GPU and run side by side, the most important first. Stages that time steps or read
the memory in use run alone afterwards. Results of today's code in this run's folder or in the checkout are not computed
again. `results/correctness.json` has the duration of each stage. Files go to `MBC_RESULTS`.

Estimates on one H100 or H200 with 16 cores, in seconds, if a stage runs alone. They come from `correctness.json` if it
has the stage, otherwise from the dates of the committed results:

    side by side, some 300 together: gradients 200, gradients_batch64 60, thousand_steps 110, steps20 40,
                                     training_loss 100, digits 70, sanitizer 500
    alone:                           memory 70, deterministic 150, predictions_fp32 60, predictions_bf16 50
    on two cores, --device cpu:      gradients_cpu 800, digits_cpu 180, side by side

Predictions use the profile that mbc has for the GPU. mbc comes with a profile of the H200 and none of the H100; on an
H100 predictions are estimates, and their rows do not pass.

    python benchmarks/correctness.py [--for 540] [--device cuda|cpu] [--only STAGE ...] [--list]
    MBC_RESULTS=/tmp/results python benchmarks/correctness.py --for 540; tar czf results.tgz -C /tmp/results .
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, Results, need_gpu, results, show, start
from stale import older

from mbc.provenance import digests

HERE = Path(__file__).resolve().parent
GRACE_S = 5.0  # to write the results so far, after a stage is asked to end
LEAST_SHARE = 0.6  # of a stage's estimate that must be left for it to begin


@dataclass(frozen=True)
class Stage:
    """One script whose results show whether mbc computes correctly.

    Attributes:
        name: Name of the stage.
        command: A script of this folder and its arguments.
        files: Results that the script writes.
        estimate_s: Seconds that it takes if nothing else runs.
        alone: Nothing else may run at the same time.
    """

    name: str
    command: tuple[str, ...]
    files: tuple[str, ...]
    estimate_s: float
    alone: bool = False

    def line(self) -> list[str]:
        """Return the command line."""
        script, *arguments = self.command
        return [sys.executable, str(HERE / script), *arguments]


STAGES = {
    "cuda": (
        Stage(
            "gradients",
            ("gradients.py", "--devices", "cuda", "--precisions", "fp32,tf32,bf16,fp16", "--network-precisions",
             "fp32", "--draws", "9", "--norm-values", "128", "--resume"),
            ("gradients_cuda.json",), 200,
        ),
        Stage("thousand_steps", ("thousand_steps.py",), ("thousand_steps.json",), 110),
        Stage("steps20", ("steps20.py",), ("steps20.json",), 40),
        Stage("training_loss", ("training_loss.py",), ("training_loss.json",), 100),
        Stage("digits", ("digits.py", "--device", "cuda"), ("digits_cuda.json",), 70),
        Stage(
            "gradients_batch64",
            ("gradients.py", "--devices", "cuda", "--kinds", "network", "--network-precisions", "fp32", "--only",
             "vgg16", "alexnet", "--batch", "64", "--draws", "9", "--name", "gradients_cuda_batch64", "--resume"),
            ("gradients_cuda_batch64.json",), 60,
        ),
        Stage("sanitizer", ("sanitizer.py",), ("sanitizer.txt",), 500),
        Stage("memory", ("memory.py",), ("memory_fp32.json",), 70, alone=True),
        Stage("deterministic", ("deterministic.py", "--steps", "5"), ("deterministic.json",), 150, alone=True),
        Stage(
            "predictions_fp32", ("predictions.py", "--precisions", "fp32", "--steps", "20"),
            ("predictions_fp32.json",), 60, alone=True,
        ),
        Stage(
            "predictions_bf16", ("predictions.py", "--precisions", "bf16", "--steps", "20"),
            ("predictions_bf16.json",), 50, alone=True,
        ),
    ),
    "cpu": (
        Stage("digits_cpu", ("digits.py", "--device", "cpu", "--precisions", "fp32,bf16"), ("digits_cpu.json",), 160),
        Stage("gradients_cpu", ("gradients.py", "--devices", "cpu", "--resume"), ("gradients_cpu.json",), 800),
    ),
}  # fmt: skip


@dataclass
class Running:
    """A stage that runs, the file of its output, and the time when it began."""

    stage: Stage
    process: subprocess.Popen[str]
    log: Path
    began: float


def begin(stage: Stage, logs: Path) -> Running:
    """Start a stage."""
    log = logs / f"{stage.name}.log"
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            stage.line(), stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "MBC_RESULTS": str(RESULTS)},
        )  # fmt: skip
    print(f"{stage.name} begins", flush=True)
    return Running(stage, process, log, time.monotonic())


def end(running: Running) -> None:
    """Stop a stage and its child processes."""
    for what in (signal.SIGTERM, signal.SIGKILL):
        if running.process.poll() is None:
            os.killpg(running.process.pid, what)
            try:
                running.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def finished(running: Running) -> dict[str, Any]:
    """Return the stage's row: whether it ran to its end, and how many of its rows pass."""
    stage = running.stage
    row: dict[str, Any] = {"name": stage.name, "seconds": round(time.monotonic() - running.began, 1)}
    rows = [one for file in stage.files for one in rows_of(RESULTS / file)]
    failed = [one["name"] for one in rows if "failed" in one]
    row |= {"exit": running.process.returncode, "rows": len(rows)}
    row["not_passed"] = sorted({str(one["name"]) for one in rows if one.get("passed") is False})
    # Existing files may be older ones.
    lacking = [file for file in stage.files if not (RESULTS / file).exists() or older(RESULTS / file, digests())]
    if lacking or failed:
        tail = running.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        row["failed"] = f"{lacking[0]} was not written" if lacking else f"rows failed: {', '.join(map(str, failed))}"
        row["log"] = tail
    return row


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file, none if there is no such file."""
    if path.suffix != ".json" or not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def run(stages: Sequence[Stage], held: Results, deadline: float, logs: Path) -> None:
    """Run stages side by side until the deadline."""
    running = [begin(stage, logs) for stage in stages]
    try:
        while running:
            for one in list(running):
                late = time.monotonic() > deadline
                if one.process.poll() is None and not late:
                    continue
                if one.process.poll() is None:
                    end(one)
                    row = {"name": one.stage.name, "seconds": round(time.monotonic() - one.began, 1)}
                    row["failed"] = "cut off: run this again"
                else:
                    row = finished(one)
                running.remove(one)
                held.put(row)
                show([row], ["name", "seconds", "exit", "rows", "not_passed"])
            time.sleep(0.2)
    finally:
        for one in running:
            end(one)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="for_s", type=float, default=540.0, metavar="S", help="end after S seconds")
    parser.add_argument("--device", default="cuda", choices=tuple(STAGES))
    parser.add_argument("--only", nargs="*", default=[], metavar="STAGE")
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    parser.add_argument("--list", action="store_true", help="say what is missing, and run nothing")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.for_s - 2 * GRACE_S
    earlier = results("correctness")
    held = results("correctness", arguments.again, current=True)
    wanted = [s for s in STAGES[arguments.device] if not arguments.only or s.name in arguments.only]
    missing = [stage for stage in wanted if not held.done(stage.name)]

    def estimate_s(stage: Stage) -> float:
        return float(earlier.rows[stage.name]["seconds"]) if earlier.done(stage.name) else stage.estimate_s

    for stage in missing:
        print(f"{stage.name}: to be made, some {estimate_s(stage):.0f} s")
    if arguments.list:
        return
    if arguments.device == "cuda":
        need_gpu("--device cpu makes the results that need none")
    logs = ROOT / "build" / "correctness"
    logs.mkdir(parents=True, exist_ok=True)
    run([stage for stage in missing if not stage.alone], held, deadline, logs)
    for stage in missing:
        left_s = deadline - time.monotonic()
        if stage.alone and left_s > LEAST_SHARE * estimate_s(stage):
            run([stage], held, deadline, logs)
    held.arrange([stage.name for stages in STAGES.values() for stage in stages])
    left = [stage.name for stage in wanted if not held.done(stage.name)]
    print(f"left: {', '.join(left)}; run this again" if left else "all are made; benchmarks/stale.py says the same")


if __name__ == "__main__":
    start(main)

"""Steps with a concurrent stream and without (`--without concurrent_stream`), and whether the bits are the same.

python benchmarks/concurrent_stream.py [--profile FILE] [--only NAME ...] [--runs 2] [--steps 60]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from modules import example
from plans import Planned, make_plans, run_steps
from record import need_gpu, show, start, write

BF16 = ("train.precision", "bf16")
NETWORKS = {
    **{
        f"resnet{depth} {batch}": ("resnet", (("depth", depth), ("batch", batch), BF16))
        for depth in ("18", "50")
        for batch in ("1", "8", "32")
    },
    "densenet121 128": ("densenet121", (("batch", "128"), BF16)),
    "googlenet 256": ("googlenet", (("batch", "256"), BF16)),
}
STREAMS = {"one": frozenset({"concurrent_stream"}), "two": frozenset[str]()}
DIGEST_AFTER = 5  # steps


def row_of(name: str, made: dict[str, Planned], runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """With one and with two streams of kernels, the time predicted and, of its runs, the least median; `gain`: of the
    time with one."""
    row: dict[str, Any] = {"name": name}
    states: set[str] = set()
    for streams, planned in made.items():
        found = [run.get(planned.step, {"failed": planned.failed or "not run"}) for run in runs]
        row[f"{streams}_predicted_ms"] = planned.predicted_ms or None
        row[f"{streams}_ms"] = min((f["step_ms"] for f in found if "step_ms" in f), default=None)
        states |= {f["states"] for f in found if "states" in f}
        if failed := [f["failed"] for f in found if "failed" in f]:
            row["failed"] = failed[0]
    if row["one_ms"] and row["two_ms"]:
        row["gain"] = 1 - row["two_ms"] / row["one_ms"]
        row["predicted_over_measured"] = row["two_predicted_ms"] / row["two_ms"]
        row["same_bits"] = len(states) == 1
    row["same_plan"] = made["one"].step == made["two"].step
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="timed, in each run")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="plans made and built side by side")
    arguments = parser.parse_args()
    need_gpu("mbc show --without concurrent_stream predicts without running")
    wanted = [name for name in NETWORKS if not arguments.only or any(word in name for word in arguments.only)]
    jobs = {
        (name, streams): example(NETWORKS[name][0], *NETWORKS[name][1]).with_options(
            profile=arguments.profile, without=without
        )
        for name in wanted
        for streams, without in STREAMS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        made = make_plans({" ".join(key): job for key, job in jobs.items()}, Path(folder), arguments.workers)
        steps = [planned.step for planned in made.values()]
        runs = run_steps(steps, Path(folder), arguments.workers, arguments.steps, arguments.runs, DIGEST_AFTER)
    rows = [row_of(name, {streams: made[f"{name} {streams}"] for streams in STREAMS}, runs) for name in wanted]
    write("concurrent_stream", rows, runs=arguments.runs)
    show(
        rows,
        ["name", "one_predicted_ms", "two_predicted_ms", "one_ms", "two_ms", "gain",
         "predicted_over_measured", "same_bits", "same_plan"],
    )  # fmt: skip


if __name__ == "__main__":
    start(main)

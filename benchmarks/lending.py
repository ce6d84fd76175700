"""Step times of several trainings on one machine, each of which borrows memory of the last GPU: all at once, and alone.

ResNet-152 trains in fp32 at batch 512 under a cap of 16 GB. The last GPU trains nothing; it lends each of the other
GPUs an equal part of its free memory. The goal is that all trainings at once reach 95 % of the sum of their speeds
alone.

    python benchmarks/lending.py [--gpus N] [--steps 30] [--gpu h100]
    python benchmarks/lending.py --plan-only --gpu h100 --gpus 4        # needs no GPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import stepping
from ahead import PLANS, build
from cap import GB
from many_gpus import of_gpus, spec_name
from modules import example
from record import results, show, start
from shelf import Shelf, pack

from mbc.hardware.target import find_device, local_gpus

ASKED = 0.95  # of the summed speeds
CAP_BYTES = 16 * GB
SPARE = 0.85  # of the lender's memory, which also holds the contexts of all borrowers
TIMEOUT_S = 240.0
BATCH = 512
COLUMNS = ["name", "batch", "alone_ms", "slowest_ms", "predicted_ms", "of_summed_speeds", "passed"]


def plan(gpu: str, gpus: int, shelf: Shelf) -> None:
    """Plan the step of one borrower, and keep the plan."""
    lent_gb = int(SPARE * find_device(gpu).memory_bytes / GB / (gpus - 1))
    sets = {"batch": BATCH, "depth": 152, "train.precision": "fp32", "memory.peers": f"{lent_gb} GB",
            "memory.device": f"{CAP_BYTES} B"}  # fmt: skip
    job = replace(example("resnet", *((name, str(value)) for name, value in sets.items())), gpu=gpu)
    shelf.keep(row_name(gpu, gpus), "one", pack(job.plan()))


def row_name(gpu: str, gpus: int) -> str:
    """Return the row's name for a machine."""
    return f"{gpus - 1} borrow from an {gpu}"


def timed(folder: Path, lender: int, steps: int, number: int) -> dict[str, Any]:
    """Measure a package's step on the GPU `number`, in a process that sees that GPU and the lender.

    Raises:
        RuntimeError: The process or the step failed.
    """
    request = json.dumps([{"one": str(folder)}, steps, 0, 0])
    done = subprocess.run(
        [sys.executable, stepping.__file__, "--child"], input=request, capture_output=True, text=True,
        timeout=TIMEOUT_S, env=os.environ | {"CUDA_VISIBLE_DEVICES": f"{number},{lender}"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-500:]}")
    row = json.loads(lines[-1])
    if "failed" in row:
        raise RuntimeError(row["failed"])
    return row


def measured(gpu: str, gpus: int, shelf: Shelf, steps: int) -> dict[str, Any]:
    """Return the row of a machine: the step time of each borrower alone, and of all borrowers at once."""
    lender, borrowers = gpus - 1, range(gpus - 1)
    with TemporaryDirectory() as place, ThreadPoolExecutor(len(borrowers)) as pool:
        folder = Path(place) / "net"
        if why := build(shelf.path(row_name(gpu, gpus), "one"), folder):
            raise RuntimeError(why)
        time_on = partial(timed, folder, lender, steps)
        alone = [time_on(number) for number in borrowers]
        together = list(pool.map(time_on, borrowers))
    share = sum(1 / row["step_ms"] for row in together) / sum(1 / row["step_ms"] for row in alone)
    return {
        "batch": BATCH, "gpu": gpu, "cap_gb": CAP_BYTES / GB, "predicted_ms": alone[0]["predicted_ms"],
        "alone_ms": max(row["step_ms"] for row in alone), "slowest_ms": max(row["step_ms"] for row in together),
        "each_ms": [row["step_ms"] for row in together], "of_summed_speeds": share, "passed": share >= ASKED,
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="with the one that lends (default: the machine's)")
    parser.add_argument("--gpu", help="the GPU that is planned for (default: this machine's)")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--plans", type=Path, default=PLANS, help="folder of plans (default build/plans)")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    gpus = arguments.gpus or len(local_gpus())
    if gpus < 2:
        raise SystemExit("one GPU lends and the others train, so the benchmark needs two GPUs at least")
    gpu, shelf = arguments.gpu or spec_name(), Shelf(arguments.plans / f"{gpus}_gpus")
    if arguments.plan_only or not shelf.path(row_name(gpu, gpus), "one").exists():
        plan(gpu, gpus, shelf)
    if not arguments.plan_only:
        rows = results(of_gpus("lending", gpus))
        rows.put({"name": row_name(gpu, gpus)} | measured(gpu, gpus, shelf, arguments.steps))
        show(list(rows.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)

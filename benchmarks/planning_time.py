"""CPU seconds of plans from a profile, and of whole commands, for an H200. Needs no GPU.

The limits are:

* ResNet-50 at batch 256: 5 s under `power_of_two` and 30 s under `all`.
* Within tight budgets: ResNet-50 10 s, ResNet-152 20 s, a ResNet of 3,698 layers 120 s. Within half of their memory:
  a ResNet of 1,202 layers 40 s, nnU-Net's plain network for volumes 10 s, its residual encoder network 60 s.
* Whole commands, in processes of their own: ResNet-50 at nearly the smallest possible budget 30 s, the refusal of a
  budget that is too small 20 s, commands that plan nothing 0.4 s. The largest batch: of the digits in 655 MB 15 s, of
  the U-Net in 12 GB 45 s, of ResNet-50 in 8 GB on each of eight GPUs 60 s.

Rows that the results have are not timed again, unless `--again` is given.

    python benchmarks/planning_time.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from modules import example
from own_process import result_of
from record import ROOT, attempt, results, show, start

from mbc.options import Policy

TIMEOUT_S = 600.0
LIMITS_S = {Policy.UNDIVIDED: 5.0, Policy.POWER_OF_TWO: 5.0, Policy.ALL: 30.0}
DEFAULT = Policy.POWER_OF_TWO
RESNET50 = "resnet depth=50 batch=256"
DEEP = "resnet_deep n1=6 n2=32 n4=6 batch=1"
# By name: the example and its settings, the policy, and the limit in seconds.
PLANS: Mapping[str, tuple[str, Policy, float]] = {
    **{
        f"resnet50 batch 256 {precision} {policy}": (f"{RESNET50} train.precision={precision}", policy, limit_s)
        for precision in ("fp32", "bf16")
        for policy, limit_s in LIMITS_S.items()
    },
    "resnet50 batch 256 in 8 GB fp32": (f"{RESNET50} memory.device=8GB", DEFAULT, 10.0),
    "resnet152 batch 64 in 6 GB fp32": ("resnet depth=152 batch=64 memory.device=6GB", DEFAULT, 20.0),
    "3,698 layers, batch 1 in 12 GB fp32": (f"{DEEP} n3=1188 memory.device=12GB", DEFAULT, 120.0),
    "1,202 layers, batch 1 in 3.2 GB fp32": (f"{DEEP} n3=356 memory.device=3.2GB", DEFAULT, 40.0),
    "nnunet in 2.4 GB bf16": ("nnunet train.precision=bf16 memory.device=2.4GB", DEFAULT, 10.0),
    "nnunet_resenc in 5.4 GB bf16": ("nnunet_resenc train.precision=bf16 memory.device=5.4GB", DEFAULT, 60.0),
}
RESNET50_64 = "compile examples/resnet.mbc --set depth=50 --set batch=64 --measure never --force --set memory.device="
# By name: arguments of mbc, its exit status, and the limit in seconds.
COMMANDS: Mapping[str, tuple[str, int, float]] = {
    "compile resnet50 64 in 2 GiB": (f"{RESNET50_64}2GiB", 0, 30.0),
    "refuse resnet50 64 in 1 GB": (f"{RESNET50_64}1GB", 1, 20.0),
    "fit digits in 655 MB": ("fit examples/01_digits/net.mbc --memory 655MB", 0, 15.0),
    "fit unet in 12 GB": ("fit examples/unet.mbc --memory 12GB", 0, 45.0),
    "fit resnet50 in 8 GB on 8 GPUs": ("fit examples/resnet.mbc --set depth=50 --memory 8GB --gpus 8", 0, 60.0),
    "start: gpus": ("gpus", 0, 0.4),
}


def plan_here(name: str) -> dict[str, Any]:
    """Make one plan of PLANS in this process."""
    text, policy, limit_s = PLANS[name]
    network, *settings = text.split()
    pairs = ((key, value) for key, _, value in (setting.partition("=") for setting in settings))
    job = replace(example(network, *pairs).with_options(policy=policy), gpu="h200")
    started = time.process_time()
    plan = job.plan()
    plan_s = time.process_time() - started
    return {
        "plan_s": plan_s,
        "limit_s": limit_s,
        "passed": plan_s <= limit_s,
        "predicted_ms": plan.predictions.train_us / 1e3,
        "launches": len(plan.train.launches),
    }


def command(text: str, status: int, limit_s: float) -> dict[str, Any]:
    """Return the row of a whole command, in CPU seconds; its first word says whether it plans."""
    with tempfile.TemporaryDirectory() as folder:
        words = text.split()
        planning = {"compile": ["-o", f"{folder}/package"], "fit": []}.get(words[0])
        more = [] if planning is None else ["--gpu", "h200", *planning]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "mbc.cli", *words, *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": folder},
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode != status:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return {"command_s": cpu_s, "limit_s": limit_s, "passed": cpu_s <= limit_s}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names contain one of these")
    parser.add_argument("--again", action="store_true", help="time all rows, also those that the results have")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(plan_here(arguments.child)))
        return
    work: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(result_of, [__file__, "--child", name], TIMEOUT_S)
        for name in PLANS  # each in its own process, where nothing is cached
    }
    work |= {name: partial(command, *words) for name, words in COMMANDS.items()}
    table = results("planning_time", again=arguments.again, planned_for="h200")
    table.rows = {name: row for name, row in table.rows.items() if name in work}
    for name, timed in work.items():
        if any(only in name for only in arguments.only) and not table.done(name):
            table.put(attempt(timed, name))
    columns = ["name", "plan_s", "command_s", "limit_s", "launches", "predicted_ms", "passed"]
    show(list(table.rows.values()), columns)


if __name__ == "__main__":
    start(main)

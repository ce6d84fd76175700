"""Time of planning from a profile on two cores, by policy, and of computing Pareto fronts alone. Needs no GPU.

The limits are:

* ResNet-50 at batch 256: 5 s under `power_of_two` and 30 s under `all`. The Pareto front of one operation at batch 512
  under `all`, with 12 candidates a size: 0.3 s.
* Within tight budgets: ResNet-50 10 s, ResNet-152 20 s, a ResNet of 2,498 layers 90 s. Within half of their memory:
  nnU-Net's plain network for volumes 10 s, its residual encoder network 60 s.
* Whole commands, in processes of their own: ResNet-50 at nearly the smallest possible budget 30 s, the refusal of a
  budget that is too small 20 s, commands that plan nothing 0.4 s. The largest batch: of the digits in 655 MB 15 s, of
  the U-Net in 12 GB 45 s, of ResNet-50 in 8 GB on each of eight GPUs 60 s.

    python benchmarks/planning_time.py [--profile FILE] [--precisions fp32,bf16] [--cores 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from modules import example
from own_process import result_of
from record import ROOT, attempt, show, start, write

from mbc.compiler import compile_plan
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.optimize.candidates.pareto import pareto_front
from mbc.options import Policy
from mbc.plan.summary import summarise
from mbc.stages import Stages

TIMEOUT_S = 300.0
LIMITS_S = {Policy.UNDIVIDED: 5.0, Policy.POWER_OF_TWO: 5.0, Policy.ALL: 30.0}
MENU_BATCH, MENU_CANDIDATES, MENU_LIMIT_S = 512, 12, 0.3
MENU_RUNS = 7


@dataclass(frozen=True)
class Network:
    """A network to plan. Networks with a budget need recomputation and copies."""

    name: str
    example: str
    settings: tuple[tuple[str, str], ...]
    limit_s: float = 0.0
    precision: str = "fp32"


RESNET50 = Network("resnet50 batch 256", "resnet", (("depth", "50"), ("batch", "256")))
TIGHT = (
    Network(
        "resnet50 batch 256 in 8 GB", "resnet",
        (("depth", "50"), ("batch", "256"), ("memory.device", "8 GB")), 10.0,
    ),
    Network(
        "resnet152 batch 64 in 6 GB", "resnet",
        (("depth", "152"), ("batch", "64"), ("memory.device", "6 GB")), 20.0,
    ),
    Network(
        "2,498 layers, batch 1 in 12 GB", "resnet_deep",
        (("n1", "6"), ("n2", "32"), ("n3", "788"), ("n4", "6"), ("batch", "1"), ("memory.device", "12 GB")), 90.0,
    ),
    Network("nnunet in 2.4 GB", "nnunet", (("memory.device", "2.4 GB"),), 10.0, "bf16"),
    Network("nnunet_resenc in 5.4 GB", "nnunet_resenc", (("memory.device", "5.4 GB"),), 60.0, "bf16"),
)  # fmt: skip
RESNET50_64 = (
    "compile", "examples/resnet.mbc", "--set", "depth=50", "--set", "batch=64", "--measure", "never", "--force",
)  # fmt: skip
# By name: arguments of mbc, its exit status, and the limit in seconds.
COMMANDS: Mapping[str, tuple[tuple[str, ...], int, float]] = {
    "compile resnet50 64 in 2 GiB": ((*RESNET50_64, "--set", "memory.device=2GiB"), 0, 30.0),
    "refuse resnet50 64 in 1 GB": ((*RESNET50_64, "--set", "memory.device=1GB"), 1, 20.0),
    "fit digits in 655 MB": (("fit", "examples/01_digits/net.mbc", "--memory", "655MB"), 0, 15.0),
    "fit unet in 12 GB": (("fit", "examples/unet.mbc", "--memory", "12GB"), 0, 45.0),
    "fit resnet50 in 8 GB on 8 GPUs": (
        ("fit", "examples/resnet.mbc", "--set", "depth=50", "--memory", "8GB", "--gpus", "8"),
        0,
        60.0,
    ),
    "start: --version": (("--version",), 0, 0.4),
    "start: gpus": (("gpus",), 0, 0.4),
}


def plan_here(network: int, precision: str, policy: str, gpu: str, profile: str | None) -> dict[str, Any]:
    """Plan `TIGHT[number]`, or RESNET50 for -1, in this process."""
    chosen = TIGHT[network] if network >= 0 else RESNET50
    settings = (*chosen.settings, ("train.precision", precision))
    job = example(chosen.example, *settings).with_options(policy=Policy(policy), profile=profile)
    options = replace(job.options, gpu=gpu, settings=job.settings, network=job.network)
    stages = Stages()
    started = time.perf_counter()
    plan = compile_plan(job.source, options, stages)
    plan_s = time.perf_counter() - started
    return {
        "plan_s": plan_s,
        "stages_s": stages.seconds,
        "predicted_ms": plan.predictions.train_us / 1e3,
        "measured_share": plan.predictions.measured_share,
        "launches": len(plan.train.launches),
        "divided_operations": sum(len(o.micro_batches) > 1 for o in summarise(plan, plan.train)),
    }


def plan_apart(network: int, precision: str, policy: Policy, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a plan made in a process of its own, in which nothing is cached."""
    request = json.dumps([network, precision, policy, arguments.gpu, arguments.profile])
    result = result_of([__file__, "--cores", str(arguments.cores), "--child", request], TIMEOUT_S)
    limit_s = TIGHT[network].limit_s if network >= 0 else LIMITS_S[policy]
    return {**result, "limit_s": limit_s, "passed": result["plan_s"] <= limit_s}


def command(words: Sequence[str], status: int, limit_s: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a whole command; its first word says whether it plans."""
    with tempfile.TemporaryDirectory() as folder:
        planning = {"compile": ["-o", f"{folder}/package"], "fit": []}.get(words[0])
        more = [] if planning is None else ["--gpu", arguments.gpu, *planning]
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "mbc.cli", *words, *more],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": folder},
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        took_s = time.perf_counter() - started
    if done.returncode != status:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return {"command_s": took_s, "limit_s": limit_s, "passed": took_s <= limit_s}


def candidates(rows: int, random: np.random.Generator) -> list[Candidate]:
    """Return invented candidates. As with real algorithms, candidates with more workspace are faster."""
    items: list[Candidate] = []
    for k in range(MENU_CANDIDATES):
        workspace = int(random.integers(1, 1 << 20)) * rows * (k + 1)
        time_us = 4.0 + rows * (2.0 + random.random()) / (1 + 0.3 * k)
        settings = (("algorithm", k),)
        layouts = (Layout.CHANNELS_FIRST,) * 3
        items.append(
            Candidate("mbc", "made_up", settings, layouts, workspace, time_us, True, True, True, 1.02 * time_us)
        )
    return items


def menus_here() -> dict[str, Any]:
    """Return the median time of computing one operation's Pareto front, for sums (filter gradients) and for others."""
    result: dict[str, Any] = {"limit_s": MENU_LIMIT_S}
    for label, sums in (("menu_s", False), ("menu_of_sums_s", True)):
        times: list[float] = []
        for seed in range(MENU_RUNS):
            random = np.random.default_rng(seed)
            offers = {rows: candidates(rows, random) for rows in range(1, MENU_BATCH + 1)}
            started = time.perf_counter()
            front = pareto_front(offers, MENU_BATCH, sums)
            times.append(time.perf_counter() - started)
            result[f"{label.removesuffix('_s')}_points"] = len(front)
        result[label] = statistics.median(times)
        result[f"most_{label}"] = max(times)
    result["passed"] = max(result["most_menu_s"], result["most_menu_of_sums_s"]) <= MENU_LIMIT_S
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--gpu", default="h200", help="what to plan for (default h200)")
    parser.add_argument("--cores", type=int, default=2, help="to run on, where the system lets us choose (default 2)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    if arguments.child:
        print(json.dumps(plan_here(*json.loads(arguments.child))))
        return
    rows = [
        attempt(lambda p=precision, k=policy: plan_apart(-1, p, k, arguments), f"{RESNET50.name} {precision} {policy}")
        for precision in arguments.precisions.split(",")
        for policy in Policy
    ]
    rows += [
        attempt(
            lambda i=i: plan_apart(i, TIGHT[i].precision, Policy.POWER_OF_TWO, arguments),
            f"{network.name} {network.precision}",
        )
        for i, network in enumerate(TIGHT)
    ]
    rows.append(attempt(menus_here, f"menu, batch {MENU_BATCH}, {MENU_CANDIDATES} candidates a size"))
    rows += [attempt(lambda words=words: command(*words, arguments), name) for name, words in COMMANDS.items()]
    path = write("planning_time", rows, cores=arguments.cores, planned_for=arguments.gpu)
    seconds = ("plan_s", "command_s", "menu_s", "menu_of_sums_s", "limit_s")
    show(rows, ["name", *seconds, "launches", "measured_share", "predicted_ms", "passed"])
    print(path.name)


if __name__ == "__main__":
    start(main)

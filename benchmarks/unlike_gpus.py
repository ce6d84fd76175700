"""One mini-batch shared by a whole GPU and by a part of another one, which computes on some of its multiprocessors.

Asked are 95 % of the summed speeds, each alone with the whole mini-batch. `equal_ms` is what half of the rows take
alone on the slower of the two: an equal split of the mini-batch takes no less. Both are measured into their profiles
before the pair is planned.

    python benchmarks/unlike_gpus.py [--multiprocessors 64] [--measure-for 60s] [--only NAME ...] [--for 540]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from many_gpus import spec_name
from modules import Job, Settings, example
from record import attempt, results, show, start

from mbc.bench import ranks
from mbc.bench.job import MBC, Contender, Result, Share
from mbc.bench.job import Job as Raced
from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.compiler import compile_plans
from mbc.hardware.target import local_gpus
from mbc.options import Options, RankGpu
from mbc.plan.model import Plan

BATCH = 256
ASKED = 0.95  # of the summed speeds
PART_S = 120.0  # the most that one run may take
CASES = {"resnet18": (("depth", "18"),), "resnet50": (("depth", "50"),)}
COLUMNS = (
    "name", "multiprocessors", "rows", "whole_ms", "part_ms", "ms", "predicted_ms", "of_summed_speeds", "equal_ms",
    "over_equal", "measured_share", "passed",
)  # fmt: skip


def job_of(settings: Settings) -> Job:
    return example("resnet", *settings, ("batch", str(BATCH)), ("train.precision", "bf16"))


def options(job: Job, gpus: tuple[str, ...], batch: int) -> Options:
    told = Options(gpus[0], (*job.settings, ("batch", str(batch))), len(gpus), network=job.network)
    return replace(told, rank_gpus=tuple(map(RankGpu, gpus)) if len(gpus) > 1 else ())


def measure(job: Job, gpu: str, batch: int, limit: str) -> None:
    """Into the profile that plans for this GPU find by themselves."""
    words = [value for pair in (*job.settings, ("batch", str(batch))) for value in ("--set", "=".join(pair))]
    command = [sys.executable, "-m", "mbc.cli", "profile", job.source.name, *words, "--gpu", gpu]
    subprocess.run([*command, "--measure-for", limit], check=True)


def run(job: Job, package: Path, batch: int, sizes: tuple[int, ...]) -> Result:
    raced = Raced(
        job.source, (*job.settings, ("batch", str(batch))), job.network, str(package), "cuda", blocks=5,
        alone_package=str(package), share=Share(sizes=sizes),
    )  # fmt: skip
    contender = Contender(MBC)
    found = ranks.run_ranks(raced, contender, 2, PART_S) if sizes else ranks.run_alone(raced, contender, 1, PART_S)
    if found.problem:
        raise RuntimeError(found.problem)
    return found


def row_of(name: str, multiprocessors: int, limit: str) -> dict[str, Any]:
    job, gpu = job_of(CASES[name]), spec_name()
    part = f"{gpu}@{multiprocessors}"
    half, pair = BATCH // 2, options(job, (gpu, part), BATCH)
    estimated = compile_plans(job.source, pair)[0].graph.ranks
    assert estimated is not None
    for number, rows in zip(("0", f"1@{multiprocessors}"), estimated.rows, strict=True):
        for batch in (rows, BATCH, half):
            measure(job, number, batch, limit)
    wanted = {
        "pair": ((gpu, part), BATCH),
        "whole": ((gpu,), BATCH),
        "part": ((part,), BATCH),
        "whole half": ((gpu,), half),
        "part half": ((part,), half),
    }
    with TemporaryDirectory() as folder:

        def built(item: tuple[str, tuple[tuple[str, ...], int]]) -> tuple[str, tuple[Plan, ...]]:
            what, (gpus, batch) = item
            plans = compile_plans(job.source, options(job, gpus, batch))
            write_package(plans, Path(folder) / what.replace(" ", "_"), find_toolchain())
            return what, tuple(plans)

        with ThreadPoolExecutor(len(wanted)) as pool:
            plans = dict(pool.map(built, wanted.items()))
        shared = plans["pair"][0].graph.ranks
        assert shared is not None
        ms = {
            what: run(job, Path(folder) / what.replace(" ", "_"), batch, shared.rows if what == "pair" else ()).step_ms
            for what, (_, batch) in wanted.items()
        }
    return judged(ms) | {
        "name": name, "gpu": gpu, "multiprocessors": multiprocessors, "rows": list(shared.rows),
        "predicted_ms": max(plan.predictions.train_us for plan in plans["pair"]) / 1e3,
        "measured_share": min(plan.predictions.measured_share for plan in plans["pair"]),
    }  # fmt: skip


def judged(ms: dict[str, float]) -> dict[str, Any]:
    """Speeds of one mini-batch, by the steps' times."""
    equal_ms = max(ms["whole half"], ms["part half"])
    of_summed_speeds = (1 / ms["pair"]) / (1 / ms["whole"] + 1 / ms["part"])
    return {
        "ms": ms["pair"], "whole_ms": ms["whole"], "part_ms": ms["part"], "equal_ms": equal_ms,
        "of_summed_speeds": of_summed_speeds, "over_equal": equal_ms / ms["pair"],
        "passed": of_summed_speeds >= ASKED and ms["pair"] < equal_ms,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--multiprocessors", type=int, default=64, help="of the part (default 64)")
    parser.add_argument("--measure-for", default="60s", metavar="T", help="each number of rows (default 60s)")
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES), metavar="NAME")
    parser.add_argument("--for", dest="for_s", type=float, default=540.0, metavar="S", help="begin no row later")
    arguments = parser.parse_args()
    if len(local_gpus()) < 2:
        raise SystemExit("this machine has no two GPUs that can be used")
    held, began = results("unlike_gpus"), time.monotonic()
    for name in arguments.only or CASES:
        if time.monotonic() - began > arguments.for_s:
            print("time is over, rows are left: run this again", flush=True)
            break
        held.put(
            {"name": name} | attempt(lambda n=name: row_of(n, arguments.multiprocessors, arguments.measure_for), name)
        )
    show(list(held.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)

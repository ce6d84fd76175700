"""Time and memory of compiling, and how tightly arenas are packed. Needs no GPU.

Limits: ResNet-50 at batch 256 plans in 10 s and builds in 40 s on 2 cores; the 2,498-layer ResNet at batch 1 plans in
120 s and builds in 60 s under 4 GiB; the arena of every example is at most 1.02 times its most live bytes.

    python benchmarks/compile_time.py [--gpu h200] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from modules import Job, example, examples
from record import attempt, show, write

TIMEOUT_S = 900.0
MOST_PACKING = 1.02
GIB = 2**30

# name, example, settings, limits: seconds of planning and of building, bytes
TIMED = (
    ("resnet50 batch 256", "resnet", (("depth", "50"), ("batch", "256")), 10.0, 40.0, None),
    (
        "resnet of 2,498 layers",
        "resnet_deep",
        (("n1", "6"), ("n2", "32"), ("n3", "788"), ("n4", "6"), ("batch", "1")),
        120.0,
        60.0,
        4 * GIB,
    ),
)


def job_of(name: str, settings: list[list[str]], gpu: str) -> Job:
    found = example(name, *((key, value) for key, value in settings))
    return Job(found.name, found.source, found.settings, found.network, gpu)


def compile_here(name: str, settings: list[list[str]], gpu: str, build: bool) -> dict[str, Any]:
    """Plan and perhaps build one network in this process."""
    from mbc.compiler import compile_plan, compile_source
    from mbc.options import Options
    from mbc.stages import Stages

    job = job_of(name, settings, gpu)
    asked = Options(gpu=gpu, settings=job.settings, network=job.network)
    stages = Stages()
    built: dict[str, Any] = {}
    if build:
        with tempfile.TemporaryDirectory() as folder:
            made = compile_source(job.source, asked, Path(folder) / "package", stages=stages)
        plan = made.plan
        built = {"build_s": stages.building_seconds, "missing": [m.name for m in made.package.missing]}
    else:
        plan = compile_plan(job.source, asked, stages)
    found: dict[str, Any] = {
        "plan_s": stages.planning_seconds,
        "stages_s": stages.seconds,
        **built,
        "arena_bytes": plan.predictions.arena_bytes,
        "live_bytes": plan.bounds.live_bytes,
        "packing": plan.predictions.arena_bytes / plan.bounds.live_bytes,
        "launches": len(plan.train.launches) + len(plan.infer.launches),
    }
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tools = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found["peak_bytes"] = max(own, tools) * 1024
    return found


def compile_apart(name: str, settings: Any, gpu: str, build: bool) -> dict[str, Any]:
    """The same in a process of its own, so that its peak memory is its own."""
    request = json.dumps([name, settings, gpu, build])
    done = subprocess.run(
        [sys.executable, __file__, "--child", request], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "peak_gib": found["peak_bytes"] / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(compile_here(*json.loads(arguments.child))))
        return
    rows: list[dict[str, Any]] = []
    for name, source, settings, plan_limit, build_limit, memory_limit in TIMED:
        if arguments.only and source not in arguments.only:
            continue
        row = attempt(lambda s=source, v=settings: compile_apart(s, v, arguments.gpu, True), name)
        if "failed" not in row:
            kept = row["plan_s"] <= plan_limit and row["build_s"] <= build_limit and not row["missing"]
            row["passed"] = kept and row["packing"] <= MOST_PACKING
            row["passed"] = row["passed"] and (memory_limit is None or row["peak_bytes"] <= memory_limit)
        rows.append(row)
    for job in examples():
        if arguments.only and job.name not in arguments.only:
            continue
        for precision in ("fp32", "bf16"):
            settings = (("train.precision", precision),)
            row = attempt(
                lambda n=job.name, s=settings: compile_apart(n, s, arguments.gpu, False), f"{job.name} {precision}"
            )
            if "failed" not in row:
                row["passed"] = row["packing"] <= MOST_PACKING
            rows.append(row)
    path = write("compile_time", rows)
    show(rows, ["name", "plan_s", "build_s", "peak_gib", "launches", "arena_bytes", "packing", "passed"])
    print(path.name)


if __name__ == "__main__":
    main()

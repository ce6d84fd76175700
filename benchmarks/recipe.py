"""The cost of a recipe: ResNet-50 with clipping, moving averages and no decay of biases and batch normalisation.

All three parts of the recipe are inside the step. Rounds of steps with the recipe and rounds without it alternate.

    python benchmarks/recipe.py [--batch 256] [--steps 50] [--rounds 3] [--precision bf16]
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modules import Job, example
from planner import processes
from record import need_gpu, show, start, write
from stepping import time_packages

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain

RECIPE = (("train.clip_norm", "1.0"), ("train.ema", "0.9999"), ("train.no_decay", "norm_and_bias"))
MOST_OVER = 0.01  # of the step without the recipe


def build(job: Job, folder: Path) -> None:
    """Plan a job and build its package."""
    package = write_package((job.plan(),), folder, find_toolchain())
    if package.library is None:
        raise RuntimeError("not built: " + ", ".join(missing.name for missing in package.missing))


def timed(pool: ProcessPoolExecutor, plain: Job, folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Return the row of a job: its step times with the recipe and without."""
    jobs = {"plain": plain, "recipe": plain.with_settings(*RECIPE)}
    packages = {name: folder / name for name in jobs}
    for future in [pool.submit(build, job, packages[name]) for name, job in jobs.items()]:
        future.result()
    row: dict[str, Any] = {"name": f"{plain.name} {dict(plain.settings)['batch']}"}
    runs = [time_packages(packages, steps) for _ in range(rounds)]
    for name in jobs:
        own = [run[name] for run in runs]
        if failed := next((run["failed"] for run in own if "failed" in run), None):
            return row | {"failed": failed}
        row |= {
            f"{name}_ms": statistics.median(run["step_ms"] for run in own),
            f"{name}_each_ms": [run["step_ms"] for run in own],
            f"{name}_predicted_ms": own[0]["predicted_ms"],
            f"{name}_arena": own[0]["arena_predicted"],
            f"{name}_measured_share": own[0]["measured_share"],
        }
    over = row["recipe_ms"] / row["plain_ms"] - 1
    return row | {"over": over, "passed": over <= MOST_OVER}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="256")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    arguments = parser.parse_args()
    need_gpu("nothing is timed without one")
    plain = example("resnet", ("depth", "50"), ("batch", arguments.batch), ("train.precision", arguments.precision))
    with TemporaryDirectory() as folder, processes(2) as pool:
        row = timed(pool, plain, Path(folder), arguments.steps, arguments.rounds)
    write("recipe", [row], recipe=dict(RECIPE))
    show([row], ["name", "plain_ms", "recipe_ms", "over", "plain_predicted_ms", "recipe_predicted_ms", "passed"])


if __name__ == "__main__":
    start(main)

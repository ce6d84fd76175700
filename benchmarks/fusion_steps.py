"""The training step of examples and imported networks beside that of an earlier checkout, or without a technique.

    python benchmarks/fusion_steps.py (--baseline CHECKOUT | --baseline-without T,T) [--only NAME ...] [--for SECONDS]
                                      [--measure-for 40s] [--precision bf16] [--packages-only] [--again]

Each network becomes two packages with one profile: one of the baseline, and one of this checkout. Their steps are timed
in turns on one GPU. `ratio`: the median, over the rounds, of this checkout's step over the baseline's. Asked: none is
above 1.01, and the median of the imported networks (`imported_sources.py`) is at most 0.97.

Packages are built side by side, and stay in `build/fusion_steps`, so that a second call only times. With
`--measure-for` (default: nothing is measured) each compilation measures for so long at most what its plan lacks in the
profile of `build/fusion_steps/home`; then networks are compiled one after another. `--device cpu` shows that everything
works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imported_sources import imported_jobs
from in_turns import in_turns, step_worker
from modules import Job, example, examples
from record import ROOT, attempt, need_gpu, results, show, start

from mbc.plan.file import PLAN_FILE

FOLDER = ROOT / "build" / "fusion_steps"
# Compiles every kernel into the cache of objects, which packages that are built side by side would compile each.
BUILD_KERNELS = """
import sys, tempfile
from pathlib import Path
from mbc.codegen.build import build_kernel_library
from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.target import find_device
from mbc.ir.types import Precision
library = Path(tempfile.mkdtemp()) / "kernels.so"
build_kernel_library(find_device("auto").architecture, Precision(sys.argv[1]), library, find_toolchain())
"""
MOST_RATIO, MOST_IMPORTED_RATIO = 1.01, 0.97
COLUMNS = ("name", "baseline_ms", "step_ms", "ratio", "spread", "launches", "baseline_launches", "passed")


@dataclass(frozen=True)
class Side:
    """One of the two compilers: a checkout, and the options of its compilations."""

    name: str
    checkout: Path
    words: tuple[str, ...] = ()

    def package(self, job: Job, precision: str) -> Path:
        """Return the folder of a network's package."""
        return FOLDER / f"{label(job)} {precision}".replace(" ", "_") / self.name

    def compile(self, job: Job, precision: str, measure: Sequence[str]) -> None:
        """Build the package unless it is there."""
        package = self.package(job, precision)
        if package.exists():
            return
        package.parent.mkdir(parents=True, exist_ok=True)
        source = package.parent / "net.mbc"
        source.write_text(job.source.text, encoding="utf-8")
        settings = (*job.settings, ("train.precision", precision))
        self.run(
            "-m", "mbc.cli", "compile", str(source), "-o", str(package), *self.words, *measure,
            *(("--network", job.network) if job.network else ()),
            *(f"--set={name}={value}" for name, value in settings),
        )  # fmt: skip

    def run(self, *words: str) -> None:
        """Run Python with the checkout's mbc."""
        paths = os.pathsep.join([str(self.checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "XDG_DATA_HOME": str(FOLDER / "home")}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError("; ".join(done.stderr.strip().splitlines()[-5:]))


def label(job: Job) -> str:
    """Return the name of a network with its settings."""
    return " ".join((job.name, *(f"{name}={value}" for name, value in job.settings)))


def launches(package: Path) -> int:
    """Return the number of launches of a training step."""
    return len(json.loads((package / PLAN_FILE).read_text(encoding="utf-8"))["train"]["launches"]["rows"])


def row_of(job: Job, sides: tuple[Side, Side], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a network whose packages are there."""
    baseline, today = (side.package(job, arguments.precision) for side in sides)
    device, block_ms = arguments.device, arguments.block_ms
    with (
        step_worker(sides[0].checkout, baseline, device) as one,
        step_worker(sides[1].checkout, today, device) as other,
    ):
        times = asdict(
            in_turns(lambda: one.ask(block_ms=block_ms), lambda: other.ask(block_ms=block_ms), arguments.rounds)
        )
    return {
        "baseline_ms": times.pop("first"), "step_ms": times.pop("second"), **times,
        "launches": launches(today), "baseline_launches": launches(baseline),
        "passed": times["ratio"] <= MOST_RATIO,
    }  # fmt: skip


def together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was asked of all networks, and whether it is reached; nothing where a kind of network has no row."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    imported = [row["ratio"] for row in rows if "ratio" in row and row["imported"]]
    if not imported or len(imported) == len(ratios):
        return {}
    largest, median = max(ratios), statistics.median(imported)
    return {
        "largest_ratio": largest, "imported_median": median,
        "asked": {"largest_ratio": MOST_RATIO, "imported_median": MOST_IMPORTED_RATIO},
        "reached": {"largest_ratio": largest <= MOST_RATIO, "imported_median": median <= MOST_IMPORTED_RATIO},
    }  # fmt: skip


def compile_all(jobs: Sequence[Job], sides: Sequence[Side], arguments: argparse.Namespace) -> dict[str, str]:
    """Build the missing packages, and return why networks failed, by their labels."""
    measure = ("--measure", "never")
    if arguments.measure_for:
        measure = ("--measure", "missing", "--measure-for", arguments.measure_for)
    if arguments.device == "cpu":
        measure = (*measure, "--gpu", "h200")
    elif not all(side.package(job, arguments.precision).exists() for job in jobs for side in sides):
        for side in sides:
            side.run("-c", BUILD_KERNELS, arguments.precision)
    workers = 1 if arguments.measure_for else max(1, (os.cpu_count() or 2) // 2)
    failed: dict[str, str] = {}

    def compile_both(job: Job) -> None:
        try:
            for side in sides:
                side.compile(job, arguments.precision, measure)
            print(f"{label(job)}: compiled", flush=True)
        except Exception as error:
            failed[label(job)] = f"{type(error).__name__}: {error}"

    until = time.monotonic() + arguments.seconds
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda job: compile_both(job) if time.monotonic() < until else None, jobs))
    return failed


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, default=ROOT, help="another checkout (default: this one)")
    parser.add_argument("--baseline-without", default="", metavar="T,T", help="techniques that the baseline leaves out")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="networks whose name holds one of these")
    parser.add_argument("--for", dest="seconds", type=float, default=float("inf"), help="begin no network later")
    parser.add_argument("--measure-for", metavar="TIME", help="for a compilation (default: nothing is measured)")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=20, help="of each network (default 20)")
    parser.add_argument("--block-ms", type=float, default=150.0, help="of steps timed together (default 150)")
    parser.add_argument("--packages-only", action="store_true", help="time nothing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--again", action="store_true", help="time also the networks that have a row")
    arguments = parser.parse_args()
    if arguments.baseline.resolve() == ROOT and not arguments.baseline_without:
        raise SystemExit("name an earlier checkout (--baseline) or a technique (--baseline-without)")
    if arguments.device == "cuda" and not arguments.packages_only:
        need_gpu("--device cpu shows without one that everything works")
    began = time.monotonic()
    without = ("--without", arguments.baseline_without) if arguments.baseline_without else ()
    sides = (Side("baseline", arguments.baseline.resolve(), without), Side("today", ROOT))
    imported = imported_jobs()
    jobs = [*imported, example("resnet", ("depth", "50")), *examples()]
    jobs = [job for job in jobs if not arguments.only or any(word in label(job) for word in arguments.only)]
    kept = results("fusion_steps", again=arguments.again, precision=arguments.precision)
    jobs = [job for job in jobs if not kept.done(label(job))]
    failed = compile_all(jobs, sides, arguments)
    for job in () if arguments.packages_only else jobs:
        if time.monotonic() - began > arguments.seconds:
            break
        name = label(job)
        if name in failed:
            row: dict[str, Any] = {"name": name, "failed": failed[name]}
        else:
            time_job = partial(row_of, job, sides, arguments)
            row = attempt(time_job, name)
        kept.put({**row, "imported": job in imported})
        show([kept.rows[name]], COLUMNS)
    kept.more |= together(list(kept.rows.values()))
    kept.arrange([])
    show(list(kept.rows.values()), COLUMNS)
    print(failed or {name: kept.more.get(name) for name in ("largest_ratio", "imported_median", "reached")})


if __name__ == "__main__":
    start(main)

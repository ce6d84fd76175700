"""Comparison of every launch with float64, for the plans that README and the benchmarks time: `mbc check --launches`.

    python benchmarks/launches.py --plan-only     plans only; needs no GPU
    python benchmarks/launches.py [--only NAME …] [--for S] [--again]

The plans are those of `results/bench_*.json`, planned again with their settings, and those under caps that `capped.py
--plan-only` left in the folder of plans. `--workers` processes build packages side by side. The packages run one after
another, each in a process of its own. Writes `results/launches.json` with a row for each plan, and continues where it
stopped. The exit code is 1 if a launch exceeds its limits.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ahead import PLANS, build
from modules import example
from planner import processes
from record import RESULTS, ROOT, Results, attempt, need_gpu, results, show, start
from shelf import Shelf, pack

PLAN = "launches"  # what a plan that is made here is of its row
CAPPED = "capped"
WORST = 5  # launches that a row lists
TIMEOUT_S = 900.0
COLUMNS = ("name", "launches", "failing", "roundoffs", "worst_element", "wrong", "check_s")


@dataclass(frozen=True)
class Row:
    """One plan to check.

    Attributes:
        name: Name of the row.
        what: Name of the plan on the shelf.
        make: Plans and packs it; None if another benchmark makes the plan.
    """

    name: str
    what: str
    make: Callable[[], bytes] | None


def plan_of(network: str, settings: Mapping[str, str], gpu: str) -> bytes:
    """Return the packed plan of an example network."""
    return pack(_job(network, settings, gpu).plan())


def _job(network: str, settings: Mapping[str, str], gpu: str) -> Any:
    from dataclasses import replace

    return replace(example(network, *settings.items()), gpu=gpu)


def rows(gpu: str) -> list[Row]:
    """Return the plans that benchmarks time: each setting of `mbc bench` once, and those under a cap."""
    result: dict[str, Row] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench_*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        key = json.dumps([about["network"], about["settings"]], sort_keys=True)
        name = path.stem.removeprefix("bench_").replace("_", " ")
        result.setdefault(key, Row(name, PLAN, functools.partial(plan_of, about["network"], about["settings"], gpu)))
    capped = json.loads((ROOT / "benchmarks" / "results" / "capped.json").read_text(encoding="utf-8"))["rows"]
    return [*result.values(), *(Row(row["name"], CAPPED, None) for row in capped)]


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row for the output of `mbc check --launches --json`, in which an infinite figure is null."""
    launches = result["launches"]
    outputs = [output for launch in launches for output in launch["outputs"]]
    worst = sorted(launches, key=_badness, reverse=True)
    kinds: dict[str, dict[str, Any]] = {}
    for launch in worst:
        kind = kinds.setdefault(launch["kind"], {"launches": 0, "roundoffs": 0.0, "worst_element": 0.0, "wrong": 0})
        kind["launches"] += 1
        for output in launch["outputs"]:
            for name in ("roundoffs", "worst_element"):
                kind[name] = _larger(kind[name], output[name])
            kind["wrong"] += output["wrong"]
    return {
        "network": result["network"],
        "batch": result["batch"],
        "precision": result["precision"],
        "reference": result["reference"],
        "launches": len(launches),
        "elements": sum(output["elements"] for output in outputs),
        "passed": result["passed"],
        "failing": sum(not launch["passed"] for launch in launches),
        "roundoffs": functools.reduce(_larger, (output["roundoffs"] for output in outputs), 0.0),
        "worst_element": functools.reduce(_larger, (output["worst_element"] for output in outputs), 0.0),
        "wrong": sum(output["wrong"] for output in outputs),
        "kinds": kinds,
        "worst": [launch for number, launch in enumerate(worst) if number < WORST or not launch["passed"]],
    }


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _badness(launch: Mapping[str, Any]) -> float:
    from mbc.equivalence.deviation import MOST_ELEMENT_ROUNDOFFS, MOST_ROUNDOFFS

    def over(figure: float | None, limit: float) -> float:
        return float("inf") if figure is None else figure / limit

    return max(
        (
            float("inf") if output["wrong"]
            else max(over(output["roundoffs"], MOST_ROUNDOFFS), over(output["worst_element"], MOST_ELEMENT_ROUNDOFFS))
            for output in launch["outputs"]
        ),
        default=0.0,
    )  # fmt: skip


def check(folder: Path, steps: int, seed: int, device: str) -> dict[str, Any]:
    """Check a package in a process of its own, which frees all memory."""
    began = time.monotonic()
    command = [
        sys.executable, "-m", "mbc.cli", "check", str(folder), "--launches", "--json", "--device", device,
        "--steps", str(steps), "--seed", str(seed),
    ]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONPATH": ":".join(paths)}
    )
    result = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if "launches" not in result:  # a command that fails prints its error, as JSON too
        raise RuntimeError("; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}")
    return {**summary(result), "check_s": time.monotonic() - began}


def prepare(missing: Sequence[Row], shelf: Shelf, workers: int) -> None:
    """Make the plans that are not on the shelf and can be planned on this machine."""
    with processes(workers) as pool:
        waiting: dict[str, Future[bytes]] = {row.name: pool.submit(row.make) for row in missing if row.make is not None}
        for row in missing:
            if row.name not in waiting:
                print(f"{row.name}: no plan in {shelf.folder}, capped.py --plan-only makes it", file=sys.stderr)
                continue
            try:
                shelf.keep(row.name, row.what, waiting[row.name].result())
                print(f"{row.name}: planned", flush=True)
            except Exception as error:  # one plan never takes the others with it
                print(f"{row.name}: {type(error).__name__}: {error}", file=sys.stderr)


def measure(waiting: Sequence[Row], shelf: Shelf, kept: Results, arguments: argparse.Namespace, began: float) -> None:
    """Build and check the packages of all rows that are missing."""
    with tempfile.TemporaryDirectory() as folder_of_packages, processes(arguments.workers) as pool:
        built = {
            row.name: pool.submit(build, shelf.path(row.name, row.what), Path(folder_of_packages) / f"p{number}")
            for number, row in enumerate(waiting)
        }
        for number, row in enumerate(waiting):
            if time.monotonic() - began > arguments.for_s:
                print(f"{len(waiting) - number} rows are left: run this again")
                for future in built.values():
                    future.cancel()
                return

            def work(row: Row = row, folder: Path = Path(folder_of_packages) / f"p{number}") -> dict[str, Any]:
                if failed := built[row.name].result():
                    raise RuntimeError(failed)
                return check(folder, arguments.steps, arguments.seed, "cuda")

            kept.put(attempt(work, row.name))
            show([kept.rows[row.name]], COLUMNS)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--plan-only", action="store_true", help="make the plans that are missing; needs no GPU")
    parser.add_argument("--plans", type=Path, default=PLANS, help="folder of plans (default build/plans)")
    parser.add_argument("--gpu", default="h200", help="what to plan for (default h200)")
    parser.add_argument("--steps", type=int, default=2, help="the step that is checked (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    parser.add_argument(
        "--for", dest="for_s", type=float, default=1e9, metavar="S", help="start no row after S seconds"
    )
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N")
    arguments = parser.parse_args()
    began = time.monotonic()
    if not arguments.plan_only:
        need_gpu("--plan-only makes the plans without one")
    shelf = Shelf(arguments.plans)
    wanted = [row for row in rows(arguments.gpu) if not arguments.only or any(n in row.name for n in arguments.only)]
    missing = [
        row
        for row in wanted
        if not shelf.path(row.name, row.what).exists() or (arguments.plan_only and arguments.again and row.make)
    ]
    if missing:
        prepare(missing, shelf, arguments.workers)
    if arguments.plan_only:
        return
    kept = results("launches", arguments.again)
    planned = [row for row in wanted if shelf.path(row.name, row.what).exists()]
    measure([row for row in planned if not kept.done(row.name)], shelf, kept, arguments, began)
    shown = [kept.rows[row.name] for row in wanted if row.name in kept.rows]
    show(shown, COLUMNS)
    print(f"written to {RESULTS / 'launches.json'}")
    if any("failed" in row or not row["passed"] for row in shown):
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)

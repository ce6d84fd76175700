"""Rows of a benchmark in two stages: plans, which need no GPU, and their measured steps, which need nothing else.

A plan takes a minute on a processor, a step a second on a GPU. `--plan-only` runs on any machine: it writes the
predictions (`results/<name>_planned.json`) and leaves the plans in a folder. Without `--plan-only` the plans in that
folder are built and run, and only missing plans are made. `--workers` processes make and build plans side by side. Both
stages write each row when it is done. A call continues where the call before stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cap import Card
from modules import errors, median
from planner import Planner, processes
from record import ROOT, Results, attempt, need_gpu, results, show
from shelf import Shelf, unpack
from stepping import time_packages

PLANS = ROOT / "build" / "plans"
GRADIENT_TIMEOUT_S = 300.0
TIMES_TORCH = 2.0  # the rule for gradients: twice PyTorch's own error against float64


@dataclass(frozen=True)
class Task:
    """One row of a benchmark in two stages.

    Attributes:
        name: Name of the row.
        prepare: Plans, keeps the plans that are to run, and returns the row. `plans` of the row has the cap in bytes of
            each kept plan
            (0 for none); `compare` has the two plans whose first gradients must be equal, if any.
        finish: Adds the measurements, which it is given by the names of the plans.
        torch_gradient: PyTorch's own median error, if it was measured.
    """

    name: str
    prepare: Callable[[Planner], dict[str, Any]]
    finish: Callable[[dict[str, Any], Mapping[str, dict[str, Any]]], dict[str, Any]]
    torch_gradient: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark in two stages."""
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="default: what mbc finds for the GPU")
    parser.add_argument("--gpu", default="h200", help="what to plan for (default h200)")
    parser.add_argument("--plans", type=Path, default=PLANS, help="folder of plans (default build/plans)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plan-only", action="store_true", help="plans and predictions only; needs no GPU")
    how.add_argument(
        "--measure", dest="plan_only", action="store_false", help="run the plans on this machine's GPU (the default)"
    )
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    parser.add_argument("--no-gradients", action="store_true", help="steps only")
    parser.add_argument(
        "--for", dest="for_s", type=float, default=1e9, metavar="S", help="start no row after S seconds"
    )
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N",
        help="processes that plan and build side by side (default: the cores, 8 at most)",
    )  # fmt: skip


def drive(name: str, tasks: Sequence[Task], columns: Sequence[str], arguments: argparse.Namespace, **more: Any) -> None:
    """Plan the rows that have no plan yet. Then build and run them, unless `--plan-only` is set."""
    began = time.monotonic()
    if not arguments.plan_only:
        need_gpu("--plan-only predicts without running")
    shelf = Shelf(arguments.plans)
    wanted = [task for task in tasks if not arguments.only or any(word in task.name for word in arguments.only)]
    planned, measured = results(f"{name}_planned", **more), results(name, **more)
    if arguments.again:
        for task in wanted:
            (planned if arguments.plan_only else measured).rows.pop(task.name, None)

    def ready(task: Task) -> bool:
        return planned.done(task.name) and shelf.has(planned.rows[task.name])

    if wanted and all(ready(task) if arguments.plan_only else measured.done(task.name) for task in wanted):
        print("nothing is left to do, every row is there: --again makes them anew")
    # Where steps are to run, a plan that could not be made is not tried again: a GPU would wait for it.
    missing = [
        task
        for task in wanted
        if not ready(task)
        and (arguments.plan_only or (not measured.done(task.name) and not _hopeless(planned, task.name)))
    ]
    if missing:
        _plan(missing, [task.name for task in tasks], planned, shelf, columns, arguments)
    result = planned
    if not arguments.plan_only:
        waiting = [task for task in wanted if planned.done(task.name) and not measured.done(task.name)]
        _measure(waiting, planned, measured, shelf, columns, arguments, began)
        result = measured
    print()
    show([result.rows[task.name] for task in wanted if task.name in result.rows], columns)


def _hopeless(planned: Results, name: str) -> bool:
    return name in planned.rows and not planned.done(name)


def _plan(
    missing: Sequence[Task],
    order: Sequence[str],
    planned: Results,
    shelf: Shelf,
    columns: Sequence[str],
    arguments: argparse.Namespace,
) -> None:
    # Threads of rows only wait for plans, and end when the processes do: these have to end first.
    with ThreadPoolExecutor(len(missing)) as rows, processes(arguments.workers) as pool:
        planner = Planner(Card(arguments.gpu, arguments.profile), shelf, pool)
        waiting = {rows.submit(task.prepare, planner): task.name for task in missing}
        for done in as_completed(waiting):
            name = waiting[done]
            planned.put(attempt(done.result, name))
            show([planned.rows[name]], columns)
    planned.arrange(order)


def _measure(
    waiting: Sequence[Task],
    planned: Results,
    measured: Results,
    shelf: Shelf,
    columns: Sequence[str],
    arguments: argparse.Namespace,
    began: float,
) -> None:
    with tempfile.TemporaryDirectory() as folder, processes(arguments.workers) as pool:
        built = {
            (task.name, what): pool.submit(build, shelf.path(task.name, what), _place(Path(folder), number, what))
            for number, task in enumerate(waiting)
            for what in planned.rows[task.name]["plans"]
        }
        for number, task in enumerate(waiting):
            if time.monotonic() - began > arguments.for_s:
                print(f"{len(waiting) - number} rows are left: run this again")
                for future in built.values():
                    future.cancel()
                return
            caps = planned.rows[task.name]["plans"]
            failed = {what: failure_of(built[task.name, what]) for what in caps}
            places = {what: _place(Path(folder), number, what) for what in caps if not failed[what]}

            def work(
                task: Task = task, caps: dict[str, int] = caps, places: dict[str, Path] = places,
                failed: dict[str, str] = failed,
            ) -> dict[str, Any]:  # fmt: skip
                timed = {what: {"failed": why} for what, why in failed.items() if why}
                for what, place in places.items():
                    timed |= time_packages({what: place}, arguments.steps, cap_bytes=caps[what])
                row = task.finish(dict(planned.rows[task.name]), timed)
                pair = row.get("compare")
                if not pair or arguments.no_gradients or not all(what in places for what in pair):
                    return row
                one, other = pair
                row |= gradient_distances(places[one], caps[one], places[other], caps[other])
                if task.torch_gradient is not None and "gradient_median" in row:
                    row["gradients_passed"] = bool(row["gradient_median"] <= TIMES_TORCH * task.torch_gradient)
                return row

            measured.put(attempt(work, task.name))
            show([measured.rows[task.name]], columns)


def _place(folder: Path, number: int, what: str) -> Path:
    return folder / f"p{number}_{what}"


def build(plan: Path, folder: Path) -> str:
    """Build the plan in a file into a package. Return an empty text, or the reason of the failure."""
    from mbc.codegen.build import write_package
    from mbc.codegen.toolchain import find_toolchain

    try:
        package = write_package((unpack(plan),), folder, find_toolchain(), overwrite=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if package.library else "not built: " + ", ".join(m.name for m in package.missing)


def failure_of(future: Future[str]) -> str:
    """Return why a package was not built, or an empty text if it was built. The process may have died."""
    try:
        return future.result()
    except Exception as error:  # the process died
        return f"{type(error).__name__}: {error}"


def gradient_distances(one: Path, one_cap_bytes: int, other: Path, other_cap_bytes: int) -> dict[str, Any]:
    """Return the relative L2 distances between the gradients of a first step of two packages of one network."""
    gradients: list[dict[str, np.ndarray]] = []
    for folder, cap_bytes in ((one, one_cap_bytes), (other, other_cap_bytes)):
        request = json.dumps([str(folder), cap_bytes, str(folder / "gradients.npz")])
        done = subprocess.run(
            [sys.executable, __file__, "--gradients", request],
            capture_output=True, text=True, timeout=GRADIENT_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            return {"gradients_failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        with np.load(folder / "gradients.npz") as stored:
            gradients.append(dict(stored))
    distances = errors(gradients[0], gradients[1])
    return {"gradient_median": median(distances.values()), "gradient_worst": max(distances.values())}


def write_gradients(folder: str, cap_bytes: int, path: str) -> None:
    """Write the gradients of one step of a package to a file, in a process of its own."""
    from modules import module_gradients, open_module, random_inputs
    from stepping import occupy

    where = Path(folder)
    held = occupy(where, cap_bytes) if cap_bytes else None
    with open_module(where, "cuda") as module:
        graph = module.plan.graph
        arrays: Sequence[Any] = held.arrays if held else random_inputs(graph)
        _, gradients, _ = module_gradients(module, graph, graph.optimizer, tuple(arrays))
        np.savez(path, **gradients)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    if sys.argv[1:2] != ["--gradients"]:
        raise SystemExit("ahead.py is a part of other benchmarks")
    write_gradients(*json.loads(sys.argv[2]))

"""Test accuracy of ResNet-18 on patches of pictures with a whole recipe, by mbc and by PyTorch, in pairs.

Both trainings of a pair begin with equal weights and see equal mini-batches in the same order. `own`: each training
draws its own crops and flips. `shared`: both get the crops and flips that the host drew, and mbc only normalises. The
result passes if mbc's mean accuracy over all pairs is not below PyTorch's by more than two standard errors of the
difference.

Each pair is written when it ends. The next call continues from there, unless code, GPU or sizes have changed.

    python benchmarks/textures.py --prepare FOLDER_OF_PICTURES     # skimage/data of an installed scikit-image; Pillow
    python benchmarks/textures.py [--seeds 12] [--augmentation own shared] [--workers 4] [--limit-s SECONDS]
    python benchmarks/textures.py --device cpu --seeds 2 --epochs 1 --width 8 --train 12 --test 4    # a rehearsal
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner import processes
from record import ROOT, Results, environment, need_gpu, results, show, start
from textures_task import DATA, Task, prepare
from textures_training import by_mbc, by_torch

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.compiler import compile_plan
from mbc.options import Options

COLUMNS = ("name", "pairs", "mean", "torch_mean", "difference", "standard_error", "passed")
AUGMENTATIONS = ("own", "shared")
STANDARD_ERRORS = 2.0  # that mbc may be below


def pair_of(package: Any, task: Task, seed: int, device: str) -> dict[str, Any]:
    """Return the figures of a pair of trainings from one seed. Runs in a process of its own."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)  # several pairs run side by side
    data = task.data()
    began = time.perf_counter()
    ours = by_mbc(package, task, data, seed, device)
    between = time.perf_counter()
    theirs = by_torch(task, data, seed, device)
    seconds = {"mbc_s": between - began, "torch_s": time.perf_counter() - between}
    return {"seed": seed, **seconds, "mbc": ours.figures(), "torch": theirs.figures()}


def judged(pairs: Sequence[Mapping[str, Any]], wanted: int) -> dict[str, Any]:
    """Return the means over all pairs, their difference and its standard error. The verdict needs all pairs."""
    ours, theirs = ([float(pair[side]["accuracy"]) for pair in pairs] for side in ("mbc", "torch"))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    difference = statistics.mean(differences)
    error = statistics.stdev(differences) / len(pairs) ** 0.5 if len(pairs) > 1 else None
    complete = len(pairs) >= wanted and error is not None
    return {
        "pairs": len(pairs), "mean": statistics.mean(ours), "torch_mean": statistics.mean(theirs),
        "difference": difference, "standard_error": error,
        "passed": difference >= -STANDARD_ERRORS * error if complete and error is not None else None,
    }  # fmt: skip


def package_of(task: Task, device: str, folder: Path) -> Any:
    """Compile the task, and return its plan for a CPU or the folder of its package for a GPU.

    The source stays in build/ for `mbc check --launches`.
    """
    path = DATA.with_name(f"textures_{'shared' if task.shared else 'own'}.mbc")
    path.write_text(task.source().text, encoding="utf-8")
    gpu = "auto" if device == "cuda" else "h200"
    plan = compile_plan(task.source(), Options(gpu=gpu, settings=task.settings))
    if device != "cuda":
        return plan
    write_package((plan,), folder / task.name, find_toolchain())
    return folder / task.name


def pairs_left(task: Task, seeds: int, held: Results) -> list[int]:
    """Return the seeds whose pairs have not run yet."""
    earlier = {pair["seed"] for pair in held.rows.get(task.name, {}).get("each", ())}
    return [seed for seed in range(seeds) if seed not in earlier]


def run_pairs(
    pool: ProcessPoolExecutor, workers: int, package: Any, task: Task, arguments: argparse.Namespace, held: Results
) -> None:
    """Run the missing pairs, `workers` at a time. No pair begins that would end too late."""
    missing = pairs_left(task, arguments.seeds, held)
    each: list[dict[str, Any]] = list(held.rows.get(task.name, {}).get("each", ()))
    running: dict[Future[dict[str, Any]], float] = {}
    longest = 0.0
    while missing or running:
        while missing and len(running) < workers and time.monotonic() + longest < arguments.end:
            pair = pool.submit(pair_of, package, task, missing.pop(0), arguments.device)
            running[pair] = time.monotonic()
        if not running:
            print(f"{task.name}: {len(missing)} pairs are left for another call", flush=True)
            return
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            longest = max(longest, time.monotonic() - running.pop(done))
            each = sorted([*each, done.result()], key=lambda one: one["seed"])
            verdict = judged(each, arguments.seeds)
            held.put({"name": task.name, **verdict, **asdict(task), "each": each})
            print(f"{task.name}, seed {done.result()['seed']}: {_told(done.result())}", flush=True)


def _told(pair: Mapping[str, Any]) -> str:
    sides = (f"{side} {pair[side]['accuracy']:.4f} in {pair[f'{side}_s']:.1f} s" for side in ("mbc", "torch"))
    return ", ".join(sides)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the patches, and nothing else")
    parser.add_argument("--seeds", type=int, default=12, metavar="N", help="pairs (default 12)")
    parser.add_argument(
        "--augmentation", nargs="+", choices=AUGMENTATIONS, default=AUGMENTATIONS, help="(default both)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), metavar="S", help="begin no pair that ends later"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="pairs side by side (default 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    sizes = {name: default for name, default in asdict(Task(True)).items() if name not in ("shared", "precision")}
    parser.add_argument("--precision", default=Task(True).precision)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
        return
    arguments.end = time.monotonic() + arguments.limit_s
    if arguments.device == "cuda":
        need_gpu("--device cpu rehearses it at small sizes")
    if not DATA.exists():
        raise SystemExit(f"there is no {DATA.relative_to(ROOT)}: --prepare first")
    own = {name: getattr(arguments, name) for name in sizes}
    held = results("textures", current=True, size=own, device=arguments.device, gpu=environment()["gpu"])
    tasks = [Task(name == "shared", arguments.precision, **own) for name in arguments.augmentation]
    with tempfile.TemporaryDirectory() as folder, processes(arguments.workers) as pool:
        packages = {
            task: pool.submit(package_of, task, arguments.device, Path(folder))
            for task in tasks
            if pairs_left(task, arguments.seeds, held)
        }
        for task, package in packages.items():
            run_pairs(pool, arguments.workers, package.result(), task, arguments, held)
    show(list(held.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)

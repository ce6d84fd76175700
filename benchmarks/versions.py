"""Steps of the same networks as two checkouts of mbc compile them, timed in turn: what a change that should change
nothing has changed.

Each checkout plans and builds each network with its own code; packages are opened in processes of their own, one after
the other (before, after, before, ...), so that clocks and temperature are the same for both.

    python benchmarks/versions.py BEFORE [--after .] [--rounds 3] [--steps 40] [--gpu h200] [--only NAME ...]

BEFORE and AFTER are folders with a checkout. Writes `results/versions.json`: a row a network, the median of its rounds'
medians, and after over before. Passed is what lies within WITHIN.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import ROOT, attempt, need_gpu, show, start, write

WITHIN = 0.01
NETWORKS = {
    "resnet50 256 bf16": ("resnet", "depth=50", "batch=256", "train.precision=bf16"),
    "resnet18 256 fp32": ("resnet", "depth=18", "batch=256", "train.precision=fp32"),
    "vgg16 64 fp32": ("vgg16", "batch=64", "train.precision=fp32"),
    # A third of what its plan takes without a budget.
    "resnet50 184 bf16 in 2.76 GB": (
        "resnet", "depth=50", "batch=184", "train.precision=bf16", "memory.device=2.76GB",
    ),
}  # fmt: skip


def environment(checkout: Path) -> dict[str, str]:
    paths = [str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if Path(p) != ROOT or checkout == ROOT)}


def build(checkout: Path, name: str, folder: Path, gpu: str) -> Path:
    """The package that `checkout` compiles of a network, in `folder`."""
    source, *settings = NETWORKS[name]
    command = [sys.executable, "-m", "mbc.cli", "compile", f"examples/{source}.mbc", "--measure", "never", "--gpu", gpu]
    command += [*(part for setting in settings for part in ("--set", setting)), "--output", str(folder)]
    done = subprocess.run(command, cwd=checkout, env=environment(checkout), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def step_ms(checkout: Path, package: Path, steps: int) -> float:
    """Median of steps of a package, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / "stepping.py"), "--child"],
        input=json.dumps([{"step": str(package)}, steps, 0, 0]),
        cwd=checkout, env=environment(checkout), capture_output=True, text=True, check=False,
    )  # fmt: skip
    row = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), {})
    if "step_ms" not in row:
        raise RuntimeError(f"{checkout}: {row.get('failed') or done.stderr.strip().splitlines()[-1:]}")
    return float(row["step_ms"])


def compare(checkouts: dict[str, Path], packages: dict[str, Path], rounds: int, steps: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {which: [] for which in checkouts}
    for _ in range(rounds):
        for which, checkout in checkouts.items():
            times[which].append(step_ms(checkout, packages[which], steps))
    before, after = (statistics.median(times[which]) for which in ("before", "after"))
    row = {f"{which}_ms": statistics.median(found) for which, found in times.items()}
    return row | {"times_ms": times, "ratio": after / before, "passed": abs(after / before - 1) <= WITHIN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    arguments = parser.parse_args()
    need_gpu("nothing is timed without one")
    checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        built = {
            (name, which): pool.submit(
                build, checkout, name, Path(folder) / f"{which}_{name.replace(' ', '_')}", arguments.gpu
            )
            for name in arguments.only
            for which, checkout in checkouts.items()
        }
        for name in arguments.only:

            def compared(name: str = name) -> dict[str, Any]:
                packages = {which: built[name, which].result() for which in checkouts}
                return compare(checkouts, packages, arguments.rounds, arguments.steps)

            for one in built.values():
                one.exception()  # nothing is built while steps are timed
            rows.append(attempt(compared, name))
            show(rows[-1:], ["name", "before_ms", "after_ms", "ratio", "passed", "failed"])
    write("versions", rows, planned_for=arguments.gpu)


if __name__ == "__main__":
    start(main)

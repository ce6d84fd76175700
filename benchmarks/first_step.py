"""Time from `mbc compile` to the first step on a GPU of which mbc has no profile, and the quality of that step.

A copy of mbc without the bundled profile of this machine's GPU compiles each network into a package. The copy has an
empty profile of its own; the profiles of other GPUs stay, as for any new GPU. mbc's kernels are compiled beforehand, as
after any earlier use of mbc on the machine. With `--empty-cache` the cache of objects is empty, too, as after the
installation; these rows have a name of their own. `--imported` adds networks of torchvision and timm
(`imported_sources.py`), which no bundled profile has seen.

* `first_step_s`: seconds until a new process has made the first step.
* `measured`: requests that were measured for it; `left`: requests that were left to their estimates.
* `over_full`: the step over the fastest step of a plan with all measurements: by the bundled profile, or, with `--full
  S`, after measuring all undivided requests for at most S seconds.
* `unmeasured_ms`: the step of the plan by the profiles of other GPUs alone; `unmeasured_over`: this step over the
  fastest step of all.

    python benchmarks/first_step.py [--only NAME ...] [--for SECONDS] [--full SECONDS] [--empty-cache] [--imported]
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from imported_sources import imported_jobs
from modules import Job, example
from record import ROOT, attempt, build_kernels, need_gpu, results, show, start
from stepping import time_packages

from mbc.codegen.cache import VARIABLE
from mbc.hardware.target import find_device
from mbc.profile.paths import bundled_path, file_name
from mbc.profile.read_profile import read_profile

PRECISION = (("train.precision", "bf16"),)
DENSENET_201 = (("counts", "(6, 12, 48, 32)"), ("batch", "64"))
# Networks, and seconds to the first step that were asked for.
CASES: Mapping[str, tuple[Job, float | None]] = {
    "resnet50 256": (example("resnet", ("depth", "50"), ("batch", "256"), *PRECISION), 60.0),
    "densenet201 64": (example("densenet121", *DENSENET_201, *PRECISION), 120.0),
    "mobilenet_v2 128": (example("mobilenet_v2", ("batch", "128"), *PRECISION), None),
    "googlenet 64": (example("googlenet", ("batch", "64"), *PRECISION), None),
}
MOST_OVER = 1.03  # of the step over that with all measured
TIMEOUT_S = 400.0
COLUMNS = (
    "name", "compile_s", "first_step_s", "measured", "left", "step_ms", "predicted_ms", "bundled_ms", "full_ms",
    "over_full", "unmeasured_ms", "unmeasured_over", "passed",
)  # fmt: skip


def unseen(folder: Path) -> Path:
    """Return a copy of mbc in `folder` that has no profile of this machine's GPU."""
    for part in ("mbc", "templates", "grammar"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / bundled_path(find_device("auto").name).relative_to(ROOT)).unlink(missing_ok=True)
    compileall.compile_dir(folder / "mbc", quiet=1, workers=0)  # as pip does where it installs
    return folder


def run(copy: Path, home: Path, words: Sequence[str], cache: Path | None = None) -> None:
    """Run a command line of a copy of mbc, with that copy's own profiles, and a cache of objects unless it is None."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"XDG_DATA_HOME": str(home)} | ({VARIABLE: str(cache)} if cache else {})
    command = [sys.executable, "-m", "mbc.cli", *words]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-5:]))


def words_of(job: Job, folder: Path) -> list[str]:
    """Write the job's source into `folder`, and return the words that name it with its settings on a command line."""
    source = folder / "net.mbc"
    source.write_text(job.source.text, encoding="utf-8")
    return [str(source), *(f"--set={name}={value}" for name, value in job.settings)]


def measured(copy: Path, job: Job, asked_s: float | None, full_s: float, empty_cache: bool) -> dict[str, Any]:
    """Return the row of one job."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        new, bundled, unmeasured, full = (folder / name for name in ("new", "bundled", "unmeasured", "full"))
        words = words_of(job, folder)
        began = time.monotonic()
        run(copy, folder / "home", ("compile", *words, "-o", str(new)), folder / "cache" if empty_cache else None)
        compile_s = time.monotonic() - began
        time_packages({"new": new}, 2, timeout_s=TIMEOUT_S)
        row: dict[str, Any] = {"compile_s": compile_s, "first_step_s": time.monotonic() - began}
        own = folder / "home" / "mbc" / "profiles" / file_name(find_device("auto").name)
        earlier = read_profile(own)
        row |= {"measured": len(earlier.extents), "left": len(earlier.left_to_estimate)}
        run(ROOT, folder / "none", ("compile", *words, "-o", str(bundled), "--measure", "never"))
        run(copy, folder / "none", ("compile", *words, "-o", str(unmeasured), "--measure", "never"))
        packages = {"bundled": bundled, "new": new, "unmeasured": unmeasured}
        if full_s:
            began = time.monotonic()
            limit = f"--measure-for={full_s:.0f}s"
            run(copy, folder / "home", ("profile", *words, "--policy", "undivided", limit))
            row["full_s"] = time.monotonic() - began
            run(copy, folder / "home", ("compile", *words, "-o", str(full), "--measure", "never"))
            packages["full"] = full
        result = time_packages(packages, 20, timeout_s=TIMEOUT_S)
    if failed := [f"{name}: {one['failed']}" for name, one in result.items() if "failed" in one]:
        return row | {"failed": "; ".join(failed)}
    row |= {"step_ms": result["new"]["step_ms"], "predicted_ms": result["new"]["predicted_ms"]}
    row |= {"measured_share": result["new"]["measured_share"]}
    row |= {f"{name}_ms": one["step_ms"] for name, one in result.items() if name != "new"}
    row["over_full"] = row["step_ms"] / min(result[name]["step_ms"] for name in ("bundled", "full") if name in result)
    row["unmeasured_over"] = row["unmeasured_ms"] / min(one["step_ms"] for one in result.values())
    in_time = asked_s is None or row["first_step_s"] <= asked_s
    return row | {"asked_s": asked_s, "passed": in_time and row["over_full"] <= MOST_OVER}


def named_cases(arguments: argparse.Namespace) -> dict[str, tuple[Job, float | None]]:
    """Return the networks of the rows."""
    cases = dict(CASES)
    if arguments.imported:
        cases |= {job.name: (job.with_settings(*PRECISION), None) for job in imported_jobs()}
    return {f"{name} empty cache": case for name, case in cases.items()} if arguments.empty_cache else cases


def matches(name: str, words: Sequence[str]) -> bool:
    """Return whether a name holds one of the words, or there are none."""
    return not words or any(word in name for word in words)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--for", dest="for_s", type=float, default=1e9, metavar="S", help="begin no row later")
    parser.add_argument("--full", type=float, default=0.0, metavar="S", help="measure all, for so long at most")
    parser.add_argument("--empty-cache", action="store_true", help="compile also all kernels")
    parser.add_argument("--imported", action="store_true", help="also networks of torchvision and timm")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    need_gpu("nothing of it can be told without")
    began = time.monotonic()
    kept = results("first_step", again=arguments.again)
    cases = {name: case for name, case in named_cases(arguments).items() if matches(name, arguments.only)}
    build_kernels("bf16")
    with tempfile.TemporaryDirectory() as folder:
        copy = unseen(Path(folder))
        for name, (job, asked_s) in cases.items():
            if kept.done(name) or time.monotonic() - began > arguments.for_s:
                continue
            kept.put(attempt(partial(measured, copy, job, asked_s, arguments.full, arguments.empty_cache), name))
            show([kept.rows[name]], COLUMNS)
    show(list(kept.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)

"""One mini-batch shared by whole GPUs and as many parts of GPUs, which compute on some of their multiprocessors.

Asked are 95 % of the summed speeds, each alone with a mini-batch of 256. `equal_ms` is what an equal share of the rows
takes alone on the slower of the two kinds: an equal split of the mini-batch takes no less. Both kinds are measured into
their profiles, then everything is planned and built, then run; stages can be called one by one.

    python benchmarks/unlike_gpus.py [--gpus 2] [--multiprocessors 64] [--only NAME ...] [--for 540]
    python benchmarks/unlike_gpus.py --stage measure --measure-for 30s      # on as many GPUs at once as there are
    python benchmarks/unlike_gpus.py --stage plan --gpu h100                # needs no GPU
    python benchmarks/unlike_gpus.py --stage build run
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from many_gpus import spec_name
from modules import Job, example
from planner import processes
from record import ROOT, attempt, results, show, start

from mbc.bench import ranks
from mbc.bench.job import MBC, Contender, Share
from mbc.bench.job import Job as Raced
from mbc.codegen.build import LIBRARY, write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.compiler import compile_plans
from mbc.hardware.target import local_gpus
from mbc.options import Options, RankGpu
from mbc.plan.file import PLAN_FILE, load_plan

BATCH = 256  # of a GPU that is alone
EACH = BATCH // 2  # rows of a GPU where all have equally many
ASKED = 0.95  # of the summed speeds
PART_S = 120.0  # the most that one run may take
STAGES = ("measure", "plan", "build", "run")
CASES = {"resnet18": (("depth", "18"),), "resnet50": (("depth", "50"),)}
PACKAGES = ROOT / "build" / "unlike_gpus"
COLUMNS = (
    "name", "multiprocessors", "rows", "whole_ms", "part_ms", "ms", "predicted_ms", "of_summed_speeds", "equal_ms",
    "over_equal", "measured_share", "passed",
)  # fmt: skip


@dataclass(frozen=True)
class Package:
    """What is planned and built: `gpus` by rank."""

    name: str
    gpus: tuple[str, ...]
    batch: int


@dataclass(frozen=True)
class Case:
    """A network on `gpus` GPUs, half of which are parts of `multiprocessors`."""

    network: str
    gpu: str
    multiprocessors: int
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.network} {self.gpus} GPUs"

    @property
    def part(self) -> str:
        return f"{self.gpu}@{self.multiprocessors}"

    @property
    def job(self) -> Job:
        return example("resnet", *CASES[self.network], ("train.precision", "bf16"))

    @property
    def shared(self) -> Package:
        half = self.gpus // 2
        return Package(f"shared_{self.gpus}", (self.gpu,) * half + (self.part,) * half, self.gpus * EACH)

    @property
    def alone(self) -> tuple[Package, ...]:
        """Each kind with a mini-batch of its own, and with an equal share of rows."""
        return tuple(
            Package(f"{kind}_{batch}", (gpu,), batch)
            for batch in (BATCH, EACH)
            for kind, gpu in (("whole", self.gpu), ("part", self.part))
        )

    def folder(self, package: Package) -> Path:
        return PACKAGES / self.part / self.network / package.name

    def options(self, package: Package) -> Options:
        told = Options(package.gpus[0], self.settings(package.batch), len(package.gpus), network=self.job.network)
        return replace(told, rank_gpus=tuple(map(RankGpu, package.gpus)) if len(package.gpus) > 1 else ())

    def settings(self, batch: int) -> tuple[tuple[str, str], ...]:
        return (*self.job.settings, ("batch", str(batch)))


def measured_rows(case: Case) -> Iterator[tuple[tuple[bool, int], ...]]:
    """For how many rows kernels are measured, of a whole GPU (False) and of a part (True): first those of the last
    shared plan, or about those that one will give, then what is alone."""
    last = results("unlike_gpus_planned").rows.get(case.name, {})
    known = last if (last.get("gpu"), last.get("multiprocessors")) == (case.gpu, case.multiprocessors) else {}
    rows = known.get(case.shared.name, {}).get("rows") or estimated_rows(case)
    for batches in ((rows[0], rows[-1]), (BATCH, BATCH), (EACH, EACH)):
        yield tuple(zip((False, True), batches, strict=True))


def estimated_rows(case: Case) -> tuple[int, int]:
    """Of a whole GPU and a part that share twice EACH rows, if a step takes a + b * rows."""
    ms = {p.name: compile_plans(case.job.source, case.options(p))[0].predictions.train_us for p in case.alone}
    a, b = {}, {}
    for kind in ("whole", "part"):
        b[kind] = (ms[f"{kind}_{BATCH}"] - ms[f"{kind}_{EACH}"]) / (BATCH - EACH)
        a[kind] = ms[f"{kind}_{BATCH}"] - BATCH * b[kind]
    of_part = round((a["whole"] + b["whole"] * BATCH - a["part"]) / (b["whole"] + b["part"]))
    return BATCH - of_part, of_part


def measure(case: Case, of_part: bool, batch: int, number: int, limit: str) -> None:
    """Into the profile that plans for this kind of GPU find by themselves, on the GPU of a number."""
    words = [value for pair in case.settings(batch) for value in ("--set", "=".join(pair))]
    gpu = f"{number}@{case.multiprocessors}" if of_part else str(number)
    command = [sys.executable, "-m", "mbc.cli", "profile", case.job.source.name, *words, "--gpu", gpu]
    subprocess.run([*command, "--measure-for", limit], check=True)


def measure_all(cases: list[Case], limit: str, for_s: float) -> None:
    """On all GPUs of the machine at once, the shared rows of every network first. Nothing is begun after `for_s`."""
    began, numbers = time.monotonic(), range(len(local_gpus()))
    rounds = zip(*map(measured_rows, cases), strict=True)
    wanted = iter([(case, *of) for pairs in rounds for case, pair in zip(cases, pairs, strict=True) for of in pair])

    with ThreadPoolExecutor(len(numbers)) as pool:

        def work(number: int) -> None:
            for case, of_part, batch in wanted:
                if time.monotonic() - began > for_s:
                    return
                measure(case, of_part, batch, number, limit)

        list(pool.map(work, numbers))


def built(case: Case, package: Package) -> dict[str, Any]:
    """Plans of a package, written; and what they predict. Runs in a process of its own."""
    plans = compile_plans(case.job.source, case.options(package))
    write_package(plans, case.folder(package), find_toolchain(), overwrite=True)
    shared = plans[0].graph.ranks
    return {
        "rows": [] if shared is None else list(shared.rows),
        "predicted_ms": max(plan.predictions.train_us for plan in plans) / 1e3,
        "measured_share": min(plan.predictions.measured_share for plan in plans),
    }


def build_again(folder: Path) -> str:
    """Build a package that was written where there is no toolchain; what went wrong, if anything."""
    files = (folder / PLAN_FILE, *sorted(folder.glob(f"rank*/{PLAN_FILE}")))
    plans = [load_plan(file.read_text(encoding="utf-8"), PLAN_FILE) for file in files]
    package = write_package(plans, folder, find_toolchain(), overwrite=True)
    return "" if package.library else f"{folder}: " + ", ".join(missing.name for missing in package.missing)


def build_all(cases: list[Case], workers: int) -> None:
    """Those of the packages that are not built."""
    wanted = {case.folder(p) for case in cases for p in (case.shared, *case.alone)}
    with processes(workers) as pool:
        for why in pool.map(build_again, [f for f in wanted if f.exists() and not (f / LIBRARY).exists()]):
            if why:
                print(why, flush=True)


def plan_all(cases: list[Case], workers: int) -> None:
    held = results("unlike_gpus_planned")
    with processes(workers) as pool:
        # What is alone belongs to cases of any number of GPUs.
        wanted = {case.folder(p): (case, p) for case in cases for p in (case.shared, *case.alone)}
        made = {folder: pool.submit(built, *of) for folder, of in wanted.items()}
        for case in cases:
            found = {p.name: made[case.folder(p)] for p in (case.shared, *case.alone)}
            held.put(
                {"gpu": case.gpu, "multiprocessors": case.multiprocessors}
                | attempt(lambda f=found: {what: one.result() for what, one in f.items()}, case.name)
            )


def row_of(case: Case, planned: Mapping[str, Any], alone_ms: dict[Path, float]) -> dict[str, Any]:
    """`alone_ms`: steps that were timed on this machine, by their packages; those of this row are added."""
    if "failed" in planned:
        raise RuntimeError(planned["failed"])
    shared = planned[case.shared.name]
    for package in case.alone:
        folder = case.folder(package)
        alone_ms[folder] = alone_ms.get(folder) or run(case, package, ())
    ms = {p.name: alone_ms[case.folder(p)] for p in case.alone}
    ms[case.shared.name] = run(case, case.shared, tuple(shared["rows"]))
    return judged(case, ms) | shared | {"gpu": case.gpu, "multiprocessors": case.multiprocessors}


def run(case: Case, package: Package, rows: tuple[int, ...]) -> float:
    """Milliseconds of a step."""
    place = str(case.folder(package))
    several = len(package.gpus) > 1
    raced = Raced(
        case.job.source, case.settings(package.batch), case.job.network, place, "cuda", blocks=5, alone_package=place,
        share=Share(sizes=rows) if several else Share(),
    )  # fmt: skip
    found = (ranks.run_ranks if several else ranks.run_alone)(raced, Contender(MBC), len(package.gpus), PART_S)
    if found.problem:
        raise RuntimeError(f"{package.name}: {found.problem}")
    return found.step_ms


def judged(case: Case, ms: Mapping[str, float]) -> dict[str, Any]:
    """The speed of all beside those of each, by the steps' times."""
    whole_ms, part_ms, together_ms = ms[f"whole_{BATCH}"], ms[f"part_{BATCH}"], ms[case.shared.name]
    equal_ms = max(ms[f"whole_{EACH}"], ms[f"part_{EACH}"])
    summed = case.gpus / 2 * BATCH * (1 / whole_ms + 1 / part_ms)
    of_summed_speeds = case.shared.batch / together_ms / summed
    return {
        "ms": together_ms, "whole_ms": whole_ms, "part_ms": part_ms, "equal_ms": equal_ms,
        "of_summed_speeds": of_summed_speeds, "over_equal": equal_ms / together_ms,
        "passed": of_summed_speeds >= ASKED and together_ms < equal_ms,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="*", default=[2], help="that share a mini-batch (default 2)")
    parser.add_argument("--multiprocessors", type=int, default=64, help="of the part (default 64)")
    parser.add_argument("--gpu", help="what to plan for (default: this machine's)")
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--measure-for", default="60s", metavar="T", help="each number of rows (default 60s)")
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES), metavar="NAME")
    parser.add_argument("--for", dest="for_s", type=float, default=540.0, metavar="S", help="begin nothing later")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="processes that plan (default 8)")
    arguments = parser.parse_args()
    began, gpu = time.monotonic(), arguments.gpu or spec_name()
    cases = [
        Case(network, gpu, arguments.multiprocessors, gpus)
        for network in arguments.only or CASES
        for gpus in arguments.gpus
    ]
    if "run" in arguments.stage and len(local_gpus()) < max(arguments.gpus):
        raise SystemExit(f"this machine has no {max(arguments.gpus)} GPUs that can be used")
    if "measure" in arguments.stage:
        measure_all(list({case.network: case for case in cases}.values()), arguments.measure_for, arguments.for_s)
    if "plan" in arguments.stage:
        plan_all(cases, arguments.workers)
    if "build" in arguments.stage:
        build_all(cases, arguments.workers)
    planned, held = results("unlike_gpus_planned"), results("unlike_gpus")
    machine = [gpu.uuid for gpu in local_gpus()]
    alone_ms = {
        PACKAGES / where: ms
        for row in held.rows.values()
        if row.get("machine") == machine
        for where, ms in row["alone_ms"].items()
    }
    for case in cases if "run" in arguments.stage else ():
        if time.monotonic() - began > arguments.for_s:
            print("time is over, rows are left: run this again", flush=True)
            break
        made = planned.rows.get(case.name, {"failed": "there are no plans: --stage plan first"})
        found = attempt(lambda c=case, m=made: row_of(c, m, alone_ms), case.name)
        known = {str(folder.relative_to(PACKAGES)): ms for folder, ms in alone_ms.items()}
        held.put({"name": case.name} | found | {"machine": machine, "alone_ms": known})
    show(list(held.rows.values()), COLUMNS)


if __name__ == "__main__":
    start(main)

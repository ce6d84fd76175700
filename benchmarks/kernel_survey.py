"""Count in how many plans each of mbc's own kernels is chosen, and for how many measured requests it is the fastest.

    python benchmarks/kernel_survey.py [--imported] [--also SOURCE ...] [--only NAME ...] [--for SECONDS] [--again]

The plans are of every example (of ResNet also with bottlenecks), in four precisions, for the GPUs of the bundled
profiles. They are undivided without a limit at the default batch and two smaller batches, and, at the default batch,
within budgets that are shares of the arena without a limit. The networks that `mbc bench` timed are planned in these
ways, too. `--imported` adds five networks of torchvision and timm (`imported_sources.py`) in three precisions, without
a limit and within two budgets. `--also` names further sources, such as those that `mbc import` writes. Needs no GPU.

Writes `results/kernel_survey.json` with a row for each plan, and continues where it stopped. Rows that other code made
name that code; `--again` plans them anew. `evidence` has a row for each kernel: the number of plans that use the
kernel, how many of these plans are of imported networks, and for how many requests in the bundled profiles the kernel
was measured, and is the fastest. `slower_without` is the median, over the latter, of the time of the fastest other
kernel over its own. It is null if no other kernel runs such a request. `only`: mbc has no other kernel for this
operation, so that networks with the operation need the kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from imported_sources import BATCHES, imported_jobs
from modules import Job, example, examples
from record import ROOT, Results, attempt, results, show, start

from mbc.errors import BudgetError
from mbc.frontend.parse import parse
from mbc.kernels.cuda import KERNELS
from mbc.kernels.cuda.base import PROVIDER
from mbc.ops import KINDS
from mbc.options import Policy
from mbc.plan.model import Kernel, Plan
from mbc.profile.paths import BUNDLED
from mbc.profile.read_profile import read_profile
from mbc.source import Source

GPUS = ("h200", "h100")  # those of the bundled profiles
PRECISIONS = ("bf16", "fp32", "fp16", "tf32")
SHARES = (0.7, 0.5, 0.4)  # of the arena of the free plan: of the overhead no plan saves any
SMALL_BATCH, BATCH_DIVISOR = 8, 4
IMPORTED_PRECISIONS, IMPORTED_SHARES = ("bf16", "fp16", "fp32"), (0.0, 0.7, 0.5)
COLUMNS = ("name", "plans", "imported", "measured", "fastest", "slower_without", "only", "such as")


@dataclass(frozen=True)
class Case:
    """A network to be planned for a GPU. `share`: budget as a share of the arena without a limit; 0: no limit."""

    job: Job
    batch: int
    precision: str
    gpu: str
    share: float = 0.0

    @property
    def name(self) -> str:
        """Name of the row."""
        settings = " ".join(f"{name}={value}" for name, value in self.job.settings)
        within = f" in {self.share:.0%}" if self.share else ""
        return f"{self.job.name}{settings and ' ' + settings} {self.batch} {self.precision} {self.gpu}{within}"

    @property
    def free(self) -> Case:
        """The case without a budget."""
        return replace(self, share=0.0)

    def plan(self, memory_bytes: int) -> Plan:
        """Return the plan within `memory_bytes`, or without a limit for 0."""
        settings = [("batch", str(self.batch)), ("train.precision", self.precision)]
        settings += [("memory.device", f"{memory_bytes} B")] if memory_bytes else []
        job = replace(self.job.with_settings(*settings), gpu=self.gpu)
        return (job if self.share else job.with_options(policy=Policy.UNDIVIDED)).plan()


def networks(also: Iterable[str]) -> list[Job]:
    """Return the example networks and those of the other sources."""
    jobs = [*examples(), example("resnet", ("depth", "50"))]
    for path in also:
        source = Source(path, Path(path).read_text(encoding="utf-8"))
        jobs += [Job(str(network.name), source, (), str(network.name)) for network in parse(source).networks]
    return jobs


def timed() -> Iterator[tuple[Job, int, str]]:
    """Yield network, batch and precision of each step that `mbc bench` timed; profiles have most of its kernels."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench_*.json")):
        about = json.loads(path.read_text(encoding="utf-8"))
        settings = {name: value for name, value in about["settings"].items() if name != "memory.device"}
        precision = settings.pop("train.precision", about["precision"])
        batch = settings.pop("batch", about["batch"])
        yield example(about["network"], *settings.items()), int(batch), precision


def imported_cases() -> Iterator[Case]:
    """Yield the cases of imported networks."""
    jobs = imported_jobs()
    for share, gpu, precision, job in product(IMPORTED_SHARES, GPUS, IMPORTED_PRECISIONS, jobs):
        yield Case(job, int(dict(job.lowered().settings)["batch"]), precision, gpu, share)


def cases(jobs: list[Job]) -> Iterator[Case]:
    """Yield each case once. Cases without a budget come first, because each takes only a second."""
    default = {job: int(dict(job.lowered().settings)["batch"]) for job in jobs}
    fewer = {job: max(1, batch // BATCH_DIVISOR) for job, batch in default.items()}
    batches = (default, dict.fromkeys(jobs, SMALL_BATCH), fewer)
    free = [Case(job, of[job], precision, gpu) for gpu, of, precision, job in product(GPUS, batches, PRECISIONS, jobs)]
    free += [Case(*step, gpu) for gpu, step in product(GPUS, timed())]
    within = [
        Case(job, default[job], precision, gpu, share)
        for gpu, precision, share, job in product(GPUS, PRECISIONS, SHARES, jobs)
    ]
    within += [Case(*step, gpu, share) for gpu, step, share in product(GPUS, timed(), SHARES)]
    yield from {case.name: case for case in (*free, *within)}.values()


def row_of(case: Case, kept: Results) -> dict[str, Any]:
    """Return the kernels of the plan by number of launches. The budget is a share of the arena of an earlier plan."""
    free = kept.rows.get(case.free.name, {}) if case.share else {}
    if case.share and "arena_bytes" not in free:
        raise RuntimeError("the free plan is missing")
    budget_bytes = int(case.share * free["arena_bytes"]) + free["overhead_bytes"] if free else 0
    began = time.monotonic()
    try:
        plan = case.plan(budget_bytes)
    except BudgetError as error:
        return {"plan_s": time.monotonic() - began, "refused": error.code, "kernels": {}}
    launches = (launch for program in (plan.train, plan.infer) for launch in program.launches)
    works = (launch.work for launch in launches)
    own = Counter(w.name for w in works if isinstance(w, Kernel) and w.provider == PROVIDER)
    return {
        "plan_s": time.monotonic() - began,
        "predicted_ms": plan.predictions.train_us / 1e3,
        "arena_bytes": plan.predictions.arena_bytes,
        "overhead_bytes": plan.predictions.overhead_bytes,
        "measured_share": plan.predictions.measured_share,
        "kernels": dict(sorted(own.items())),
    }


def in_profiles() -> dict[str, list[float | None]]:
    """Return for each kernel one item a measured request: None, or the next kernel's time over its own.

    The item is None if another kernel is faster, and infinite if no other kernel runs the request.
    """
    result: dict[str, list[float | None]] = defaultdict(list)
    for path in sorted(BUNDLED.iterdir()):
        for measured in read_profile(path).measurements.values():
            times: dict[tuple[str, str], float] = {}
            for one in (one for one in measured if not one.refused):
                key = (one.provider, one.name)
                times[key] = min(one.time_us, times.get(key, math.inf))
            for (provider, name), time_us in times.items():
                if provider == PROVIDER:
                    other_us = min((t for key, t in times.items() if key != (provider, name)), default=math.inf)
                    result[name].append(other_us / time_us if time_us <= other_us else None)
    return result


def evidence(rows: Iterable[Mapping[str, Any]], imported: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return for each kernel its plans, an example of one, and its measurements; the rarest kernel first.

    Args:
        rows: The rows of the survey; kernels that no longer exist are left out.
        imported: Names of the networks that count as imported.
    """
    chosen: dict[str, list[str]] = {name: [] for name in KERNELS}
    for row in rows:
        for name in chosen.keys() & row.get("kernels", {}).keys():
            chosen[name].append(row["name"])
    measured, kinds = in_profiles(), Counter(kernel.kind for kernel in KERNELS.values())

    def about(name: str) -> dict[str, Any]:
        of_imported = sum(plan.partition(" ")[0] in imported for plan in chosen[name])
        fastest = [factor for factor in measured.get(name, ()) if factor is not None]
        beside = [factor for factor in fastest if math.isfinite(factor)]
        return {
            "name": name, "plans": len(chosen[name]), "imported": of_imported,
            "measured": len(measured.get(name, ())), "fastest": len(fastest),
            "slower_without": statistics.median(beside) if beside else None,
            "only": KERNELS[name].kind in KINDS and kinds[KERNELS[name].kind] == 1,
            "such as": next(iter(chosen[name]), None),
        }  # fmt: skip

    return sorted(map(about, chosen), key=lambda row: (row["plans"], row["fastest"], row["name"]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--also", nargs="*", default=[], metavar="SOURCE", help="further sources of networks")
    parser.add_argument("--imported", action="store_true", help="also networks of torchvision and timm")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows whose name holds one of these")
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    parser.add_argument(
        "--for", dest="for_s", type=float, default=1e9, metavar="S", help="start no row after S seconds"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    kept = results("kernel_survey", arguments.again)
    every = [*(imported_cases() if arguments.imported else ()), *cases(networks(arguments.also))]
    wanted = [case for case in every if not arguments.only or any(word in case.name for word in arguments.only)]
    waiting = [case for case in wanted if not kept.done(case.name)]
    for number, case in enumerate(waiting):
        if time.monotonic() - began > arguments.for_s:
            print(f"{len(waiting) - number} of {len(wanted)} plans are left: run this again")
            break
        kept.put(attempt(lambda case=case: row_of(case, kept), case.name))
        show([kept.rows[case.name]], ["name", "plan_s", "predicted_ms", "refused"])
    kept.more["evidence"] = evidence(kept.rows.values(), {name.partition("/")[2] for name in BATCHES})
    kept.arrange([case.name for case in wanted])
    show(kept.more["evidence"], COLUMNS)


if __name__ == "__main__":
    start(main)

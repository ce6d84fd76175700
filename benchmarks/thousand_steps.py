"""Comparison of 1,000 steps of a plan within a budget with 1,000 steps of the plan without a limit.

Both plans have `deterministic = true`, the same seed and data. They train in lockstep in one process.

Equal bits: two plans promise equal bits if they compute every operation with the same kernels in the same slices,
whatever they offload or recompute. For such plans the losses are compared after every step, and all states (parameters,
momenta, statistics) after every hundredth step and the last.

If a kernel differs, bits may differ. Then both plans take a step from equal states, which must pass the rule of `mbc
check` (docs/equivalence.md, reference `perturbed`): the error of every gradient, statistic and loss of the plan within
the budget is at most twice the error that slightly changed weights cause in the step of the other plan, plus a floor. A
tensor that fails is computed again with other data, and fails finally after three draws. After each such step both
plans continue from equal states. `--every` selects the steps; for a narrow network all steps are checked.

Each network is a process of its own, and all share the GPU, because nothing is timed.

    python benchmarks/thousand_steps.py [--steps 1000] [--only NAME ...] [--device cuda|cpu] [--again]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cap import UNLIMITED_BYTES
from lockstep import Run
from modules import Job, example, open_module, random_inputs
from record import attempt, need_gpu, results, show, start

from mbc.errors import MbcError
from mbc.ops import KINDS
from mbc.plan.model import Copy, Plan
from mbc.plan.summary import summarise

BATCHES = 8  # mini-batches that steps go through in turn
RESNET = ("resnet", (("batch", "32"),))
NARROW = ("resnet", (("batch", "32"), ("width", "16"), ("size", "64")))
OFFLOAD_ONLY = frozenset({"recompute", "micro_batches"})
NOT_DIVIDED = frozenset({"micro_batches"})


@dataclass(frozen=True)
class Case:
    """A network, the techniques that its plan within a budget does without, and budgets to try.

    The budgets are shares of the arena of the plan without a limit. The first budget that has a plan is used; with
    `same_bits`, the first whose plan promises equal bits. If no plan promises equal bits, every step whose number is a
    multiple of `every` is checked by the rule.
    """

    network: tuple[str, tuple[tuple[str, str], ...]]
    precision: str
    without: frozenset[str]
    same_bits: bool
    every: int = 50
    shares: tuple[float, ...] = (0.6, 0.7, 0.85)

    def job(self, gpu: str, settings: tuple[tuple[str, str], ...]) -> Job:
        """Return the job of the case."""
        name, own = self.network
        text = (("train.precision", self.precision), ("train.deterministic", "true"))
        return replace(example(name, *own, *settings, *text), gpu=gpu)


CASES = {
    "resnet18 fp32 offload": Case(RESNET, "fp32", OFFLOAD_ONLY, True, shares=(0.7, 0.85, 0.92)),
    "resnet18 bf16 offload": Case(RESNET, "bf16", OFFLOAD_ONLY, True, shares=(0.7, 0.85, 0.92)),
    "resnet18 fp32 recompute": Case(RESNET, "fp32", NOT_DIVIDED, False),
    "resnet18 bf16 recompute": Case(RESNET, "bf16", NOT_DIVIDED, False),
    "narrow resnet18 fp32": Case(NARROW, "fp32", NOT_DIVIDED, False, every=1, shares=(0.7, 0.85)),
    "narrow resnet18 bf16": Case(NARROW, "bf16", NOT_DIVIDED, False, every=1, shares=(0.7, 0.85)),
}


@dataclass(frozen=True)
class Pair:
    """Two plans. `different`: operations whose kernels or slices differ; if there are none, equal bits are promised."""

    free: Plan
    capped: Plan
    different: tuple[str, ...]


def computed(plan: Plan) -> dict[str, set[tuple[Any, ...]]]:
    """Return how each operation of the step is computed: its kernels, and the rows of its slices.

    Updates work element by element, so their division does not matter.
    """
    updates = {o.name for o in plan.graph.train if KINDS[o.kind].updates}
    rows = {s.name: s.micro_batches for s in summarise(plan, plan.train)}
    result: dict[str, set[tuple[Any, ...]]] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Copy):
            continue
        work = launch.work
        for operation in launch.operations:
            slices = () if operation in updates else tuple(sorted(set(rows.get(operation, (plan.graph.batch,)))))
            result.setdefault(operation, set()).add((work.provider, work.name, work.settings, slices))
    return result


def pair_of(case: Case, job: Job) -> Pair:
    """Return the plan without a limit and the plan within a budget."""
    free = job.with_settings(("memory.device", f"{UNLIMITED_BYTES} B")).plan()
    p = free.predictions
    result: Pair | None = None
    for share in case.shares:
        budget = p.overhead_bytes + int(p.arena_bytes * share)
        within = job.with_options(without=case.without).with_settings(("memory.device", f"{budget} B"))
        try:
            capped = within.plan()
        except MbcError:
            continue
        ours, theirs = computed(capped), computed(free)
        different = tuple(name for name in theirs if ours.get(name) != theirs[name])
        result = result or Pair(free, capped, different)
        if not case.same_bits or not different:
            return Pair(free, capped, different)
    if result is None:
        raise RuntimeError(f"no plan fits {max(case.shares):.0%} of the arena of the plan without a limit")
    return result


def run_case(name: str, device: str, gpu: str, steps: int, settings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Plan, build and run one case in this process."""
    case = CASES[name]
    began = time.monotonic()
    job = case.job(gpu, settings)
    pair = pair_of(case, job)
    promised = not pair.different
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        places: list[Any] = [pair.free, pair.capped]
        if device == "cuda":
            places = [built(plan, Path(folder) / str(number)) for number, plan in enumerate(places)]
        # The third is the first with weights that are a little off.
        wanted = places if promised else [*places, places[0]]
        modules = [stack.enter_context(open_module(place, device)) for place in wanted]
        batches = list(data(pair.free, device))
        run = Run(modules, batches, job.lowered().optimizer.momentum, len(pair.different))
        result = run.same_bits(steps) if promised else run.within_rule(steps, case.every)
        skipped = [int(module.control["skipped"]) for module in modules[:2]]
    p = pair.capped.predictions
    once = launches(pair.free)
    return {
        "steps": steps,
        "promised": promised,
        "different": len(pair.different),
        "arena_mb": p.arena_bytes / 1e6,
        "arena_share": p.arena_bytes / pair.free.predictions.arena_bytes,
        "host_mb": p.host_bytes / 1e6,
        "offloads": sum(isinstance(launch.work, Copy) for launch in pair.capped.train.launches),
        "repeated": sum(times > once.get(name, 0) for name, times in launches(pair.capped).items()),
        **result,
        "skipped": skipped,
        "passed": result["passed"] and skipped == [0, 0],
        "seconds": time.monotonic() - began,
    }


def launches(plan: Plan) -> dict[str, int]:
    """Return how many times each operation is launched in a step."""
    return Counter(operation for launch in plan.train.launches for operation in launch.operations)


def built(plan: Plan, folder: Path) -> Path:
    """Build a package, and return its folder."""
    from mbc.codegen.build import write_package
    from mbc.codegen.toolchain import find_toolchain

    package = write_package((plan,), folder, find_toolchain(), overwrite=True)
    if package.library is None:
        raise RuntimeError("not built: " + ", ".join(m.name for m in package.missing))
    return folder


def data(plan: Plan, device: str) -> Iterator[tuple[Any, ...]]:
    """Yield mini-batches, for a GPU in its memory. A module must be open there."""
    for number in range(BATCHES):
        arrays = random_inputs(plan.graph, number)
        if device == "cuda":
            from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

            arrays = tuple(gpuarray.to_gpu(array) for array in arrays)
        yield arrays


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases whose name holds one of these")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpu", default="auto", help="what to plan for (default: the GPU of this machine)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="of networks")
    parser.add_argument("--workers", type=int, default=len(CASES), help="cases that run side by side")
    parser.add_argument("--again", action="store_true", help="not only what is missing")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        need_gpu("--device cpu interprets the plans")
    settings = tuple(tuple(pair.split("=", 1)) for pair in arguments.settings)
    held = results(
        "thousand_steps", arguments.again, current=True,
        device=arguments.device, steps=arguments.steps, settings=dict(settings),
    )  # fmt: skip
    wanted = [name for name in CASES if not arguments.only or any(word in name for word in arguments.only)]
    missing = [name for name in wanted if not held.done(name)]
    # New processes, not copies of this one: a CUDA context and threads of BLAS do not survive a fork.
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        how = (arguments.device, arguments.gpu, arguments.steps, settings)
        waiting = {pool.submit(run_case, name, *how): name for name in missing}
        for done in as_completed(waiting):
            held.put(attempt(done.result, waiting[done]))
    held.arrange(list(CASES))
    show(
        [held.rows[name] for name in wanted],
        ["name", "arena_share", "offloads", "repeated", "promised", "different", "losses_apart", "states_apart",
         "checked_steps", "drawn_again", "tensors_failed", "worst_over_limit", "seconds", "passed"],
    )  # fmt: skip


if __name__ == "__main__":
    start(main)

"""What `sanitizer.py` runs: the steps to look at, one package built, or one step of it taken without a CUDA graph.

python benchmarks/sanitized_step.py build NAME PRECISION FOLDER | run FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from modules import Job, build, example, open_module, random_inputs, small

from mbc.errors import MbcError
from mbc.plan.model import Copy, Kernel, Plan, Stream
from mbc.plan.techniques import techniques

BATCHES = (1, 2, 4, 8, 16, 32)  # to choose the smallest of
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6)  # of the arena of a plan without a limit


@dataclass(frozen=True)
class Case:
    """A network and what its plan does without. `shows`: what there must be in the plan; within a budget where there is
    none without."""

    network: str
    shows: Callable[[Plan], bool] = lambda plan: True
    without: frozenset[str] = frozenset()
    providers: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("memcheck", "initcheck")


def offloads(plan: Plan) -> bool:
    return any(isinstance(launch.work, Copy) for launch in plan.train.launches)


def recomputes_fused(plan: Plan) -> bool:
    """A value is recomputed in a launch of several operations."""
    launches = plan.train.launches
    found = techniques(plan, plan.train).recomputed
    return any(len(launches[number].operations) > 1 for one in found for number in one.launches)


def is_concurrent(plan: Plan) -> bool:
    return any(launch.stream is Stream.CONCURRENT for launch in plan.train.launches)


OWN = {"providers": ("mbc",), "tools": ("racecheck", "synccheck")}
CASES = {
    "digits": Case("digits"),
    "resnet18": Case("resnet"),
    "unet": Case("unet"),
    "mobilenet_v2": Case("mobilenet_v2"),
    "offload": Case("resnet", offloads, frozenset({"recompute", "micro_batches"})),
    "fused_recomputation": Case("resnet", recomputes_fused, frozenset({"offload", "micro_batches"})),
    "concurrent_stream": Case("resnet", is_concurrent),
    **{f"own_kernels_{name}": Case(name, **OWN) for name in ("digits", "resnet", "unet", "mobilenet_v2")},
}
PRECISIONS = ("fp32", "bf16")


def own_kernels(plan: Plan) -> set[str]:
    """Those of mbc: libraries choose theirs by shape, and are their makers' to check."""
    works = (launch.work for program in (plan.train, plan.infer) for launch in program.launches)
    return {work.name for work in works if isinstance(work, Kernel) and work.provider == "mbc"}


def job_of(case: Case, precision: str, gpu: str) -> Job:
    job = replace(example(case.network, ("train.precision", precision)), gpu=gpu)
    return job.with_options(without=case.without, providers=case.providers)


def chosen(case: Case, precision: str, gpu: str = "auto") -> Job:
    """The job with small images and the smallest batch whose plan has all kernels of mbc that the largest batch has,
    and shows what it is to show."""
    job = job_of(case, precision, gpu)
    wanted = own_kernels(small(job, BATCHES[-1]).plan())
    for batch in BATCHES:
        one = small(job, batch)
        plan = one.plan()
        if wanted <= own_kernels(plan) and case.shows(plan):
            return one
        if batch >= 4 and (within := budgeted(case, one, plan)) is not None:
            return within
    raise SystemExit(f"no batch up to {BATCHES[-1]} shows it")


def budgeted(case: Case, job: Job, free: Plan) -> Job | None:
    """Within a budget in which the plan shows what it is to show; None where there is none, or nothing to show."""
    if case.shows(free):
        return None
    for share in SHARES:
        budget_bytes = free.predictions.overhead_bytes + int(share * free.predictions.arena_bytes)
        within = job.with_settings(("memory.device", f"{budget_bytes} B"))
        try:
            if case.shows(within.plan()):
                return within
        except MbcError:
            break
    return None


def main() -> None:
    if sys.argv[1] == "build":
        _, _, name, precision, folder = sys.argv
        built = build(chosen(CASES[name], precision), Path(folder))
        if built.failed:
            raise SystemExit(built.failed)
        return
    module = open_module(Path(sys.argv[2]), "cuda", eager=True)
    graph = module.plan.graph
    inputs = random_inputs(graph)
    loss = float(module.step(*inputs, lr=1e-3))
    module.forward(*(inputs[graph.inputs.index(name)] for name in graph.infer_inputs))
    module.close()
    print(f"loss {loss}")


if __name__ == "__main__":
    main()

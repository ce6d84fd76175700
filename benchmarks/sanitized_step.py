"""The steps that `sanitizer.py` examines: it builds one package, or runs one step of it without a CUDA graph.

    python benchmarks/sanitized_step.py build NAME PRECISION FOLDER | run FOLDER

`peer` is the step of ResNet-18 by PyTorch: an error in it is one of cuDNN, or of the tool. `probe` and `warp_probe` are
kernels without a race (racecheck_probe.cu), which pass on shared memory by an mbarrier, like mbc's pipelines. In
`probe` every lane arrives at it, in `warp_probe` one lane for its warp.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from modules import Job, example, open_module, random_inputs, small

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.streams import Stream
from mbc.plan.model import Copy, Kernel, Plan
from mbc.plan.techniques import techniques
from mbc.runtime.initial_states import initial

BATCHES = (1, 2, 4, 8, 16, 32)  # to choose the smallest of
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6)  # of the arena of a plan without a limit
TOOL_BYTES = 8 << 30  # of the GPU's memory, which count as the step's
PROBE = Path(__file__).resolve().with_name("racecheck_probe.cu")


@dataclass(frozen=True)
class Case:
    """A network, and the techniques that its plan does without.

    `shows` is a property that the plan must have. If the plan without a budget lacks it, a plan within a budget is
    used. `pose` is the architecture as which the GPU poses, empty for its own.
    """

    network: str
    shows: Callable[[Plan], bool] = lambda plan: True
    without: frozenset[str] = frozenset()
    providers: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    tools: tuple[str, ...] = ("memcheck", "initcheck")
    pose: str = ""


def offloads(plan: Plan) -> bool:
    """Return whether the plan offloads values."""
    return any(isinstance(launch.work, Copy) for launch in plan.train.launches)


def recomputes_fused(plan: Plan) -> bool:
    """Return whether a launch of several operations recomputes a value."""
    launches = plan.train.launches
    result = techniques(plan, plan.train).recomputed
    return any(len(launches[number].operations) > 1 for one in result for number in one.launches)


def is_concurrent(plan: Plan) -> bool:
    """Return whether the plan has a concurrent stream."""
    return any(launch.stream is Stream.CONCURRENT for launch in plan.train.launches)


# Reads of unwritten bytes are searched here, too, although the tool misses some writes of cuDNN's kernels.
VOLUMES = (("patch", "(32, 32, 32)"), ("features", "(32, 64, 64)"))
OWN = {"providers": ("mbc",), "tools": ("racecheck", "synccheck", "initcheck")}
CASES = {
    "digits": Case("digits"),
    "resnet18": Case("resnet"),
    "unet": Case("unet"),
    "mobilenet_v2": Case("mobilenet_v2"),
    "offload": Case("resnet", offloads, frozenset({"recompute", "micro_batches"})),
    "fused_recomputation": Case("resnet", recomputes_fused, frozenset({"offload", "micro_batches"})),
    "concurrent_stream": Case("mobilenet_v2", is_concurrent),
    **{f"own_kernels_{name}": Case(name, **OWN) for name in ("digits", "resnet", "unet", "mobilenet_v2")},
    "own_kernels_volumes": Case("nnunet", settings=VOLUMES, **OWN),
    **{
        f"posed_{pose}": Case("resnet", providers=("mbc",), tools=("memcheck", "racecheck"), pose=pose)
        for pose in ("sm_75", "sm_80", "sm_86", "sm_89")
    },
    "peer": Case("resnet", tools=("initcheck",)),
    **dict.fromkeys(("probe", "warp_probe"), Case("digits", tools=("racecheck",))),
}
PROBES = {"probe": (), "warp_probe": ("warp",)}  # and their arguments
PRECISIONS = ("fp32", "bf16")


def own_kernels(plan: Plan) -> set[str]:
    """Return mbc's own kernels in the plan. Those of libraries depend on shapes, and their makers check them."""
    works = (launch.work for program in (plan.train, plan.infer) for launch in program.launches)
    return {work.name for work in works if isinstance(work, Kernel) and work.provider == "mbc"}


def job_of(case: Case, precision: str, gpu: str) -> Job:
    """Return the job of a case."""
    posed = f"{gpu}@{case.pose}" if case.pose else gpu
    job = replace(example(case.network, ("train.precision", precision), *case.settings), gpu=posed)
    return job.with_options(without=case.without, providers=case.providers)


def chosen(case: Case, precision: str, gpu: str = "auto") -> Job:
    """Return the job with small images and the smallest representative batch.

    Its plan has all of mbc's kernels that the plan of the largest batch has, and the property that the case must show.
    """
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
    """Return the job within a budget whose plan has the property of the case; None if no budget gives it."""
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


def build(name: str, precision: str, folder: Path) -> None:
    """Build the package of a case."""
    if name in PROBES:
        folder.mkdir()
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        subprocess.run([nvcc, "-arch=sm_90", "-o", str(folder / name), str(PROBE)], check=True)
    elif name == "peer":
        folder.mkdir()
        (folder / name).write_text(precision, encoding="ascii")
    else:
        plan = chosen(CASES[name], precision).plan()
        plan = replace(plan, budget_bytes=plan.budget_bytes + TOOL_BYTES)
        package = write_package((plan,), folder, find_toolchain())
        if package.library is None:
            raise SystemExit("no compiler: " + ", ".join(missing.name for missing in package.missing))


def peer_step(precision: str) -> float:
    """Compute PyTorch's loss of ResNet-18 with small images, forward and backward, in channels last."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch_twin import Mode, Twin

    job = small(job_of(CASES["peer"], precision, "auto"), BATCHES[-1])
    network = job.lowered().network
    autocast = torch.bfloat16 if precision == "bf16" else None
    states = {s.value: initial(s.value, network.values[s.value].type, s.initializer, 0) for s in network.states}
    twin = Twin(network, states, Mode("cuda", torch.float32, autocast, channels_last=True))
    loss, _ = twin.forward(twin.place(random_inputs(network)))
    loss.backward()
    return float(loss.detach())


def main() -> None:
    """Run the command line."""
    if sys.argv[1] == "build":
        build(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    folder = Path(sys.argv[2])
    for name, words in PROBES.items():
        if (folder / name).exists():
            subprocess.run([folder / name, *words], check=True)
            return
    if (folder / "peer").exists():
        print(f"loss {peer_step((folder / 'peer').read_text(encoding='ascii'))}")
        return
    module = open_module(folder, "cuda", eager=True)
    graph = module.plan.graph
    inputs = random_inputs(graph)
    loss = float(module.step(*inputs, lr=1e-3))
    module.forward(*(inputs[graph.inputs.index(name)] for name in graph.infer_inputs))
    module.close()
    print(f"loss {loss}")


if __name__ == "__main__":
    main()

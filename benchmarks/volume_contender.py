"""One row of `volume_step.py`, in a process of its own, which prints its figures as JSON in its last line.

PyTorch trains as nnU-Net does: fp16 by autocast with a gradient scaler, Dice and cross entropy with deep supervision,
gradients clipped to a norm, SGD with Nesterov momentum; only its targets of lower resolutions are computed before.
Forward pass and loss are compiled together. mbc compiles the example, and measures what its profile lacks, in another
process than the one that is timed. `taken_bytes` is the memory of the process on the GPU as nvidia-smi shows it, with
its CUDA context.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modules import Job, build_all, example, open_module, random_inputs, with_momentum

from mbc.bench.timing import time_steps
from mbc.ir.types import Precision
from mbc.options import Measure, Policy
from mbc.plan.summary import summarise
from mbc.runtime.usage import Usage, taken_since, usage_of
from mbc.units import parse_size

LEARNING_RATE, CLIP_NORM = 1e-2, 12.0
LOSS_SCALE = 2.0**16
BLOCKS, REHEARSED_BLOCKS = (7, 0.5), (2, 0.0)  # number of blocks of steps that are timed together, seconds of each


@dataclass(frozen=True)
class Request:
    """The work of one row.

    Attributes:
        contender: `eager first`, `compile last` and so on (PyTorch, with channels first or last), `mbc` or
            `workspace` and a precision, `gradients`.
        example: The network, by the name of its example.
        settings: Settings of the example, as NAME=VALUE.
        device: `cuda` or `cpu`.
        measure_for_s: Seconds for which mbc measures before a plan.
        memory: Memory of mbc's plan, or limit of each operation's workspace; empty: no limit.
        folder: A folder for the package.
        turn: Empty.
    """

    contender: str
    example: str
    settings: tuple[str, ...]
    device: str
    measure_for_s: float
    memory: str
    folder: str
    turn: str = ""

    def job(self, *more: str) -> Job:
        """Return the network with its settings and `more`."""
        precision = (f"train.precision={word}" for word in self.contender.split()[1:] if word in [*Precision])
        texts = (text.partition("=") for text in (*self.settings, *precision, *more))
        pairs, on_gpu = [(name, value) for name, _, value in texts], self.device == "cuda"
        job = replace(example(self.example, *pairs), gpu="auto" if on_gpu else "h200")
        measure = Measure.MISSING if on_gpu else Measure.NEVER
        return job.with_options(measure=measure, measure_for_s=self.measure_for_s)

    def compiled(self, job: Job) -> Any:
        """Return the folder of a package that another process builds, or, on a CPU, a plan."""
        if self.device == "cpu":
            return job.plan()
        (built,) = build_all([(job, Path(self.folder))], 1)
        if built.failed:
            raise SystemExit(built.failed)
        return built.folder


def usage(device: str) -> Usage:
    """Return the memory that is in use on the GPU; opens no context."""
    if device == "cpu":
        return Usage(None, None)
    import pycuda.driver as driver  # pyright: ignore[reportMissingImports]

    driver.init()
    return usage_of(driver.Device(0).pci_bus_id())


def timed(request: Request, step: Callable[[], object], wait: Callable[[], object], before: Usage) -> dict[str, Any]:
    """Return the time of a step, and the memory that the process took."""
    timing = time_steps(step, wait, *(BLOCKS if request.device == "cuda" else REHEARSED_BLOCKS))
    taken_bytes = taken_since(before, usage(request.device))
    return {"ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps, "taken_bytes": taken_bytes}


def run_torch(request: Request) -> dict[str, Any]:
    """Train by PyTorch, and return the figures."""
    before = usage(request.device)
    import torch  # pyright: ignore[reportMissingImports]
    from volume_networks import VolumeNetwork, supervised_loss

    on_gpu, (mode, layout) = request.device == "cuda", request.contender.split()
    torch.backends.cudnn.benchmark = True
    lowered = request.job().lowered()
    settings = {name: ast.literal_eval(value) for name, value in lowered.settings}
    memory_format = torch.channels_last_3d if layout == "last" else torch.contiguous_format
    model: Any = VolumeNetwork(settings).train()
    model = model.to(request.device, memory_format=memory_format)
    image, target = (torch.from_numpy(array).to(request.device) for array in random_inputs(lowered.network))
    image = image.contiguous(memory_format=memory_format)
    with torch.no_grad(), torch.autocast(request.device, torch.float16):
        sizes = [logits.shape[2:] for logits in model(image)]
    resized = (torch.nn.functional.interpolate(target[:, None].float(), size) for size in sizes)
    targets = [each[:, 0].long() for each in resized]
    rule = {"lr": LEARNING_RATE, "momentum": 0.99, "nesterov": True, "weight_decay": 3e-5, "fused": on_gpu}
    optimizer: Any = torch.optim.SGD(model.parameters(), **rule)
    scaler = torch.amp.GradScaler(request.device, LOSS_SCALE)

    def forward() -> Any:
        with torch.autocast(request.device, torch.float16):
            return supervised_loss(model(image), targets)

    loss_of = torch.compile(forward) if mode == "compile" else forward

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    losses = [float(step()) for _ in range(2)]
    if on_gpu:  # memory that only compilation and the choice of kernels needed does not count
        torch.cuda.empty_cache()
    result = timed(request, step, torch.cuda.synchronize if on_gpu else lambda: None, before)
    return {**result, "losses": losses, "reserved_bytes": torch.cuda.memory_reserved() if on_gpu else 0}


def run_mbc(request: Request) -> dict[str, Any]:
    """Train by mbc, and return the figures."""
    memory = [f"memory.device={request.memory}"] * bool(request.memory)
    where = request.compiled(request.job(*memory))
    before, last = usage(request.device), [0.0]
    with open_module(where, request.device) as module:
        arrays: list[Any] = list(random_inputs(module.plan.graph))
        if request.device == "cuda":
            from pycuda import gpuarray  # pyright: ignore[reportMissingImports]

            arrays = [gpuarray.to_gpu(array) for array in arrays]
        losses = [float(module.step(*arrays, lr=LEARNING_RATE)) for _ in range(2)]

        def step() -> None:
            last[0] = module.step(*arrays, lr=LEARNING_RATE)

        result = timed(request, step, lambda: float(last[0]), before)
        predicted = module.plan.predictions
        return {
            **result, **asdict(predicted), "losses": losses, "predicted_ms": predicted.train_us / 1e3,
            "bound_ms": module.plan.bounds.least_us / 1e3, "launches": len(module.plan.train.launches),
        }  # fmt: skip


def run_gradients(request: Request) -> dict[str, Any]:
    """Return the errors of one fp32 step's gradients against float64: mbc's, and PyTorch's own."""
    from gradients import compare

    job = with_momentum(request.job("train.precision=fp32", "train.clip_norm=none"))
    where, device = request.compiled(job), request.device
    (row,) = compare("network", job, "fp32", device, where, device, network_draws=1)
    figures = ("median", "torch_median", "worst", "torch_worst", "loss_error", "parameters")
    return {**{name: row[name] for name in figures}, "ratio": row["median"] / row["torch_median"]}


def run_workspace(request: Request) -> dict[str, Any]:
    """Return the time of each convolution within a limit of workspace, undivided and in micro-batches."""
    times: dict[str, dict[str, float]] = {}
    job = request.job().with_options(workspace_limit_bytes=parse_size(request.memory))
    for policy in (Policy.UNDIVIDED, Policy.ALL):
        plan = job.with_options(policy=policy).plan()
        times[policy] = {o.name: o.time_us / 1e3 for o in summarise(plan, plan.train) if "convolution" in o.kind}
    return {**{f"{label}_ms": sum(each.values()) for label, each in times.items()}, "convolutions_ms": times}


RUNS = {"mbc": run_mbc, "gradients": run_gradients, "workspace": run_workspace}

if __name__ == "__main__":
    asked = Request(**json.loads(sys.argv[1]))
    print(json.dumps(RUNS.get(asked.contender.split()[0], run_torch)(asked)))

"""One contender of `from_torch.py`, in a process of its own, which prints its figures as JSON in its last line.

All contenders train the same model from the same weights on the same images and labels, which are in the device's
memory. They train in bf16 with fp32 weights, by SGD with momentum. PyTorch computes channels last by autocast, compiles
forward pass and loss together, and uses the faster of its `fused` and `foreach` updates. The host's clock times blocks
of steps and waits only at the end of each block (`mbc.bench.timing`), because mbc runs on a stream of its own, which
PyTorch's events do not time.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from imported import built
from imported_gradients import drops
from own_process import POLL_S

import mbc
from mbc.bench.timing import time_steps

LOSSES, CLASSES = 5, 1000
SIZE = 224  # pixels of a side, unless asked otherwise
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4
MODES = {"eager": None, "compile": "default", "cuda_graph": "reduce-overhead"}
UPDATES_TIMED = 20


@dataclass(frozen=True)
class Request:
    """The work of one contender.

    Attributes:
        contender: `mbc` (`from_torch`), `module` (`mbc.module`), or a name of `MODES`.
        model: A network as `family/name`.
        batch: Rows of a mini-batch.
        size: Pixels of a side.
        device: `cuda` or `cpu`.
        blocks: Number of blocks of steps that are timed.
        block_s: Seconds of a block, which has at least one step.
        measure_for: Argument of `from_torch`.
        turn: A folder. The contender creates the file `<contender>.ready` there when it is ready to be timed, and waits
            for the file `<contender>.turn`. Empty: the contender does not wait.
    """

    contender: str
    model: str
    batch: int
    size: int
    device: str
    blocks: int
    block_s: float
    measure_for: str | None
    turn: str = ""


def model_and_inputs(request: Request) -> tuple[Any, Any, Any]:
    """Return the model, on the CPU and in training mode, and images and labels on the device."""
    torch.manual_seed(0)
    model = built(request.model).train()
    images = torch.randn(request.batch, 3, request.size, request.size)
    labels = torch.randint(0, CLASSES, (request.batch,))
    return model, images.to(request.device), labels.to(request.device)


def wait_for_turn(request: Request) -> None:
    """Wait until the other contenders leave the GPU to this one."""
    if request.turn:
        ready, turn = (Path(request.turn) / f"{request.contender}.{file}" for file in ("ready", "turn"))
        ready.touch()
        while not turn.exists():
            time.sleep(POLL_S)


def sgd(model: Any, **options: Any) -> Any:
    """Return the optimizer of every contender."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, **options)


def faster_update(model: Any, wait: Callable[[], object]) -> dict[str, bool]:
    """Return PyTorch's faster option, `fused` or `foreach`, for the update of the model, without changing the model."""
    seconds: dict[str, float] = {}
    for option in ("fused", "foreach"):
        optimizer = torch.optim.SGD(model.parameters(), 0.0, MOMENTUM, **{option: True})
        optimizer.step()
        wait()
        began = time.perf_counter()
        for _ in range(UPDATES_TIMED):
            optimizer.step()
        wait()
        seconds[option] = time.perf_counter() - began
    return {min(seconds, key=lambda option: seconds[option]): True}


def run_torch(request: Request) -> dict[str, Any]:
    """Train by PyTorch, and return the figures."""
    on_gpu, mode = request.device == "cuda", MODES[request.contender]
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, images, labels = model_and_inputs(request)
    began = time.perf_counter()
    model = model.to(request.device, memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)

    def forward(images: Any, labels: Any) -> Any:
        with torch.autocast(request.device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(images), labels)

    loss_of = forward if mode is None else torch.compile(forward, mode=mode)
    optimizer: Any = None

    def step() -> Any:
        nonlocal optimizer
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        loss = loss_of(images, labels)
        loss.backward()
        if optimizer is None:
            optimizer = sgd(model, **faster_update(model, wait))
        optimizer.step()
        return loss.detach()

    losses = [float(step())]
    wait()
    first_step_s = time.perf_counter() - began
    losses += [float(step()) for _ in range(LOSSES - 1)]
    wait()
    wait_for_turn(request)
    if on_gpu:  # memory that only compilation and the choice of kernels needed does not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timing = time_steps(step, wait, request.blocks, request.block_s)
    return {
        "losses": losses, "ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps,
        "first_step_s": first_step_s, "update": "fused" if optimizer.defaults["fused"] else "foreach",
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }  # fmt: skip


def run_mbc(request: Request) -> dict[str, Any]:
    """Train by `mbc.from_torch` as a user's loop does, and return the figures."""
    model, images, labels = model_and_inputs(request)
    loss, optimizer = torch.nn.CrossEntropyLoss(), sgd(model)
    began = time.perf_counter()
    trainer = mbc.from_torch(
        model, images, loss=loss, optimizer=optimizer, precision="bf16", device=request.device,
        measure_for=request.measure_for,
    )  # fmt: skip
    with trainer:
        losses = [float(trainer.step(images, labels))]
        first_step_s = time.perf_counter() - began
        losses += [float(trainer.step(images, labels)) for _ in range(LOSSES - 1)]
        last: list[Any] = [0.0]

        def step() -> None:
            last[0] = trainer.step(images, labels)

        timing = time_steps(step, lambda: float(last[0]), request.blocks, request.block_s)
        memory, predicted = trainer.module.memory, trainer.module.plan.predictions
        arena_bytes = memory.arena_taken + memory.prefetch_taken
        return {
            "losses": losses, "ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps,
            "first_step_s": first_step_s, **asdict(trainer.took), "drops": drops(model), "arena_bytes": arena_bytes,
            "taken_bytes": arena_bytes + (memory.overhead_taken or 0), "predicted_ms": predicted.train_us / 1e3,
            "measured_share": predicted.measured_share,
        }  # fmt: skip


def run_module(request: Request) -> dict[str, Any]:
    """Train by `mbc.module` in PyTorch's own loop, with its fused update, and return the figures.

    `call_us` is the host's time of a call of forward and backward pass, which the GPU does not wait for.
    """
    model, images, labels = model_and_inputs(request)
    on_gpu = request.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    model = model.to(request.device)
    began = time.perf_counter()
    mbc.module(
        model, images, precision="bf16", device=request.device, measure_for=request.measure_for, fallback="error"
    )
    optimizer, calls_s = sgd(model, fused=on_gpu), list[float]()

    def step() -> Any:
        optimizer.zero_grad()
        called = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        calls_s.append(time.perf_counter() - called)
        optimizer.step()
        return loss.detach()

    losses = [float(step())]
    first_step_s = time.perf_counter() - began
    losses += [float(step()) for _ in range(LOSSES - 1)]
    wait()
    calls_s.clear()
    for _ in range(LOSSES):  # so few that the GPU's queue is not full
        step()
    call_us = 1e6 * min(calls_s)
    timing = time_steps(step, wait, request.blocks, request.block_s)
    memory = model.forward.planned.halves.memory
    return {
        "losses": losses, "ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps,
        "first_step_s": first_step_s, "call_us": call_us, "arena_bytes": memory.arena_taken,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }  # fmt: skip


RUNS = {"mbc": run_mbc, "module": run_module}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    asked = Request(**json.loads(sys.argv[1]))
    print(json.dumps(RUNS.get(asked.contender, run_torch)(asked)))

"""One contender of `from_torch.py`, in a process of its own: its last line is what it found, as JSON.

All train the same model from the same weights, on the same images and labels, which lie on the device: bf16 with fp32
weights, SGD with momentum, whose update is PyTorch's faster one of `fused` and `foreach`. PyTorch computes channels
last, by autocast, and compiles forward pass and loss together. Steps are timed in blocks that are waited for at their
ends only (`mbc.bench.timing`), by the host's clock: mbc runs on a stream of its own, which no event of PyTorch's marks.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from imported import built
from imported_gradients import drops
from planner import processes

import mbc
from mbc.bench.timing import time_steps
from mbc.compiler import compile_plan
from mbc.errors import BudgetError
from mbc.options import Options
from mbc.source import Source

LOSSES, CLASSES = 5, 1000
SIZE = 224  # pixels of a side, where nothing else is asked for
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4
MODES = {"eager": None, "compile": "default", "cuda_graph": "reduce-overhead"}
# Shares of PyTorch's memory that plans at its speed are looked for at; and how much faster than PyTorch the predicted
# step has to be, since a plan that is as fast to the microsecond is slower in every other run.
SHARES = tuple(share / 100 for share in range(20, 105, 5))
MARGIN = 0.98
UPDATES_TIMED = 20
SEARCH_PROCESSES, SEARCH_S = 8, 90.0
POLL_S = 0.05


@dataclass(frozen=True)
class Asked:
    """`contender`: a name of `RUNS`. `model`: a network as `family/name`. Steps are timed in so many `blocks` of
    `block_s` seconds each, of one step at least. `measure_for`: passed on to `from_torch`. `turn`: a folder, in which a
    contender says by a file of its name that it is ready to be timed, and waits for its turn, another file; none where
    it is alone.

    What follows is for `mbc_at_speed` alone: what the fastest of PyTorch's had reserved (`memory_bytes`) and its step
    (`step_ms`); of mbc with the whole GPU the `source` that it trained, and what its step took (`took_ms`) and was
    predicted to take."""

    contender: str
    model: str
    batch: int
    size: int
    device: str
    blocks: int
    block_s: float
    measure_for: str | None
    turn: str = ""
    source: str = ""
    memory_bytes: int = 0
    step_ms: float = 0.0
    took_ms: float = 0.0
    predicted_ms: float = 0.0


def made(asked: Asked) -> tuple[Any, Any, Any]:
    """The model, on the CPU and in training mode, and images and labels on the device."""
    torch.manual_seed(0)
    model = built(asked.model).train()
    images = torch.randn(asked.batch, 3, asked.size, asked.size)
    labels = torch.randint(0, CLASSES, (asked.batch,))
    return model, images.to(asked.device), labels.to(asked.device)


def wait_for_turn(asked: Asked) -> None:
    """Returns when nothing else runs on the GPU."""
    if asked.turn:
        ready, turn = (Path(asked.turn) / f"{asked.contender}.{file}" for file in ("ready", "turn"))
        ready.touch()
        while not turn.exists():
            time.sleep(POLL_S)


def sgd(model: Any, **how: Any) -> Any:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, **how)


def faster_update(model: Any, wait: Callable[[], object]) -> dict[str, bool]:
    """Which of PyTorch's updates is the faster one for the gradients that are there; changes nothing."""
    took: dict[str, float] = {}
    for how in ("fused", "foreach"):
        optimizer = torch.optim.SGD(model.parameters(), 0.0, MOMENTUM, **{how: True})
        optimizer.step()
        wait()
        began = time.perf_counter()
        for _ in range(UPDATES_TIMED):
            optimizer.step()
        wait()
        took[how] = time.perf_counter() - began
    return {min(took, key=lambda how: took[how]): True}


def run_torch(asked: Asked) -> dict[str, Any]:
    on_gpu = asked.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, images, labels = made(asked)
    began = time.perf_counter()
    model = model.to(asked.device, memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)

    def forward(images: Any, labels: Any) -> Any:
        with torch.autocast(asked.device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(images), labels)

    mode = MODES[asked.contender]
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
    wait_for_turn(asked)
    if on_gpu:  # what choosing kernels and compiling took for a moment is no part of a step
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timing = time_steps(step, wait, asked.blocks, asked.block_s)
    return {
        "losses": losses, "ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps,
        "first_step_s": first_step_s, "update": "fused" if optimizer.defaults["fused"] else "foreach",
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }  # fmt: skip


def run_mbc(asked: Asked, memory: str = "auto") -> dict[str, Any]:
    """As a user's loop has it: from `from_torch` to the first loss, then its steps."""
    model, images, labels = made(asked)
    loss, optimizer = torch.nn.CrossEntropyLoss(), sgd(model)
    began = time.perf_counter()
    trainer = mbc.from_torch(
        model, images,
        loss=loss, optimizer=optimizer, memory=memory, precision="bf16", device=asked.device,
        measure_for=asked.measure_for,
    )  # fmt: skip
    with trainer:
        losses = [float(trainer.step(images, labels))]
        first_step_s = time.perf_counter() - began
        losses += [float(trainer.step(images, labels)) for _ in range(LOSSES - 1)]
        last: list[Any] = [0.0]

        def step() -> None:
            last[0] = trainer.step(images, labels)

        timing = time_steps(step, lambda: float(last[0]), asked.blocks, asked.block_s)
        taken, predicted = trainer.module.memory, trainer.module.plan.predictions
        arena_bytes = taken.arena_taken + taken.prefetch_taken
        return {
            "losses": losses, "ms": timing.step_ms, "spread_ms": timing.spread_ms, "steps": timing.steps,
            "first_step_s": first_step_s, **asdict(trainer.took), "drops": drops(model), "source": trainer.source,
            "arena_bytes": arena_bytes, "taken_bytes": arena_bytes + (taken.overhead_taken or 0),
            "predicted_ms": predicted.train_us / 1e3, "measured_share": predicted.measured_share,
        }  # fmt: skip


def run_mbc_at_speed(asked: Asked) -> dict[str, Any]:
    """mbc with the least of PyTorch's memory at which its step is no slower: looked for by predictions, which are
    made for `SEARCH_S`, then timed, with a step more of memory where it is slower after all."""
    began = time.perf_counter()
    with processes(SEARCH_PROCESSES) as pool:
        looked = [pool.submit(predicted_ms, asked, share) for share in SHARES]
        done, _ = wait(looked, SEARCH_S)
        predicted = [one.result() if one in done else float("inf") for one in looked]
    place = first_fast(asked, predicted)
    search_s = time.perf_counter() - began
    for share in SHARES[place:]:
        found = run_mbc(replace(asked, measure_for=None), f"{round(asked.memory_bytes * share)}B")
        if found["ms"] <= asked.step_ms:
            return {**found, "share": share, "search_s": search_s}
    raise RuntimeError("mbc is as fast as PyTorch in none of its shares of memory")


def first_fast(asked: Asked, predicted: Sequence[float]) -> int:
    """The index of the first plan that is as fast as PyTorch, their number where none is. `predicted`: their steps in
    ms, each of which is taken to be off by the factor by which that of the plan with the whole GPU was."""
    slower = asked.took_ms / asked.predicted_ms
    return next((i for i, ms in enumerate(predicted) if ms * slower <= asked.step_ms * MARGIN), len(predicted))


def predicted_ms(asked: Asked, share: float) -> float:
    """Of the plan within a share of PyTorch's memory; infinite where there is none."""
    memory = f"{round(asked.memory_bytes * share)}B"
    options = Options(settings=(("memory.device", memory), ("train.precision", "bf16")))
    try:
        return compile_plan(Source("from_torch.mbc", asked.source), options).predictions.train_us / 1e3
    except BudgetError:
        return float("inf")


RUNS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    **dict.fromkeys(MODES, run_torch),
    "mbc": run_mbc,
    "mbc_at_speed": run_mbc_at_speed,
}


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    asked = Asked(**json.loads(sys.stdin.read()))
    print(json.dumps(RUNS[asked.contender](asked)))


if __name__ == "__main__":
    main()

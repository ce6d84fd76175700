"""Loops of PyTorch with `mbc.module` on a GPU give PyTorch's numbers in float32."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mbc
from mbc.hardware.target import current_gpu
from mbc.measure.gpu import Gpu
from mbc.runtime.usage import own_bytes

torch: Any = pytest.importorskip("torch")
loops: Any = pytest.importorskip("tests.pytorch.test_planned_module")
changed: Any = pytest.importorskip("tests.pytorch.test_changed_module")
COVERED = ("plain", "mixed", "resumed", "differentiated", "hooked", "held", "moved", "evaluated", "last_batch")
OTHERS = ("larger", "siamese", "saliency", "attacked", "inner_hook")
CHANGED = ("swapped", "adapted", "observed")  # not `flattened`: the plan has parameters in channels_last


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Iterator[None]:
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    moved = {"X": loops.X.float().cuda(), "LABELS": loops.LABELS.cuda()}
    for name, tensor in moved.items():
        monkeypatch.setattr(loops, name, tensor)

    def batches(steps: int) -> Any:
        generator = torch.Generator("cuda").manual_seed(7)
        for _ in range(steps):
            yield (
                torch.randn(loops.X.shape, generator=generator, device="cuda"),
                torch.randint(5, (4,), generator=generator, device="cuda"),
            )

    monkeypatch.setattr(loops, "batches", batches)
    monkeypatch.setattr(loops.cross_entropy, "__defaults__", (moved["X"], moved["LABELS"]))
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed


def both(loop: Callable[[Any], Any], fallback: str, create: Callable[[], Any] = loops.normed, **other: Any) -> None:
    model, twin = create().cuda(), create().cuda()
    example = other.pop("example", loops.X)
    mbc.module(model, example, device="cuda", fallback=fallback, progress=False, measure_for="1s", **other)
    ours, theirs = loops.numbers(loop, model), loops.numbers(loop, twin)
    for one, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, wanted.to(one.dtype), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("loop", COVERED)
def test_a_loop_gives_torchs_numbers(loop: str):
    both(getattr(loops, loop), "error")


@pytest.mark.parametrize("loop", OTHERS)
def test_a_call_that_the_plan_does_not_cover_runs_in_torch(loop: str):
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        both(getattr(loops, loop), "torch")


@pytest.mark.parametrize("loop", CHANGED)
def test_a_changed_model_runs_in_torch(loop: str):
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        both(getattr(changed, loop), "torch", changed.Scaled)


def test_a_loop_on_a_stream_of_its_own():
    with torch.cuda.stream(torch.cuda.Stream()):
        both(loops.plain, "error")


def test_gradients_of_inputs():
    both(loops.with_input, "error", example=loops.X.clone().requires_grad_())


def test_pytorch_counts_the_arena_and_frees_it():
    before = torch.cuda.memory_allocated()
    model = loops.normed().cuda()
    mbc.module(model, loops.X, device="cuda", fallback="error", progress=False, measure_for="1s")
    arena_bytes = model.forward.planned.halves.memory.arena_taken
    assert torch.cuda.memory_allocated() - before >= arena_bytes > 0
    loops.cross_entropy(model).backward()
    kept = model.first.weight.grad
    model.forward.planned.close()
    del model
    assert torch.isfinite(kept).all()
    del kept
    assert torch.cuda.memory_allocated() - before < arena_bytes


def taken() -> int:
    """Return the memory that this process takes."""
    gpu = current_gpu()
    own = None if gpu is None else own_bytes(gpu.bus_id)
    if own is None:
        pytest.skip("needs a driver that reports the memory of this process")
    return own


@pytest.mark.parametrize("name", ["mixed", "gan", "segmentation", "siamese", "resumed"])
def test_the_process_of_an_example_stays_within_its_memory(name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "pytorch")
    limit = taken() + 2 * 10**9
    plan = partial(mbc.module, memory=limit, fallback="error", progress=False, measure_for="1s")
    for number, _ in enumerate(getattr(importlib.import_module("other_loops"), name)(plan)):
        assert number < 2 or taken() <= limit


@pytest.mark.parametrize("late_bytes", [0, 300 * 10**6])
def test_a_process_stays_within_memory_that_binds(late_bytes: int):
    torch.cuda.empty_cache()
    layers = [layer for _ in range(7) for layer in (torch.nn.LazyConv2d(32, 3, padding=1), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1)).cuda()
    x = torch.randn(64, 3, 128, 128, device="cuda")
    model(x[:1])
    limit = taken() + 1500 * 10**6  # keeping all activations takes 1.9 GB
    mbc.module(model, x, memory=limit, fallback="error", progress=False, measure_for="1s", check=False)
    optimizer, late, arenas = torch.optim.AdamW(model.parameters()), None, list[int]()
    for number in range(6):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        arenas.append(model.forward.planned.halves.memory.arena_taken)
        if number == 0 and late_bytes:
            late = torch.empty(limit - taken() + late_bytes, dtype=torch.uint8, device="cuda")
        assert number < 2 or taken() <= limit
    assert not late_bytes or (late is not None and arenas[-1] < arenas[0])


def test_a_planned_model_in_half_precision_trains():
    model = loops.normed().cuda()
    mbc.module(model, loops.X, device="cuda", precision="bf16", fallback="error", progress=False, measure_for="1s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [float(loss) for loss in loops.plain(model)]
    assert all(0 < loss < 4 for loss in losses)

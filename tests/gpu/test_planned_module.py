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
pending: Any = pytest.importorskip("tests.pytorch.test_pending_passes")
COVERED = ("plain", "resumed", "differentiated", "hooked", "held", "moved", "evaluated", "last_batch")
OTHERS = ("larger", "saliency", "attacked", "inner_hook")
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


def planned(model: Any, **other: Any) -> Any:
    given = {"device": "cuda", "fallback": "error", "progress": False, "measure_for": "1s"} | other
    return mbc.module(model.cuda(), given.pop("example", loops.X), **given)


def both(loop: Callable[[Any], Any], fallback: str, create: Callable[[], Any] = loops.normed, **other: Any) -> None:
    model, twin = create().cuda(), create().cuda()
    planned(model, fallback=fallback, **other)
    ours, theirs = loops.numbers(loop, model), loops.numbers(loop, twin)
    for one, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, wanted.to(one.dtype), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("loop", [*(getattr(loops, name) for name in COVERED), *pending.LOOPS])
def test_a_loop_gives_torchs_numbers(loop: Callable[[Any], Any]):
    both(loop, "error")


def test_a_loop_with_adam_gives_torchs_numbers():
    # Adam would make a step of full length from the rounding errors that are the gradient of a bias before a norm.
    both(loops.mixed, "error", loops.Net)


@pytest.mark.parametrize("loop", ["unread", "again"])
def test_several_outputs_give_torchs_numbers(loop: str):
    both(getattr(loops, loop), "error", loops.Two)


def test_passes_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mbc.pytorch.pending_passes._copied", pending.full)
    with pytest.warns(RuntimeWarning, match="wait in host memory"):
        both(pending.drawn, "error")


def test_a_gan_of_two_planned_models_gives_torchs_numbers():
    critic = planned(loops.normed(), example=loops.X.clone().requires_grad_())
    ours = [*pending.gan(planned(pending.generator()), critic)]
    theirs = [*pending.gan(pending.generator().cuda(), loops.normed().cuda())]
    for one, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), wanted.detach().to(one.dtype), rtol=2e-3, atol=2e-4)


def test_each_pass_keeps_its_mask_of_dropout():
    pending.assert_masks_are_kept(planned(pending.dropping()), planned(pending.dropping()))


def test_pytorch_counts_what_waits_and_frees_it():
    model = planned(loops.normed())
    first = loops.cross_entropy(model)
    before = torch.cuda.memory_allocated()
    second = loops.cross_entropy(model)
    kept_bytes = sum(place.size_bytes for place in model.forward.planned.halves.kept)
    assert torch.cuda.memory_allocated() - before >= kept_bytes > 0
    del first
    assert torch.cuda.memory_allocated() - before < kept_bytes
    second.backward()


@pytest.mark.parametrize("loop", OTHERS)
def test_a_call_that_the_plan_does_not_cover_runs_in_torch(loop: str):
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        both(getattr(loops, loop), "torch")


@pytest.mark.parametrize("loop", CHANGED)
def test_a_changed_model_runs_in_torch(loop: str):
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        both(getattr(changed, loop), "torch", changed.Scaled)


@pytest.mark.parametrize("loop", [loops.plain, pending.drawn])
def test_a_loop_on_a_stream_of_its_own(loop: Callable[[Any], Any]):
    with torch.cuda.stream(torch.cuda.Stream()):
        both(loop, "error")


def test_gradients_of_inputs():
    both(loops.with_input, "error", example=loops.X.clone().requires_grad_())


def test_pytorch_counts_the_arena_and_frees_it():
    before = torch.cuda.memory_allocated()
    model = planned(loops.normed())
    arena_bytes = model.forward.planned.halves.memory.arena_taken
    assert torch.cuda.memory_allocated() - before >= arena_bytes > 0
    loops.cross_entropy(model).backward()
    kept = model.first.weight.grad
    held = torch.cuda.memory_allocated()
    model.forward.planned.close()
    del model
    assert torch.isfinite(kept).all()  # this gradient is in the memory of the plan
    del kept
    assert held - torch.cuda.memory_allocated() >= arena_bytes


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
    planned(model, precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [float(loss) for loss in loops.plain(model)]
    assert all(0 < loss < 4 for loss in losses)

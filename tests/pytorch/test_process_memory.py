"""`memory=` of `mbc.module` limits the process: what is in use already, what is reserved, and a second plan."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest

from mbc.errors import BudgetError, MbcError
from mbc.pytorch.calling_thread import CallingThread
from mbc.pytorch.process_memory import Limit, Taken, limit_of
from mbc.pytorch.shared_states import SharedStates
from mbc.runtime import usage
from mbc.runtime.bindings import Place
from mbc.runtime.module import Module
from mbc.units import show_enough
from tests.pytorch.nets import nn, torch
from tests.pytorch.test_planned_module import F, X, agree, batches, cross_entropy, normed, numbers, planned, sgd

MB = 10**6


class Gpu:
    """Memory as a GPU's driver would report it; `beside_bytes` are those that the process takes beside the arena."""

    beside_bytes, model = 0, None

    def measure(self) -> Taken:
        has_plan = self.model is not None and "forward" in vars(self.model)
        return Taken((arena_of(self.model) if has_plan else 0) + self.beside_bytes, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr("mbc.pytorch.process_memory.meter_of", lambda _: fake.measure)
    monkeypatch.setattr("mbc.pytorch.planned_module.SEGMENT_BYTES", 0)
    return fake


def arena_of(model: Any) -> int:
    return model.forward.planned.halves.memory.arena_taken


def accumulated(model: Any, between: Callable[[], object] = int) -> Any:
    """Accumulate four gradients before each update; `between` runs after the second, then an evaluation."""
    optimizer = sgd(model)
    for number, (x, labels) in enumerate(batches(8)):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        if number == 1:
            between()
            with torch.inference_mode():
                model(x)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield loss


def test_a_process_that_takes_too_much_is_planned_again_without_loss(gpu: Gpu):
    model, twin, third = (normed().double() for _ in range(3))
    largest = arena_of(planned(third, memory="1GB"))
    gpu.model = planned(model, memory=f"{10 * largest}B", reserve=0)
    parameters = list(model.parameters())
    assert arena_of(model) == largest
    grow = partial(setattr, gpu, "beside_bytes", 9 * largest + largest // 8)
    agree(numbers(partial(accumulated, between=grow), model), numbers(accumulated, twin))
    plan = model.forward.planned
    assert arena_of(model) <= largest - largest // 8
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.first.weight.grad.data_ptr() == plan._states.trained[0].gradient.data_ptr()
    assert plan.halves._steps == 9  # random layers go on where they were


def test_nothing_holds_the_memory_of_a_closed_plan(monkeypatch: pytest.MonkeyPatch):
    lent: list[weakref.ref[Any]] = []
    share, settle = Module.shared, SharedStates.settle

    def shared(module: Module, place: Place) -> Any:
        lent.append(weakref.ref(owner := share(module, place)))
        return owner

    def settled(states: SharedStates) -> None:
        assert lent and all(owner() is None for owner in lent)
        settle(states)

    monkeypatch.setattr(Module, "shared", shared)
    monkeypatch.setattr(SharedStates, "settle", settled)
    model = planned(normed().double())
    first, second = model(X).sum(), model(-X).sum()
    second.backward()
    first.backward()
    with torch.autograd.set_multithreading_enabled(False):
        model.forward.planned.close()
        assert not torch._C._is_multithreading_enabled()  # the plan did not set it


@pytest.mark.parametrize("close", [lambda model: model.forward.planned.close(), lambda _: None])
def test_autograd_gets_its_threads_back_when_a_plan_ends(monkeypatch: pytest.MonkeyPatch, close: Callable[..., None]):
    keep = CallingThread.keep
    monkeypatch.setattr(CallingThread, "keep", lambda thread, _: keep(thread, "cuda"))
    models = [planned(normed().double())]
    cross_entropy(models[0]).backward()
    assert not torch._C._is_multithreading_enabled()
    close(models[0])
    models.clear()
    gc.collect()
    assert torch._C._is_multithreading_enabled()


def test_a_plan_that_ends_in_another_thread_leaves_the_settings_of_that_thread():
    def release() -> bool:
        with torch.autograd.set_multithreading_enabled(False):
            thread.release()
            return torch._C._is_multithreading_enabled()

    thread = CallingThread()
    with torch.autograd.set_multithreading_enabled(True), ThreadPoolExecutor() as other:
        thread.keep("cuda")
        assert not other.submit(release).result() and not torch._C._is_multithreading_enabled()
        thread.release()
        assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("moves", [0, 1, 4, 11])
@pytest.mark.parametrize("method", ["part", "settle"])
def test_a_plan_closes_wholly_or_not_at_all(method: str, moves: int, monkeypatch: pytest.MonkeyPatch):
    model, original, to = planned(normed().double()), getattr(SharedStates, method), torch.Tensor.to

    def full(tensor: Any, device: Any, **_: Any) -> Any:
        if next(calls) == moves:
            raise torch.OutOfMemoryError("out of memory")
        return to(tensor, device, copy=True)

    def limited(states: SharedStates) -> Any:
        places[:] = [tensor.data_ptr() for tensor in model.state_dict().values()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "to", full)
            return original(states)

    def close() -> None:
        model.first.weight.grad = model.first.weight.grad.clone()  # a gradient outside of the plan's memory
        monkeypatch.setattr(SharedStates, method, limited)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model.forward.planned.close()
        monkeypatch.undo()
        assert ("model.to(device)" in str(getattr(raised.value, "__notes__", ()))) == (method == "settle")
        assert places == [tensor.data_ptr() for tensor in model.state_dict().values()]
        assert ("forward" in vars(model)) == (method == "part")

    calls, places = count(), list[int]()
    agree(numbers(partial(accumulated, between=close), model), numbers(accumulated, normed().double()))


def test_a_model_is_not_planned_again_while_a_pass_waits(gpu: Gpu):
    gpu.model = model = planned(normed().double(), memory=MB, reserve=0)
    first, second = model(X), model(-X)
    model.forward.planned._memory_checks.passes, gpu.beside_bytes = 2, MB
    second.sum().backward()
    model(X)
    first.sum().backward()
    with pytest.raises(MbcError, match="no smaller plan fits"):
        model(X)


@pytest.mark.parametrize("fallback", ["torch", "error"])
def test_without_a_smaller_plan_pytorch_goes_on(gpu: Gpu, fallback: str):
    model, twin = normed().double(), normed().double()
    gpu.model = planned(model, memory=MB, reserve=0, fallback=fallback)
    grow = partial(setattr, gpu, "beside_bytes", MB)
    if fallback == "error":
        with pytest.raises(MbcError, match="more than memory=, and no smaller plan fits") as raised:
            numbers(partial(accumulated, between=grow), model)
        assert raised.value.code == "MBC341"
    else:
        with pytest.warns(RuntimeWarning, match="runs in PyTorch from now on") as warned:
            ours = numbers(partial(accumulated, between=grow), model)
        agree(ours, numbers(accumulated, twin))
        assert len(warned) == 1
    assert "forward" not in vars(model)


def test_a_plan_gets_what_is_neither_in_use_nor_reserved(gpu: Gpu):
    gpu.beside_bytes = 300_000
    assert planned(normed().double(), memory=MB, reserve="200kB").forward.planned.halves.plan.budget_bytes == 500_000
    gpu.beside_bytes = MB
    with pytest.raises(BudgetError, match="in use or reserved for optimizer and loss") as raised:
        planned(normed().double(), memory=2 * MB, reserve=MB)
    assert f"pass more than memory='{show_enough(2 * MB + raised.value.needed_bytes)}'" in raised.value.remedy
    with pytest.raises(MbcError, match="reserve is not a size"):
        planned(normed().double(), reserve="much")
    model = planned(normed().double(), memory="1GB")
    reserved = 8 * sum(p.numel() for p in model.parameters()) + 6 * (4 * (X.numel() + 4 * 5) + (20 << 20))
    assert model.forward.planned.halves.plan.budget_bytes == 999 * MB - reserved


def test_context_and_libraries_count_once():
    network: Any = None
    limit = Limit(10**10, 0, 600 * MB, lambda: Taken(70 * MB, 500 * MB))
    assert limit.beside_bytes(nn.Linear(2, 2), network) == 70 * MB
    assert Limit(10**10, 0, 400 * MB, limit.measure).beside_bytes(nn.Linear(2, 2), network) == 170 * MB
    assert Limit(500 * MB, 0, 0, limit.measure).excess_bytes(0) == 70 * MB
    assert Limit(500 * MB, 0, 0, lambda: Taken(70 * MB, None)).excess_bytes(450 * MB) == 20 * MB
    assert limit_of("1GB", None, "cpu", "fp32") is None


@pytest.mark.parametrize(
    ("shown", "own"),
    [
        (None, None),
        ({}, 0),
        ({os.getpid(): 5, 1: 7}, 5),
        ({1: 7}, 0),
        ({10**8: 3, 1: 7}, 3),
        ({10**8: 3, 10**9: 4}, None),
    ],
)
def test_this_process_is_recognised(monkeypatch: pytest.MonkeyPatch, shown: Any, own: int | None):
    monkeypatch.setattr(usage, "processes", lambda _: shown)
    assert usage.own_bytes("0") == own

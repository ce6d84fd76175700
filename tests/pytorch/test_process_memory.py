"""`memory=` of `mbc.module` limits the process: what is in use already, what is reserved, and a second plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from mbc.errors import BudgetError, MbcError
from mbc.pytorch.process_memory import Limit, Taken, limit_of
from mbc.runtime import usage
from mbc.units import show_enough
from tests.pytorch.nets import nn
from tests.pytorch.test_planned_module import F, X, agree, batches, normed, numbers, planned, sgd

MB = 10**6


class Gpu:
    """Memory as a GPU's driver would report it; `beside_bytes` are those that PyTorch takes beside the arena."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.beside_bytes, self.arena = 0, lambda: 0
        patch.setattr("mbc.pytorch.process_memory.meter_of", lambda _: self.measure)
        patch.setattr("mbc.pytorch.planned_module.SEGMENT_BYTES", 0)

    def measure(self) -> Taken:
        return Taken(self.arena() + self.beside_bytes, 0)

    def watch(self, model: Any) -> Any:
        self.arena = lambda: arena_of(model) if "forward" in vars(model) else 0
        return model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def arena_of(model: Any) -> int:
    return model.forward.planned.halves.memory.arena_taken


def accumulated(model: Any, between: Callable[[], object]) -> Any:
    """Accumulate four gradients before each update; `between` runs after the second."""
    optimizer = sgd(model)
    for number, (x, labels) in enumerate(batches(8)):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        if number == 1:
            between()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield loss


def test_a_process_that_takes_too_much_is_planned_again_without_loss(gpu: Gpu):
    model, twin = normed().double(), normed().double()
    largest = arena_of(planned(copy_of(model), memory="1GB"))
    gpu.watch(planned(model, memory=10 * largest, reserve=0))
    first, parameters = model.forward.planned.programs[0], list(model.parameters())
    assert arena_of(model) == largest

    def grow() -> None:
        gpu.beside_bytes = 9 * largest + largest // 8

    agree(numbers(lambda m: accumulated(m, grow), model), numbers(lambda m: accumulated(m, int), twin))
    assert arena_of(model) <= largest - largest // 8 and model.forward.planned.programs[0] is not first
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.first.weight.grad.data_ptr() == model.forward.planned._states.trained[0].gradient.data_ptr()
    assert model.forward.planned.halves._steps == 8  # random layers go on where they were


def copy_of(model: Any) -> Any:
    twin = normed().double()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("fallback", ["torch", "error"])
def test_without_a_smaller_plan_pytorch_goes_on(gpu: Gpu, fallback: str):
    model, twin = normed().double(), normed().double()
    gpu.watch(planned(model, memory=MB, reserve=0, fallback=fallback))

    def grow() -> None:
        gpu.beside_bytes = MB

    if fallback == "error":
        with pytest.raises(MbcError, match="more than memory=, and no smaller plan fits") as raised:
            numbers(lambda m: accumulated(m, grow), model)
        assert raised.value.code == "MBC341"
    else:
        with pytest.warns(RuntimeWarning, match="runs in PyTorch from now on") as warned:
            ours = numbers(lambda m: accumulated(m, grow), model)
        agree(ours, numbers(lambda m: accumulated(m, int), twin))
        assert len(warned) == 1
    assert "forward" not in vars(model)


def test_a_plan_gets_what_is_neither_in_use_nor_reserved(gpu: Gpu):
    gpu.beside_bytes = 300_000
    model = planned(normed().double(), memory=MB, reserve="200kB")
    assert model.forward.planned.halves.plan.budget_bytes == 500_000
    gpu.beside_bytes = MB
    with pytest.raises(BudgetError, match="in use or reserved for optimizer and loss") as raised:
        planned(normed().double(), memory=2 * MB, reserve=MB)
    assert f"pass at least memory='{show_enough(2 * MB + raised.value.needed_bytes)}'" in raised.value.remedy
    with pytest.raises(MbcError, match="reserve is not a size"):
        planned(normed().double(), reserve="much")


def test_optimizer_and_loss_are_reserved(gpu: Gpu):
    model = planned(normed().double(), memory="1GB")
    trained = sum(p.numel() for p in model.parameters())
    given, output = X.numel(), len(X) * 5
    budget = model.forward.planned.halves.plan.budget_bytes
    assert 10**9 - budget == 8 * trained + 6 * (4 * (given + output) + (20 << 20))


def test_context_and_libraries_count_once():
    limit = Limit(10**10, 0, 600 * MB, lambda: Taken(70 * MB, 500 * MB))
    network: Any = None
    assert limit.beside_bytes(nn.Linear(2, 2), network) == 70 * MB
    assert Limit(10**10, 0, 400 * MB, limit.measure).beside_bytes(nn.Linear(2, 2), network) == 170 * MB
    assert Limit(500 * MB, 0, 0, limit.measure).excess_bytes(0) == 70 * MB
    assert Limit(500 * MB, 0, 0, lambda: Taken(70 * MB, None)).excess_bytes(450 * MB) == 20 * MB


def test_a_plan_for_the_cpu_has_no_limit_of_the_process():
    assert limit_of("1GB", None, "cpu", "fp32") is None
    model = planned(normed().double(), memory=MB)
    assert model.forward.planned.halves.plan.budget_bytes == MB


@pytest.mark.parametrize(
    ("shown", "own"),
    [
        (None, None),
        ({}, 0),
        ({os.getpid(): 5, 1: 7}, 5),
        ({1: 7}, 0),
        ({10**8: 3, 1: 7}, 3),
        ({10**8: 3, 10**8 + 1: 4}, None),
    ],
)
def test_this_process_is_recognised(monkeypatch: pytest.MonkeyPatch, shown: Any, own: int | None):
    monkeypatch.setattr(usage, "processes", lambda _: shown)
    assert usage.own_bytes("0") == own

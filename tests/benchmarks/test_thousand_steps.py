"""Steps within a budget compared with steps without a limit, on the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import lockstep
import thousand_steps
from lockstep import Run
from thousand_steps import NOT_DIVIDED, OFFLOAD_ONLY, Case, computed, pair_of, run_case

from mbc.optimize import effort
from mbc.plan.model import Copy, Kernel, Plan
from mbc.runtime.module import Module

SMALL = (("batch", "8"), ("width", "4"))
DIGITS = ("digits", ())


def test_the_same_kernels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        thousand_steps.CASES, "offload", Case(DIGITS, "bf16", OFFLOAD_ONLY, same_bits=True, shares=(0.6, 0.7))
    )
    monkeypatch.setattr(lockstep, "STATES_EVERY", 2)
    monkeypatch.setattr(effort, "SLOW_STEP_WORK", 0)  # otherwise a step without fusion groups is faster
    row = run_case("offload", "cpu", "h100", 5, (("batch", "8"), ("width", "8")))
    assert row["promised"] and row["passed"] and row["offloads"] > 0 and row["arena_share"] < 0.85
    assert (row["losses_compared"], row["losses_apart"], row["states_apart"]) == (5, 0, 0)
    assert row["states_compared"] % 3 == 0 and row["states_compared"] > 0  # after steps 2, 4 and 5


def test_other_kernels_are_held_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        thousand_steps.CASES, "recompute", Case(DIGITS, "fp32", NOT_DIVIDED, same_bits=False, every=2, shares=(0.65,))
    )
    row = run_case("recompute", "cpu", "h100", 5, SMALL)
    assert not row["promised"] and row["different"] > 0 and row["passed"] and row["repeated"] > 0
    assert (row["checked_steps"], row["tensors_failed"]) == (4, 0)  # 1, 2, 4 and 5


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Case(DIGITS, "fp32", frozenset(), same_bits=False).job("h100", SMALL).plan()


class Wrong:
    """A module whose steps deviate from its plan."""

    def __init__(self, module: Module, step: Callable[..., Any]) -> None:
        self._module, self._step = module, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def step(self, *inputs: np.ndarray, lr: float) -> Any:
        return self._step(self._module, *inputs, lr=lr)


def one_row_lost(module: Module, images: np.ndarray, labels: np.ndarray, lr: float) -> Any:
    return module.step(np.concatenate((images[:-1], images[:1])), labels, lr=lr)


def another_rate(module: Module, images: np.ndarray, labels: np.ndarray, lr: float) -> Any:
    return module.step(images, labels, lr=lr * 1.0001)


def run_of(plan: Plan, wrong: Callable[..., Any], count: int) -> Run:
    modules: list[Any] = [Module(plan, device="cpu") for _ in range(count)]
    modules[1] = Wrong(modules[1], wrong)
    return Run(modules, list(thousand_steps.data(plan, "cpu")), 0.9, 1)


def test_bits_that_differ_are_seen(plan: Plan) -> None:
    result = run_of(plan, another_rate, 2).same_bits(3)
    # The first loss is of the same weights.
    assert (
        not result["passed"] and result["losses_apart"] == 2 and result["apart_at"] == 2 and result["states_apart"] > 0
    )


def test_a_lost_row_breaks_the_rule(plan: Plan) -> None:
    result = run_of(plan, one_row_lost, 3).within_rule(2, every=1)
    assert not result["passed"] and result["tensors_failed"] > 0 and result["worst_over_limit"] > 1
    # Each of the two steps was drawn three times before it failed.
    assert result["drawn_again"] == 4


def test_equal_bits_that_a_plan_promises(plan: Plan) -> None:
    """A different kernel or setting of one launch is found; different times and copies do not matter."""
    number, launch = next((i, la) for i, la in enumerate(plan.train.launches) if isinstance(la.work, Kernel))
    work = launch.work
    assert isinstance(work, Kernel)

    def with_work(changed: Kernel) -> Plan:
        launches = list(plan.train.launches)
        launches[number] = replace(launch, work=changed)
        return replace(plan, train=replace(plan.train, launches=tuple(launches)))

    assert computed(with_work(replace(work, time_us=work.time_us + 1))) == computed(plan)
    assert computed(with_work(replace(work, name="another"))) != computed(plan)
    assert computed(with_work(replace(work, settings=(*work.settings, ("more", 1))))) != computed(plan)
    assert not any(isinstance(la.work, Copy) for la in plan.train.launches)


def test_a_budget_that_nothing_fits() -> None:
    case = Case(DIGITS, "fp32", OFFLOAD_ONLY, same_bits=False, shares=(0.001,))
    with pytest.raises(RuntimeError, match=r"no plan fits 0% of the arena"):
        pair_of(case, case.job("h100", SMALL))

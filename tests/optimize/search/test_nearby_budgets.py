"""Slightly smaller budgets are also tried if a step is slow, because then small changes matter to the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mbc.optimize import effort
from mbc.optimize.search import search as search_module
from mbc.optimize.search.fit_budget import fit
from mbc.optimize.search.search import Limits, search
from mbc.optimize.search.solution import Problem
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from tests.optimize.planned import kept_plan, table

SHARE, UNLUCKY_SHARE = 0.84, 0.95  # of the arena without a limit, and of that share


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of tried budgets. In the first budget the search finds only the step of a smaller one."""
    kept_plan("residual")  # cached: its search is not watched
    budgets: list[int] = []

    def unlucky(problem: Problem, *others: Any) -> Any:
        budgets.append(problem.available_bytes)
        if problem.available_bytes == budgets[0]:
            problem = replace(problem, available_bytes=int(UNLUCKY_SHARE * budgets[0]))
        return fit(problem, *others)

    monkeypatch.setattr(search_module, "fit", unlucky)
    monkeypatch.setattr(effort, "NEARBY_BUDGETS_SLOWDOWN", 1.0)
    return budgets


def planned() -> Plan:
    kept = kept_plan("residual").predictions
    budget_bytes = int(SHARE * kept.arena_bytes) + kept.overhead_bytes
    plan = search(table("residual"), Limits(budget_bytes, without=frozenset({"concurrent_stream", "offload"})))
    verify_plan(plan)
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= budget_bytes
    return plan


def test_the_fastest_of_them_is_taken(tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    first_bytes = tried[0]
    assert list(dict.fromkeys(tried)) == [first_bytes, *(int(part * first_bytes) for part in effort.NEARBY_BUDGETS)]
    monkeypatch.setattr(effort, "NEARBY_BUDGETS", ())
    assert plan.predictions.train_us < planned().predictions.train_us


def test_the_first_that_is_fast_is_taken(tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    slowdown = planned().predictions.train_us / kept_plan("residual").bounds.fastest_us
    tried.clear()
    monkeypatch.setattr(effort, "NEARBY_BUDGETS_SLOWDOWN", 1.001 * slowdown)
    planned()
    assert len(set(tried)) == 2


@pytest.mark.parametrize(("constant", "value"), [("NEARBY_BUDGETS_SLOWDOWN", 2.0), ("NEARBY_BUDGETS_MAX_LAUNCHES", 0)])
def test_a_step_that_is_fast_or_long_is_taken_at_once(
    constant: str, value: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, constant, value)
    planned()
    assert len(set(tried)) == 1

"""Techniques left out one after another; arithmetic replaces planning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.ablation import ablation
from mbc.errors import BudgetError, MbcError
from mbc.report.ablation import ablation_document, ablation_text
from tests.plan.chains import random_plan

PLAN = random_plan(3)
BUDGET_BYTES = 10_000_000_000


def planner(asked, least=lambda without: 1_000_000_000 * (1 + 6 * len(without))):
    """Return a planner whose plans take more memory for every technique that they do without."""

    def plan_with(without, budget_bytes):
        asked.append((without, budget_bytes))
        room, needed = budget_bytes or BUDGET_BYTES, least(without)
        if needed > room:
            raise BudgetError("MBC204", "too much", "", needed_bytes=needed, floor_bytes=1)
        arena = needed - PLAN.predictions.overhead_bytes
        return replace(PLAN, budget_bytes=room, predictions=replace(PLAN.predictions, arena_bytes=arena))

    return plan_with


def test_one_fewer_each_time():
    asked = []
    ablations = ablation(planner(asked))
    orders = [set(), {"offload"}, {"offload", "recompute"}, {"offload", "recompute", "micro_batches"}]
    orders.append({*orders[-1], "workspace"})
    assert [set(s.without) for s in ablations] == orders
    assert [s.fits for s in ablations] == [True, True, False, False, False]
    assert [s.figures.needed_bytes for s in ablations if s.figures is not None] == [
        10**9 * (1 + 6 * n) for n in range(5)
    ]
    assert [budget for _, budget in asked] == [None, None, None, 13 * 10**9, None, 19 * 10**9, None, 25 * 10**9]
    text = ablation_text(ablations)
    assert text.count("exceeds the budget") == 3 and "micro_batches, workspace" in text
    assert [s["fits"] for s in ablation_document(ablations)] == [True, True, False, False, False]


def test_techniques_left_out_from_the_start():
    ablations = ablation(planner([]), frozenset({"recompute", "workspace"}))
    assert [set(s.without) for s in ablations] == [
        {"recompute", "workspace"}, {"recompute", "workspace", "offload"},
        {"recompute", "workspace", "offload", "micro_batches"},
    ]  # fmt: skip


def test_no_plan_at_all():
    growing = iter(range(20, 1000))
    ablations = ablation(planner([], lambda without: next(growing) * 10**9))
    assert all(
        s.figures is None and not s.fits and s.refusal is not None and s.refusal.code == "MBC204" for s in ablations
    )
    assert ablation_text(ablations).count("no plan was found") == 5


def test_other_errors_are_raised():
    def wrong(without, budget_bytes):
        raise MbcError("MBC200", "no kernel")

    with pytest.raises(MbcError):
        ablation(wrong)

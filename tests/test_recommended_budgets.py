"""The budget that a refusal recommends has a plan, though each budget is searched anew."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mbc import compiler
from mbc.compiler import compile_plan, try_plan
from mbc.errors import BudgetError
from mbc.options import Options, Overrides, RankGpu
from mbc.plan.model import Plan
from mbc.source import Source
from mbc.units import parse_size
from tests.optimize.planned import NETWORKS


def within(options: Options, budget_bytes: int) -> Options:
    return replace(options, overrides=Overrides(device_bytes=budget_bytes))


def typed_bytes(refusal: BudgetError) -> int:
    """Return the budget that a user types who follows the remedy."""
    recommended = re.search(r"raise memory.device to (\w+(?:\.\w+)?);", refusal.remedy)
    assert recommended is not None, refusal.remedy
    return parse_size(recommended[1])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_recommended_budget_has_a_plan(name: str) -> None:
    source, options = Source("net.mbc", NETWORKS[name]), Options("h200", without=frozenset({"offload"}))
    free = try_plan(source, options)
    budget_bytes = free.predictions.overhead_bytes + free.bounds.floor_bytes
    with pytest.raises(BudgetError, match="MBC204") as caught:
        compile_plan(source, within(options, budget_bytes))
    assert typed_bytes(caught.value) >= caught.value.needed_bytes > budget_bytes
    try_plan(source, within(options, caught.value.needed_bytes))


@pytest.mark.parametrize("name", ["residual", "synchronised"])  # no search within a budget finds a smaller step
def test_a_smaller_budget_names_no_larger_size(name: str) -> None:
    source, options = Source("net.mbc", NETWORKS[name]), Options("h200")

    def least_bytes(budget_bytes: int) -> int:
        """Return the size of the plan within a budget, or the size that the refusal names."""
        try:
            predictions = try_plan(source, within(options, budget_bytes)).predictions
        except BudgetError as refusal:
            certain.add(refusal.is_certain)
            return refusal.needed_bytes
        return predictions.arena_bytes + predictions.overhead_bytes

    certain = set[bool]()
    free = try_plan(source, options)
    floor_bytes = free.predictions.overhead_bytes + free.bounds.floor_bytes
    smallest = least_bytes(floor_bytes)
    assert certain == {True}
    assert least_bytes(smallest) <= smallest, "a budget of the recommended size is not refused"
    assert {least_bytes(floor_bytes + (smallest - floor_bytes) * i // 3) for i in (1, 2)} == {smallest}


class Refusing:
    """Plans of which those within fewer bytes than a limit are refused, each with a recommendation in turn."""

    def __init__(self, free: Plan, accepted_bytes: int, recommended: tuple[int, ...]) -> None:
        self.free, self.accepted_bytes, self.recommended = free, accepted_bytes, iter(recommended)
        self.tried: list[int] = []

    def __call__(self, _: object, options: Options, __: object) -> tuple[Plan, ...]:
        budget_bytes = options.overrides.device_bytes or 0
        self.tried.append(budget_bytes)
        if budget_bytes >= self.accepted_bytes:
            return (self.free,)
        needed_bytes = next(self.recommended)
        remedy = f"lower the batch, or raise memory.device to {needed_bytes >> 20}MiB; a smaller budget may work"
        raise BudgetError("MBC204", "too much", remedy, needed_bytes=needed_bytes, floor_bytes=1)


def test_a_recommended_budget_is_raised_until_it_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = Source("net.mbc", NETWORKS["dense"]), Options("h200")
    plans = Refusing(compile_plan(source, options), 121 << 20, (100 << 20, 101 << 20, 120 << 20, 120 << 20))
    monkeypatch.setattr(compiler, "_plans", plans)
    with pytest.raises(BudgetError) as caught:
        compile_plan(source, within(options, 90 << 20))
    # Each budget is what the last refusal recommends, but at least 2 % more than the last.
    assert [budget_bytes / (1 << 20) for budget_bytes in plans.tried] == pytest.approx([90, 100, 102, 120, 122.4])
    assert caught.value.needed_bytes == typed_bytes(caught.value) == plans.tried[-1]


def test_searches_and_unlike_memories_keep_the_first_recommendation(monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = Source("net.mbc", NETWORKS["dense"]), Options("h200")
    free = compile_plan(source, options)
    unlike = replace(options, gpus=2, rank_gpus=(RankGpu("h200", 90 << 20), RankGpu("h200", 10**9)))
    for plan, asked in ((try_plan, within(options, 90 << 20)), (compile_plan, unlike)):
        monkeypatch.setattr(compiler, "_plans", Refusing(free, 1 << 40, (100 << 20,)))
        with pytest.raises(BudgetError) as caught:
            plan(source, asked)
        assert caught.value.needed_bytes == 100 << 20

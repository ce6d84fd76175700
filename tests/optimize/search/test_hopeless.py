"""A budget far below the found plans is refused without trying every kind of step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mbc.cli.subject import read_source
from mbc.compiler import try_plan
from mbc.errors import BudgetError
from mbc.optimize import effort
from mbc.optimize.search import search, variants
from mbc.options import Options
from tests.optimize.shared import EXAMPLES

SETTINGS = (("depth", "18"), ("batch", "128"), ("size", "64"), ("width", "16"), ("classes", "10"))
KEPT = frozenset({"offload", "recompute"})


def test_other_kinds_of_steps_are_tried_near_the_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_source(str(EXAMPLES / "resnet.mbc"))
    free = try_plan(source, Options("h200", SETTINGS, without=KEPT)).predictions
    fits: list[object] = []
    fit = search.fit
    monkeypatch.setattr(search, "fit", lambda problem, *rest: (fits.append(problem), fit(problem, *rest))[1])

    def refused(share: float) -> tuple[int, str]:
        fits.clear()
        budget = f"{free.overhead_bytes + int(share * free.arena_bytes)}B"
        with pytest.raises(BudgetError) as caught:
            try_plan(source, Options("h200", (*SETTINGS, ("memory.device", budget)), without=KEPT))
        assert caught.value.code == "MBC204"
        return len(fits), str(caught.value)

    few, hopeless = refused(0.4)
    many, near = refused(0.7)
    assert few == 1 < many
    assert all("; a smaller budget may work: each budget is searched anew" in text for text in (hopeless, near))


def test_after_so_much_work_nothing_more_is_tried_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_source(str(EXAMPLES / "resnet.mbc"))
    free = try_plan(source, Options("h200", SETTINGS, without=KEPT)).predictions
    tried: list[int] = []
    techniques: set[object] = set()
    search = variants.Undecided.searched

    def noted(step: Any, *rest: Any) -> Any:
        variant = search(step, *rest)
        tried.append(step.problem.spent.work)
        techniques.add((step.techniques.division, step.techniques.states_bytes))
        return variant

    monkeypatch.setattr(variants.Undecided, "searched", noted)
    monkeypatch.setattr("mbc.optimize.search.search.smallest_step", lambda *_: None)
    # More is tried where the order of some operations may change.
    monkeypatch.setattr("mbc.optimize.search.fit_budget._defers", lambda _: True)

    def options(share: float) -> Options:
        budget = f"{free.overhead_bytes + int(share * free.arena_bytes)}B"
        return Options("h200", (*SETTINGS, ("memory.device", budget)), without=frozenset({"concurrent_stream"}))

    def refused() -> int:
        tried.clear()
        with pytest.raises(BudgetError) as caught:
            try_plan(source, options(0.2))
        assert caught.value.code == "MBC204"
        return len(tried)

    many = refused()
    assert len(techniques) == 1, "none fits: those with the lowest bound are searched for the smallest step"
    assert max(tried) > max(tried[0], 10_000), "several variants are counted together"
    plan = try_plan(source, options(0.6))
    monkeypatch.setattr(effort, "NOT_FOUND_WORK", 0)
    assert refused() == many, "so much for each operation is allowed in any case"
    monkeypatch.setattr(effort, "NOT_FOUND_WORK_OF_OPERATION", 0)
    assert refused() < many
    assert try_plan(source, options(0.6)).predictions == plan.predictions, "what fits at once is not cut short"


def test_steps_that_take_too_long_are_not_searched_for() -> None:
    source = read_source(str(EXAMPLES / "resnet.mbc"))
    free = try_plan(source, Options("h200", SETTINGS, without=frozenset({"offload"}))).predictions
    budget = ("memory.device", f"{free.overhead_bytes + int(0.6 * free.arena_bytes)}B")
    options = Options("h200", (*SETTINGS, budget), without=frozenset({"offload"}))
    train_us = try_plan(source, options).predictions.train_us
    assert free.train_us < train_us == try_plan(source, replace(options, slowest_us=2 * train_us)).predictions.train_us
    with pytest.raises(BudgetError, match="MBC204"):
        try_plan(source, replace(options, slowest_us=free.train_us))


def test_a_step_with_more_launches_than_expected_is_searched_again_by_its_techniques(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = read_source(str(EXAMPLES / "resnet.mbc"))
    free = try_plan(source, Options("h200", SETTINGS, without=KEPT)).predictions
    fit, fit_again, reserved_bytes = search.fit, search.fit_again, search.reserved_bytes
    fits: list[object] = []
    again: list[object] = []
    expected: list[int] = []

    def reserved(device: Any, precision: Any, draft: Any, more_launches: int = 0) -> int:
        expected.append(len(draft.train.launches) + more_launches)
        return reserved_bytes(device, precision, draft) + free.arena_bytes // 450 * max(0, expected[-1] - expected[0])

    monkeypatch.setattr(search, "reserved_bytes", reserved)
    monkeypatch.setattr(search, "fit", lambda *asked: (fits.append(asked), fit(*asked))[1])
    monkeypatch.setattr(search, "fit_again", lambda *asked: again.append(fit_again(*asked)) or again[-1])
    budget_bytes = free.overhead_bytes + int(0.6 * free.arena_bytes)
    options = Options("h200", (*SETTINGS, ("memory.device", f"{budget_bytes}B")), without=frozenset({"offload"}))
    plan = try_plan(source, options)
    assert [one is not None for one in again] == [True] and len(fits) == 1
    assert plan.predictions.arena_bytes + plan.predictions.overhead_bytes <= budget_bytes
    expected.clear()
    monkeypatch.setattr(search, "fit_again", lambda *_: None)
    assert try_plan(source, options).predictions == plan.predictions and len(fits) == 3

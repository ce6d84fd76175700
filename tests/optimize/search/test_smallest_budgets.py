"""The smallest budgets that refusals recommend, beside the exact optimum of all recomputations of small networks."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from mbc.errors import BudgetError
from mbc.optimize import effort
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.search import fit_budget, overhead, variants
from mbc.optimize.search.search import Limits, Search, search
from mbc.optimize.search.solution import Problem, scheduled_draft
from mbc.optimize.selection.selector import Selector
from mbc.options import UNLIMITED_BYTES
from tests.optimize.least_memory import least_live_bytes
from tests.optimize.planned import kept_plan, planned_table, roomy_problem, table

RECOMPUTED = frozenset({"offload", "workspace", "concurrent_stream"})  # the techniques that are left out


def drawn(draw: random.Random) -> str:
    """Return a chain of convolutions and activations."""
    lines, value = [""], "image"
    for i in range(draw.randint(2, 3)):
        stride = draw.choice(("", "", ", stride=2"))
        layers = f"conv({draw.choice((4, 8, 16))}, 3, pad=1{stride}) |> {draw.choice(('relu', 'gelu', 'tanh'))}"
        lines.append(f"  y{i} = {value} |> {layers}{draw.choice(('', '', ' |> maxpool(2)'))}")
        value = f"y{i}"
    return f"""
network drawn(batch = {draw.choice((8, 32))}, classes = 5) {{
  input image[batch, 4, 16, 16] : float
  input target[batch] : class{chr(10).join(lines)}
  logits = {value} |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
train {{ optimizer = sgd() }}
"""


def over_optimum(seed: int) -> float:
    """Return the arena of the smallest plan that a refusal recommends over the optimum, for a drawn network."""
    candidates = planned_table(drawn(random.Random(seed)), "drawn")
    graph = candidates.graph
    no_workspace = dict.fromkeys((operation.name for operation in (*graph.train, *graph.infer)), 0)
    problem = Problem(Selector.of(candidates), no_workspace, UNLIMITED_BYTES).with_single_updates
    kept = scheduled_draft(problem, problem.choose(no_workspace), AllowedTechniques(False, 0.0, 0), None)
    free = search(candidates, Limits(without=RECOMPUTED))
    with pytest.raises(BudgetError) as caught:
        search(candidates, Limits(free.bounds.floor_bytes + free.predictions.overhead_bytes, without=RECOMPUTED))
    smallest = search(candidates, Limits(caught.value.needed_bytes, without=RECOMPUTED))
    least_bytes, optimal = least_live_bytes(graph, kept, free.predictions.arena_bytes)
    assert optimal and free.bounds.floor_bytes <= least_bytes
    return smallest.predictions.arena_bytes / least_bytes


def test_the_smallest_plans_are_near_the_optimum_of_all_recomputations() -> None:
    ratios = [over_optimum(seed) for seed in range(6)]
    assert min(ratios) >= 1 and statistics.median(ratios) < 1.02 and max(ratios) < 1.25


def test_a_step_before_any_decision_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Problem, AllowedTechniques, int]] = []
    undecided = fit_budget.undecided
    monkeypatch.setattr(fit_budget, "undecided", lambda *asked: (written.append(asked), undecided(*asked))[1])
    least_bytes = kept_plan("dense").bounds.floor_bytes + kept_plan("dense").predictions.overhead_bytes
    with pytest.raises(BudgetError):
        search(table("dense"), Limits(least_bytes))
    keys = [(id(problem.programs), techniques, workspace) for problem, techniques, workspace in written]
    assert len(keys) == len(set(keys)) > 3


def test_page_tables_of_offloaded_values_are_reserved_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept_plan("residual").predictions
    monkeypatch.setattr(overhead, "USUAL_HOST_BYTES", 0)
    monkeypatch.setattr(overhead, "HOST_BYTES_MAPPED", 64)
    fitted: list[int] = []
    within = Search.within
    monkeypatch.setattr(
        Search, "within", lambda this, available: (fitted.append(available), within(this, available))[1]
    )
    plan = search(table("residual"), Limits(whole.overhead_bytes + 4 * whole.arena_bytes // 5))
    assert plan.predictions.host_bytes > 0 and plan.predictions.overhead_bytes > whole.overhead_bytes
    assert len(fitted) == 1


def test_launches_that_offloaded_states_add_are_reserved_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept_plan("residual")
    monkeypatch.setattr(effort, "STATES_CROWDING_SHARE", 0.0)
    monkeypatch.setattr(overhead, "USUAL_LAUNCHES", len(whole.train.launches) + len(whole.infer.launches))
    monkeypatch.setattr(overhead, "LAUNCH_BYTES", whole.predictions.arena_bytes // 400)
    fitted: list[int] = []
    within = Search.within
    monkeypatch.setattr(
        Search, "within", lambda this, available: (fitted.append(available), within(this, available))[1]
    )
    monkeypatch.setattr("mbc.optimize.search.search.fit_again", lambda *_: None)
    budget_bytes = whole.predictions.overhead_bytes + 4 * whole.predictions.arena_bytes // 5
    plan = search(table("residual"), Limits(budget_bytes))
    assert plan.predictions.host_bytes > 0 and len(fitted) == 1


def test_a_trial_with_fewer_offloaded_states_is_left_out_where_the_decisions_of_the_best_step_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(effort, "STATES_CROWDING_SHARE", 0.0)
    monkeypatch.setattr(effort, "SLOW_STEP_WORK", 0)
    whole = kept_plan("residual").predictions
    limits = Limits(whole.overhead_bytes + 7 * whole.arena_bytes // 10)
    fit = fit_budget._fit  # pyright: ignore[reportPrivateUsage]
    searched: list[AllowedTechniques] = []
    monkeypatch.setattr(
        fit_budget, "_fit", lambda step, known_us: (searched.append(step.techniques), fit(step, known_us))[1]
    )
    counts: list[int] = []
    for share in (0.0, 1e9):
        monkeypatch.setattr(effort, "DECISIONS_SHARE", share)
        searched.clear()
        search(table("residual"), limits)
        counts.append(len([one for one in searched if one.states_bytes]))
    assert counts[0] > counts[1] > 0


@pytest.mark.parametrize("host_bytes", [1024, 2048, 4096])
def test_a_small_limit_of_host_memory_gives_a_plan_or_a_refused_budget(host_bytes: int) -> None:
    whole = kept_plan("residual")
    budget_bytes = whole.predictions.overhead_bytes + (whole.bounds.floor_bytes + whole.predictions.arena_bytes) // 2
    try:
        assert (
            search(table("residual"), Limits(budget_bytes, host_bytes=host_bytes)).predictions.host_bytes <= host_bytes
        )
    except BudgetError as refusal:
        assert refusal.needed_bytes > budget_bytes


def test_a_variant_that_was_searched_because_nothing_fitted_is_not_searched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = kept_plan("residual").predictions
    problem = roomy_problem("residual", 9 * whole.arena_bytes // 10)
    step = variants.undecided(problem, AllowedTechniques(True, 0.0, 0), UNLIMITED_BYTES)
    fitting = next(v for v in variants._variants(step, math.inf, False))
    excess = replace(fitting.residency, live_bytes=problem.available_bytes + 1)
    monkeypatch.setattr(variants, "_variants", lambda *_: [replace(fitting, residency=excess)])
    monkeypatch.setattr(variants, "_nearer", lambda *_: iter([fitting]))
    monkeypatch.setattr(variants._Variant, "improved", lambda *_: pytest.fail("searched again"))
    first = next(variants.placed_variants(step, math.inf, False))
    assert first.draft.train.launches

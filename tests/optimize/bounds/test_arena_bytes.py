"""The lower bound of the arena: one bound for refusals and plans, and no plan is below it."""

from __future__ import annotations

import pytest

from mbc.errors import BudgetError
from mbc.optimize.bounds.arena_bytes import least_arena
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.search import search as searching
from mbc.optimize.search.search import Limits, search
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.model import Plan
from tests.optimize.planned import H200, NETWORKS, kept_plan, planned_table, table

# Inputs that no single operation reads together with so much else: the states and inputs at the start set the bound.
SEPARATE = """
network separate(batch = 64) {
  input a[batch, 8, 8, 8] : float
  input b[batch, 8, 8, 8] : float
  input target[batch] : class
  x = a |> global_avgpool |> flatten |> linear(4)
  y = b |> global_avgpool |> flatten |> linear(4)
  logits = x + y
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""
WIDE = NETWORKS["residual"].replace("conv(4", "conv(8")  # masks are of eight channels


def tables() -> list[tuple[CandidateTable, Plan]]:
    separate = planned_table(SEPARATE, "separate")
    pairs = [(table(name), kept_plan(name)) for name in NETWORKS if name != "synchronised"]
    return [*pairs, (separate, search(separate, Limits(1 << 40)))]


def refusal(candidates: CandidateTable, budget_bytes: int, *without: str) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        search(candidates, Limits(budget_bytes, without=frozenset(without)))
    return caught.value


def test_a_plan_prints_the_bound_that_refuses_budgets() -> None:
    for candidates, plan in tables():
        refused = refusal(candidates, H200.overhead_bytes + 1)
        assert refused.code == "MBC203"
        printed_bytes = plan.bounds.floor_bytes + plan.predictions.overhead_bytes
        assert printed_bytes == refused.floor_bytes
        assert plan.predictions.arena_bytes >= plan.bounds.floor_bytes
        below = refusal(candidates, printed_bytes - 1)
        assert below.code == "MBC203" and below.floor_bytes == printed_bytes


def test_the_bound_of_several_variants_is_below_that_of_each() -> None:
    candidates = planned_table(WIDE, "residual")
    masked = candidates.of(mask_relus(candidates.graph, residual_relus(candidates.graph)))
    assert masked.graph != candidates.graph
    both = least_arena((Fusion.of(candidates), Fusion.of(masked)))
    for one in (candidates, masked):
        assert both.total_bytes <= least_arena((Fusion.of(one),)).total_bytes
    assert both.operation in (*candidates.graph.train, *candidates.graph.infer)


@pytest.mark.parametrize("network", ["residual", "dense"])
def test_a_recommended_budget_is_that_of_a_verified_plan(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, verified = kept_plan(network).predictions, list[Plan]()
    verify = searching.verify_plan
    monkeypatch.setattr(searching, "verify_plan", lambda plan, *more: (verified.append(plan), verify(plan, *more))[1])
    budget_bytes = int(0.9 * kept.arena_bytes) + H200.overhead_bytes
    refused = refusal(table(network), budget_bytes, "recompute", "offload", "micro_batches", "workspace")
    assert refused.code == "MBC204"
    (smallest,) = verified
    assert smallest.budget_bytes == refused.needed_bytes > budget_bytes


# The update of the head's weight reads a sum of gradients and the control block, both of which are updated in place.
ACCUMULATING = """
network drawn(batch = 4) {
  input x[batch, 3, 8, 8] : float
  input target[batch] : class
  v1 = x |> conv(8, 3, pad=1) @stem |> relu
  v2 = v1 |> maxpool(3, stride=1, pad=1)
  v3 = v2 |> bn
  y = v3 |> flatten |> dropout(0.3) |> linear(5) @head
  output y
  loss (y, target) |> softmax_cross_entropy
}
train {
  optimizer = adamw(beta1=0.8, weight_decay=0.1)
  accumulate = 3
  ema = 0.99
  frozen = "stem.*"
}
"""


def test_no_plan_is_below_the_bound_where_sums_of_gradients_are_updated_in_place() -> None:
    candidate_table = planned_table(ACCUMULATING, "accumulating")
    for budget_bytes in (56 * 1024, 64 * 1024, 1 << 40):
        plan = search(candidate_table, Limits(budget_bytes + H200.overhead_bytes))
        assert plan.predictions.arena_bytes >= plan.bounds.floor_bytes

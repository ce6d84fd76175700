"""Remedies for budgets in which the search finds no plan."""

from __future__ import annotations

import pytest

from mbc.compiler import compile_plan
from mbc.optimize.bounds.infeasible import not_found
from mbc.options import Options
from mbc.source import Source
from tests.optimize.planned import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_is_a_remedy_where_it_saves_half_of_what_is_missing(name: str) -> None:
    options = Options("h200", (("batch", "64"),), without=frozenset({"offload"}))
    plan = compile_plan(Source("net.mbc", NETWORKS[name]), options)
    graph, predictions = plan.graph, plan.predictions
    states_bytes = sum(graph.values[state.value].type.size_bytes for state in graph.states)
    for available_bytes, halves in ((predictions.arena_bytes // 2, True), (states_bytes, False), (0, False)):
        error = not_found(plan, 0, predictions.overhead_bytes + available_bytes)
        assert (error.half_precision, "train.precision to bf16" in error.remedy) == ("bf16" if halves else "", halves)
        assert (", about " in error.remedy) == halves, "no rows fit beside the states"

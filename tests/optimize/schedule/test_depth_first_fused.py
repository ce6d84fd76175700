"""Depth-first execution of fused operations in micro-batches gives the bits of single operations."""

from __future__ import annotations

import functools

import pytest

from mbc.ir.graph import TrainingGraph
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.depth_first_groups import Division
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.select import choose
from mbc.plan.model import Mode, Plan
from mbc.plan.verify import verify_plan
from mbc.runtime.launch_order import Transfers
from tests.graphs import training_graph
from tests.optimize.fusion.test_select_groups import table
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.planned import plan_of, trained
from tests.optimize.schedule.test_depth_first_micro_batches import divided_drafts

PLAIN = """
network plain(batch = 6, classes = 5) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1, bias=true) |> relu |> conv(4, 3, pad=1, bias=true) |> relu |> maxpool(2)
  logits = x |> conv(8, 3, pad=1, bias=true) |> relu |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp32 }
"""
NORMALIZED = """
network normalized(batch = 6, classes = 5) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) |> bn |> relu |> conv(4, 3, pad=1) |> bn |> relu
  logits = x |> flatten |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = fp32 }
"""
# Groups of which a part is a sum over rows.
SUMS = {
    PLAIN: {"relu_backward+channel_sum", "relu_backward+max_pool_backward+channel_sum"},
    NORMALIZED: {"batch_normalize+relu+relu_backward+batch_normalize_backward_reduce"},
}


@functools.cache
def graph(source: str) -> TrainingGraph:
    return training_graph(source)


@functools.cache
def plans(source: str, rows: int) -> tuple[Plan, Plan]:
    """Return two plans: with divided groups one after another, and depth-first."""
    tabulated = table(graph(source), gpu=UNCLUSTERED)
    programs = Fusion.of(tabulated).programs()
    kept = search(tabulated, Limits(1 << 40))
    every = choose(tabulated, {}, None, programs)
    groups = (*every.train, *every.infer)

    def plan(draft: Draft) -> Plan:
        return plan_of(kept, alias_in_place(graph(source), draft, groups))

    whole, by_depth = divided_drafts(tabulated, Division(500, rows), programs)
    return plan(whole), plan(by_depth)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("source", SUMS)
def test_they_give_the_same_bits(source: str, rows: int) -> None:
    whole, by_depth = plans(source, rows)
    for plan in (whole, by_depth):
        verify_plan(plan)
    assert trained(whole, Transfers.IN_ORDER) == trained(by_depth, Transfers.IN_ORDER)


@pytest.mark.parametrize("source", SUMS)
def test_their_sums_are_added_up(source: str) -> None:
    kinds = {operation.name: operation.kind for operation in graph(source).train}
    _, plan = plans(source, 2)
    adding = {
        "+".join(kinds[name] for name in launch.operations)
        for launch in plan.train.launches
        if len(launch.operations) > 1 and any(access.mode is Mode.ACCUMULATE for access in launch.accesses)
    }
    assert adding == SUMS[source]


def test_values_between_them_never_exist_as_a_whole() -> None:
    whole, by_depth = plans(PLAIN, 2)
    assert by_depth.predictions.arena_bytes < whole.predictions.arena_bytes
    rows = {b.rows.count for b in by_depth.buffers if b.value is not None and b.value.endswith("relu0")}
    assert rows == {2}

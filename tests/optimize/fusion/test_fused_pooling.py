"""Fusion groups with a max pool: where they match, their results, and the values that they do not write."""

from __future__ import annotations

import functools

import pytest

from mbc.ir.graph import TrainingGraph
from mbc.kernels.interpreter import INTERPRETER
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.search import Limits, search
from mbc.plan.model import Kernel, Plan
from mbc.plan.verify import verify_plan
from tests.graphs import training_graph
from tests.optimize.fusion.unclustered import WITHOUT_CLUSTERS
from tests.optimize.planned import H200, Favouring, Without, assert_equal_but_for_rounding, trained

# No kernel uses clusters: small tensors are not normalised at once.
SOURCE = """
network pools(batch = 6, classes = 5) {
  input image[batch, 2, 8, 8] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1, bias=true) |> relu |> maxpool(3, stride=1, pad=1)
  y = x |> conv(4, 3, pad=1) |> bn(affine = AFFINE) |> relu
  u = y |> maxpool(2)
  z = y |> conv(4, 3, pad=1) |> relu |> maxpool(3, stride=2, pad=1) |> conv(8, 3, pad=1) |> bn |> relu |> maxpool(2)
  v = (u |> maxpool(3, stride=1, pad=1), u |> conv(4, 1)) |> concat
  logits = (z |> flatten, v |> flatten) |> concat |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9)  precision = PRECISION }
"""


@functools.cache
def graph(precision: str = "bf16", affine: str = "true", source: str = SOURCE) -> TrainingGraph:
    text = source.replace("PRECISION", precision).replace("AFFINE", affine)
    return training_graph(text)


def planned(steps: TrainingGraph, fused: bool = True, budget_bytes: int = 10**12) -> Plan:
    providers = (INTERPRETER,) if steps.precision == "fp64" else WITHOUT_CLUSTERS
    chosen = tuple(Favouring(p) if fused else Without(p) for p in providers)
    table = CandidateTable(steps, H200, chosen, rules=Rules())
    plan = search(table, Limits(budget_bytes, without=frozenset({"concurrent_stream"})))
    verify_plan(plan)
    return plan


def launched(plan: Plan) -> set[str]:
    return {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}


def test_every_kernel_finds_its_place():
    kernels = launched(planned(graph()))
    assert kernels >= {
        "bias_add_relu_max_pool", "relu_max_pool", "batch_normalize_relu_max_pool",
        "batch_normalize_relu_and_max_pool", "relu_max_pool_backward_channel_sum", "relu_max_pool_backward",
        "relu_max_pool_backward_bn_reduce", "relu_max_pool_backward_bn_backward", "max_pool_backward_add",
        "max_pool_backward_add_bn_reduce", "max_pool_backward_add_bn_backward",
    }  # fmt: skip
    assert "max_pool_backward" not in kernels


def test_pooled_values_are_not_kept():
    fused, single = planned(graph()), planned(graph(), fused=False)
    kept = [{b.value for b in plan.buffers if b.value} for plan in (fused, single)]
    pooled = {op.inputs[0] for op in graph().train if op.kind == "max_pool"}
    alone = {v for v in pooled if sum(v in op.inputs for op in graph().train) == 1}
    assert len(alone) == 3
    assert kept[0].isdisjoint(alone) and alone <= kept[1]


@pytest.mark.parametrize("affine", ["true", "false"])
def test_groups_compute_their_operations(affine: str):
    steps = graph("fp64", affine)
    fused = planned(steps)
    assert sum(len(launch.operations) > 1 for launch in fused.train.launches) >= 10
    assert_equal_but_for_rounding(fused, planned(steps, fused=False))


@functools.cache
def roomy(precision: str) -> Plan:
    return planned(graph(precision))


def within(precision: str, share: float) -> Plan:
    """Return the plan within this share of the arena of the plan without a limit."""
    arena_bytes = int(roomy(precision).predictions.arena_bytes * share)
    return planned(graph(precision), budget_bytes=arena_bytes + H200.overhead_bytes)


@pytest.mark.parametrize(("precision", "share"), [("bf16", 0.9), ("bf16", 0.8), ("fp32", 0.9), ("fp32", 0.8)])
def test_groups_within_a_budget_give_the_same_bits(precision: str, share: float):
    plan = within(precision, share)
    assert plan.predictions.arena_bytes <= share * roomy(precision).predictions.arena_bytes
    assert {"relu_max_pool_backward_bn_reduce", "bias_add_relu_max_pool"} <= launched(plan)
    assert plan.predictions.train_us >= plan.bounds.within_budget_us * (1 - 1e-9) > 0
    assert trained(plan) == trained(roomy(precision))

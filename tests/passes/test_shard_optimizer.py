"""Optimizer states sharded over ranks: the operations that replace others, and those that stay."""

from __future__ import annotations

from functools import cache

import pytest

from mbc.errors import MbcError
from mbc.ir.graph import Optimizer, Ranks, TrainingGraph
from mbc.ops.shard import is_sharded, parameters_of_sharded_states
from mbc.passes.check_graph import verify_training
from mbc.passes.shard_optimizer import LEAST_BYTES, can_shard, check_can_shard
from tests.graphs import of_kind, training_graph

SOURCE = """network net(batch = 4) {
  input image[batch, 3, 6, 6] : float
  input label[batch] : class
  x = image |> conv(64, 3, pad=1) |> bn |> relu |> conv(70, 3, pad=1, bias=true) |> relu |> global_avgpool
  logits = x |> linear(64) |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
train { optimizer = %s }
"""
MOMENTUM, ADAMW = "sgd(momentum=0.9)", "adamw"


@cache
def graph_of(train: str, rows: tuple[int, ...] = (4, 4), precision: str = "fp32", shard: bool = True) -> TrainingGraph:
    members = tuple(rank for rank, own in enumerate(rows) if own == rows[0])
    ranks = Ranks(rows, members) if len(rows) > 1 else None
    graph = training_graph(SOURCE % train, ("train.precision", precision), ranks=ranks, shard=shard)
    verify_training(graph)
    return graph


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("size", [2, 3])
def test_large_parameters_are_updated_in_parts(size: int, precision: str) -> None:
    graph = graph_of(ADAMW, (4,) * size, precision)
    sharded = {op.inputs[0]: op for op in of_kind(graph, "adamw_update_part")}
    states = {state.value for state in graph.states}
    assert list(sharded) == ["linear0.weight", "conv1.weight"]  # as their gradients are ready
    for name, op in sharded.items():
        rows = graph.values[name].type.shape[0]
        part = graph.values[name].type.with_rows(-(-rows // size))
        for value in (*op.inputs[1:2], *op.inputs[3:], *op.outputs):
            assert graph.values[value].type == part
        assert {f"{name}.m", f"{name}.v"} <= states
    for op in of_kind(graph, "adamw_update"):
        assert graph.values[op.inputs[0]].type.size_bytes < LEAST_BYTES
    gathers = of_kind(graph, "gather_parts")
    assert [op.inputs[1] for op in gathers] == list(sharded)
    assert graph.train[-len(gathers) :] == tuple(gathers)  # one launch may run all updates
    assert dict(graph.updates)["conv1.weight"] == "next.conv1.weight" == gathers[-1].outputs[0]
    assert parameters_of_sharded_states(graph.train) == {f"{n}.{s}": n for n in sharded for s in ("m", "v")}


def test_the_rest_is_the_same() -> None:
    whole, sharded = graph_of(MOMENTUM, shard=False), graph_of(MOMENTUM)
    changed = {"reduce_scatter", "sgd_update_part", "gather_parts"}
    same = [op for op in sharded.train if op.kind not in changed]
    assert same == [op for op in whole.train if op in same] and is_sharded(sharded) and not is_sharded(whole)
    assert sharded.infer == whole.infer and sharded.states == whole.states and sharded.updates == whole.updates


@pytest.mark.parametrize(
    ("train", "rows"), [("sgd", (4, 4)), (MOMENTUM, (4,)), (MOMENTUM, (4, 3))], ids=["no states", "one", "unlike"]
)
def test_where_nothing_is_sharded(train: str, rows: tuple[int, ...]) -> None:
    assert graph_of(train, rows) == graph_of(train, rows, shard=False)


@pytest.mark.parametrize(("train", "precision"), [(f"{MOMENTUM}  clip_norm = 1", "fp32"), (ADAMW, "fp16")])
def test_the_guard_sees_the_norms_of_all_parts(train: str, precision: str) -> None:
    graph = graph_of(train, precision=precision)
    (norm,), (guard,) = of_kind(graph, "norm"), of_kind(graph, "guard")
    scattered = [op.outputs[0] for op in of_kind(graph, "reduce_scatter")]
    assert sorted(norm.inputs) == sorted(scattered) and scattered
    (gather,) = of_kind(graph, "all_gather")
    assert gather.inputs == norm.outputs and guard.inputs[-1] == gather.outputs[0]
    assert graph.values[guard.inputs[-1]].type.shape == (2, 1)
    assert set(guard.inputs[2:-1]) == {op.outputs[0] for op in of_kind(graph, "all_reduce")} & set(guard.inputs[2:])
    before = graph_of(train, precision=precision, shard=False)
    assert len(of_kind(before, "guard")[0].inputs) == len(guard.inputs) - 1 + len(scattered)


def test_ranks_of_several_plans_are_refused() -> None:
    assert can_shard(Ranks((4, 4), (0, 1))) and not can_shard(Ranks((4, 3), (0,))) and not can_shard(None)
    check_can_shard(True, None, Optimizer())
    check_can_shard(False, Ranks((4, 3), (0,)), Optimizer())
    with pytest.raises(MbcError) as caught:
        check_can_shard(True, Ranks((4, 3), (0,)), Optimizer())
    assert caught.value.code == "MBC100"
    assert "cannot be sharded over 2 GPUs that do not run one plan, with 4, 3 rows" in caught.value.message

"""Weights' gradients from gathered rows: used if the rows are much smaller than the gradient, alike on all ranks."""

from __future__ import annotations

from functools import cache

import pytest

from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ops import KINDS
from mbc.ops.collective import AllGather
from mbc.passes import gather_operands
from mbc.passes.check_graph import verify_training
from mbc.passes.gather_operands import GEMMS_TO_OVERLAP, MOST_ROWS, MOST_ROWS_FP32
from tests.graphs import of_kind, training_graph

SOURCE = """network net(batch = 4, wide = 64, bias = true) {
  input image[batch, 3, 8, 8] : float
  input label[batch] : class
  x = image |> conv(4, 3, pad=1) |> relu |> flatten |> linear(wide, bias=bias) |> relu
  logits = x |> linear(wide, bias=bias) |> relu |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
"""

# A convolution of one pixel has as few operands and as large a gradient as a linear layer.
POINTS = """network net(batch = 4, wide = 64, bias = true) {
  input image[batch, 64, 1, 1] : float
  input label[batch] : class
  x = image |> conv(64, 1) |> relu |> flatten |> linear(wide, bias=bias) |> relu
  logits = x |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
"""


@cache
def graph_of(
    rows: tuple[int, ...] = (4, 4),
    precision: str = "fp32",
    wide: int = 64,
    bias: str = "true",
    least_bytes: int = 0,
    source: str = SOURCE,
) -> TrainingGraph:
    settings = (("batch", str(rows[0])), ("wide", str(wide)), ("bias", bias), ("train.precision", precision))
    members = tuple(rank for rank, own in enumerate(rows) if own == rows[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_operands, "LEAST_BYTES", least_bytes)
        graph = training_graph(source, *settings, ranks=Ranks(rows, members))
    verify_training(graph)
    return graph


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_the_sum_is_computed_from_the_rows_of_all(precision: str) -> None:
    graph = graph_of(precision=precision)
    first, second = (op.name.removesuffix(".gather_rows") for op in of_kind(graph, "gather_rows")[::-1])
    assert (first, second) == ("linear0.backward_filter", "linear1.backward_filter")  # the last has 3 classes only
    makers = {output: op for op in graph.train for output in op.outputs}
    for gather in of_kind(graph, "gather_rows"):
        assert gather.attributes == AllGather(2)
        for own, rows in zip(gather.inputs, gather.outputs, strict=True):
            assert graph.values[own].per_sample and not graph.values[rows].per_sample
            assert graph.values[rows].type.shape == (8, *graph.values[own].type.shape[1:])
            assert graph.values[rows].type.dtype is graph.values[own].type.dtype
    summed = {op.outputs[0] for op in of_kind(graph, "all_reduce")}
    for update in of_kind(graph, "sgd_update"):
        weight, gradient = update.inputs[:2]
        assert gradient == f"sum.d.{weight}"
        gathered = weight in ("linear0.weight", "linear1.weight")
        assert makers[gradient].kind == ("linear_backward_filter" if gathered else "all_reduce")
        assert (gradient in summed) is not gathered and (f"d.{weight}" in graph.values) is not gathered


def test_operands_travel_during_the_next_products() -> None:
    graph = graph_of()
    places = {op.name: i for i, op in enumerate(graph.train)}
    products = [i for i, op in enumerate(graph.train) if KINDS[op.kind].flops is not None]
    for gather in of_kind(graph, "gather_rows"):
        start, stop = places[gather.name], places[gather.name.removesuffix(".gather_rows")]
        others = [i for i in products if start < i < stop and "linear_backward_filter" not in graph.train[i].kind]
        assert len(others) == GEMMS_TO_OVERLAP or stop > max(i for i in products if i != stop)


@pytest.mark.parametrize(
    ("rows", "wide", "precision", "gathered"),
    [
        # The operands have 320 and 128 elements a row, half of the weights' elements are 8192 and 2048.
        ((8, 8), 64, "fp32", 2),  # 5120, and 2048, which is just allowed
        ((12, 12), 64, "fp32", 1),  # 7680 and 3072
        ((13, 13), 64, "fp32", 0),
        ((13, 13), 64, "bf16", 2),  # half as many bytes in operands, and as many in gradients
        ((17, 17), 64, "bf16", 1),
        ((4, 4, 4), 64, "fp32", 2),
        ((4, 3), 64, "fp32", 0),  # two plans
        ((MOST_ROWS_FP32 // 2,) * 2, 512, "fp32", 2),  # and few rows
        ((MOST_ROWS_FP32 // 2 + 1,) * 2, 512, "fp32", 0),
        ((MOST_ROWS_FP32 // 2 + 1,) * 2, 512, "bf16", 2),
        ((MOST_ROWS // 2,) * 2, 4096, "bf16", 1),
        ((MOST_ROWS // 2 + 1,) * 2, 4096, "bf16", 0),
    ],
)
def test_where_it_sends_a_quarter_at_most(rows: tuple[int, ...], wide: int, precision: str, gathered: int) -> None:
    graph = graph_of(rows, precision, wide)
    assert len(of_kind(graph, "gather_rows")) == gathered
    for gather in of_kind(graph, "gather_rows"):
        operands = sum(graph.values[name].type.size_bytes for name in gather.outputs)
        (gradient,) = (op.outputs[0] for op in graph.train if op.inputs == gather.outputs)
        assert operands <= 2 * graph.values[gradient].type.size_bytes / 4


def test_gradients_of_convolutions_are_summed_however_few_their_operands_are() -> None:
    graph = graph_of((4, 4), source=POINTS)
    gathered = [op.name.removesuffix(".gather_rows") for op in of_kind(graph, "gather_rows")]
    assert gathered == ["linear0.backward_filter"]
    assert "conv0.backward_filter" in {op.name for op in graph.train}


def test_sizes_that_are_no_multiple_of_a_word_are_summed() -> None:
    assert len(of_kind(graph_of((3, 3), "bf16", 63), "gather_rows")) == 0  # 3 x 63 elements of 2 bytes
    assert len(of_kind(graph_of((2, 2), "bf16", 63), "gather_rows")) == 2


def test_small_gradients_are_summed_with_others() -> None:
    """Check that small gradients enlarge a bucket instead of taking a call of their own."""
    assert len(of_kind(graph_of(least_bytes=64 * 64 * 4), "gather_rows")) == 2
    assert len(of_kind(graph_of(least_bytes=64 * 64 * 4 + 1), "gather_rows")) == 1


def test_other_gpus_with_as_many_rows_sum() -> None:
    """GPUs of another model run another plan, whose kernels add in another order; so these gradients are summed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_operands, "LEAST_BYTES", 0)
        for members, count in (((0, 1), 2), ((0,), 0), ((1,), 0)):
            graph = training_graph(SOURCE, ranks=Ranks((4, 4), members))
            assert len(of_kind(graph, "gather_rows")) == count


def test_one_gpu_gathers_nothing() -> None:
    assert not of_kind(training_graph(SOURCE), "gather_rows")

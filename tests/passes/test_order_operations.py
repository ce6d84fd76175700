"""Orders of operations: near the optimum of drawn graphs, valid, and without effect on results."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

import mbc.passes.training_step as training_step
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ir.types import DType, TensorType
from mbc.kernels.providers import PROVIDERS
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.search import Limits, search
from mbc.passes import order_operations as tested
from mbc.passes.check_graph import verify_training
from mbc.passes.order_operations import order_operations
from mbc.runtime.launch_order import Transfers
from mbc.source import Source
from tests.optimize.planned import H200, NETWORKS
from tests.optimize.remat.test_apply_decisions import trained

WIDE = """
network wide(batch = 32) {
  input image[batch, 2, 16, 16] : float
  input target[batch] : class
  x = image |> conv(2, 3, pad=1) |> relu |> dropout(0.3) |> flatten |> linear(200) |> relu |> dropout(0.5)
  logits = x |> linear(50) |> relu |> dropout(0.1) |> linear(5)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


def orders(operations: Sequence[Operation], computed: frozenset[str]) -> Iterator[tuple[Operation, ...]]:
    """Yield all orders in which each operation follows those whose results it reads."""
    if not operations:
        yield ()
    for i, op in enumerate(operations):
        if computed.issuperset(op.inputs):
            for rest in orders((*operations[:i], *operations[i + 1 :]), computed.union(op.outputs)):
                yield (op, *rest)


def peak_bytes(order: Sequence[Operation], sizes: dict[str, int]) -> int:
    """Return the most bytes of values between their first and last use; results that nothing reads stay."""
    last = {name: at for at, op in enumerate(order) for name in op.inputs}
    live, peak = {"x"}, 0
    for at, op in enumerate(order):
        live.update(op.outputs)
        peak = max(peak, sum(sizes[name] for name in live))
        live = {name for name in live if last.get(name, len(order)) > at}
    return peak


def drawn(seed: int) -> tuple[list[Operation], dict[str, Value]]:
    """Return six to nine products, each of one or two earlier values, and the guard of the step."""
    draw = random.Random(seed)
    names, operations = ["x"], list[Operation]()
    for number in range(draw.randint(6, 9)):
        read = draw.sample(names, min(len(names), draw.randint(1, 2)))
        names.append(f"v{number}")
        operations.append(Operation(f"o{number}", "convolution", tuple(read), (f"v{number}",), NoAttributes()))
    values = {name: Value(name, TensorType((draw.randint(1, 50),), DType.FP32)) for name in names}
    return [*operations, Operation("guard", "guard", (), (), NoAttributes())], values


def test_drawn_graphs_are_ordered_near_their_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "LEAST_GAIN", 0.0)
    optimal = better = 0
    for seed in range(120):
        operations, values = drawn(seed)
        sizes = {name: value.type.size_bytes for name, value in values.items()}
        ordered = order_operations(operations, values)
        assert sorted(op.name for op in ordered) == sorted(op.name for op in operations)
        source, after = (peak_bytes(trial[:-1], sizes) for trial in (operations, ordered))
        least = min(peak_bytes(trial, sizes) for trial in orders(operations[:-1], frozenset({"x"})))
        assert least <= after <= source
        optimal += after == least
        better += after < source
    assert optimal >= 114 and better >= 30


def shuffled(operations: Sequence[Operation], seed: int) -> list[Operation]:
    """Return the operations before the first update in a random order that respects dependencies."""
    end = next(i for i, op in enumerate(operations) if KINDS[op.kind].updates)
    draw, waiting, written = random.Random(seed), [*operations[:end]], list[Operation]()
    while waiting:
        pending = {name for op in waiting for name in op.outputs}
        chosen = draw.choice([op for op in waiting if pending.isdisjoint(op.inputs)])
        waiting.remove(chosen)
        written.append(chosen)
    return [*written, *operations[end:]]


def graph_of(source: str) -> TrainingGraph:
    lowered = lower(parse(Source("small.mbc", source)), (), None)
    return training_step.differentiate(lowered.network, lowered.optimizer, lowered.precision)


@pytest.mark.parametrize("source", [WIDE, NETWORKS["residual"], NETWORKS["dense"]])
def test_no_order_changes_a_bit(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of dropout, and the terms of sums, follow operations and not their places."""
    results: list[dict[str, bytes]] = []
    for seed in range(3):
        monkeypatch.setattr(
            training_step, "order_operations", lambda ops, _, seed=seed: shuffled(ops, seed) if seed else [*ops]
        )
        graph = graph_of(source)
        verify_training(graph)
        plan = search(CandidateTable(graph, H200, PROVIDERS, None, Rules()), Limits(1 << 40))
        results.append(trained(plan, Transfers.IN_ORDER))
    assert results[0] == results[1] == results[2]


def test_a_large_gradient_waits_until_activations_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in which no order gains keeps the order of its source."""
    sources = (WIDE, NETWORKS["residual"], NETWORKS["dense"])
    ordered = [graph_of(source).train for source in sources]
    monkeypatch.setattr(training_step, "order_operations", lambda ops, _: [*ops])
    source_orders = [graph_of(source).train for source in sources]
    assert [a == b for a, b in zip(ordered, source_orders, strict=True)] == [False, True, False]
    assert {*ordered[0]} == {*source_orders[0]}

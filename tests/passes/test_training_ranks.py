"""The training graph of a rank: values for the end of the step are summed over ranks once, and losses count by rows."""

from __future__ import annotations

from collections import Counter

import pytest

from mbc.ir.graph import Optimizer, Ranks, Role, TrainingGraph
from mbc.ir.types import Precision
from mbc.ops.collective import AllReduce
from mbc.ops.elementwise_loss import PlainLossBackward
from mbc.ops.loss import CrossEntropyBackward, WeightedSum
from mbc.passes.check_graph import verify_training
from mbc.passes.training_step import differentiate
from tests.passes.test_training_step import MOMENTUM, NETWORKS

ADAMW = Optimizer("adamw")
CLIPPED = Optimizer(frozen=("*.bias",), clip_norm=1.0)


def of_ranks(name: str, precision: Precision, optimizer: Optimizer = MOMENTUM) -> tuple[TrainingGraph, TrainingGraph]:
    """Return the graph of one GPU, and that of the first of two ranks, which has a third of the rows of both."""
    network = NETWORKS[name]()
    ranks = Ranks((network.batch, 2 * network.batch), (0,))
    graphs = differentiate(network, optimizer, precision), differentiate(network, optimizer, precision, ranks)
    for graph in graphs:
        verify_training(graph)
    return graphs


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW, CLIPPED], ids=["sgd", "adamw", "clipped"])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_losses_and_metrics_are_summed_once(name: str, precision: Precision, optimizer: Optimizer) -> None:
    alone, graph = of_ranks(name, precision, optimizer)
    assert graph.ranks is not None and alone.ranks is None
    assert graph.global_batch == 3 * graph.batch == 3 * alone.global_batch
    sums = [op for op in graph.train if op.kind == "all_reduce"]
    assert all(op.attributes == AllReduce(2) for op in sums)
    operands = {op.outputs[0]: op.inputs[0] for op in sums}
    assert len(operands) == len(sums) and set(Counter(operands.values()).values()) == {1}
    # Exactly the values that one GPU reads at the end of its step.
    updates = {op.inputs[0]: op.inputs[1] for op in graph.train if op.kind.endswith("_update")}
    trained = {op.inputs[0]: op.inputs[1] for op in alone.train if op.kind.endswith("_update")}
    assert {parameter: operands[gradient] for parameter, gradient in updates.items()} == trained
    total = operands[graph.loss]  # of one loss, too, since it has a weight
    assert total == (alone.loss if len(NETWORKS[name]().losses) > 1 else "total_loss")
    assert tuple(operands[metric] for metric in graph.metrics) == alone.metrics
    assert len(operands) == len(trained) + 1 + len(alone.metrics)
    # Whether a step counts is decided by sums, in fp16 and with a clipped norm by those of all gradients.
    (guard,) = (op for op in graph.train if op.kind == "guard")
    _, *seen = guard.inputs
    gradients = list(updates.values()) if precision is Precision.FP16 or optimizer.clip_norm else []
    assert seen[0] == graph.loss and sorted(seen[1:]) == sorted(gradients)
    # Where gradients are ready in the backward pass, they are summed in that order.
    place = {output: i for i, op in enumerate(graph.train) for output in op.outputs}
    ready = [place[operands[op.outputs[0]]] for op in sums if op.outputs[0] in updates.values()]
    assert ready == sorted(ready)


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_count_by_the_rows_of_the_rank(name: str) -> None:
    alone, graph = of_ranks(name, Precision.FP32)
    assert graph.ranks is not None and graph.ranks.share == pytest.approx(1 / 3)

    def weights(step: TrainingGraph) -> list[list[float]]:
        """Return the weights of the losses in their sum, and the weights of gradients in the backward pass."""
        summed = [
            weight for op in step.train if isinstance(op.attributes, WeightedSum) for weight in op.attributes.weights
        ]
        back = {
            op.attributes.weight
            for op in step.train
            if isinstance(op.attributes, CrossEntropyBackward | PlainLossBackward)
        }
        return [sorted(summed or [1.0]), sorted(back)]

    thirds = [[weight / 3 for weight in each] for each in weights(alone)]
    assert len(thirds[0]) == len(thirds[1]) == len(NETWORKS[name]().losses)
    for actual, wanted in zip(weights(graph), map(sorted, thirds), strict=True):
        assert actual == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_states_and_inference_are_those_of_one_gpu(precision: Precision) -> None:
    alone, graph = of_ranks("residual_two_losses", precision)
    assert graph.states == alone.states and graph.infer == alone.infer and graph.outputs == alone.outputs
    assert [state for state, _ in graph.updates] == [state for state, _ in alone.updates]
    roles = {name: value for name, value in graph.values.items() if value.role is not Role.INTERMEDIATE}
    assert roles == {name: value for name, value in alone.values.items() if value.role is not Role.INTERMEDIATE}

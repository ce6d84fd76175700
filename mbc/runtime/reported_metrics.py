"""Metrics that a step reports beside its loss, as users see them."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph
from mbc.ir.metrics import measured_by, name_of

ACCURACY = "accuracy"


def judged_rows(graph: TrainingGraph) -> dict[str, int]:
    """Return the divisor of each of a step's metrics, by the user's name of the metric, in the order of the step.

    `accuracy` belongs to the first loss in the source that classifies, `accuracy_2` to the second, and so on. Their
    divisor is the number of rows (positions, in segmentation) that all ranks together judge. A metric that the source
    names is a value for each mini-batch: its divisor is the number of mini-batches of a step. All divisors count all
    mini-batches of the step together.
    """
    divisors: dict[str, int] = {}
    for number, metric in enumerate(graph.metrics, 1):
        named = name_of(metric)
        if named is not None:
            divisors[named] = graph.optimizer.accumulate
            continue
        operation = measured_by(graph, metric)
        name = ACCURACY if number == 1 else f"{ACCURACY}_{number}"
        logits = graph.values[operation.inputs[0]].type
        judged = logits.elements // logits.shape[1] * graph.optimizer.accumulate
        divisors[name] = judged if graph.ranks is None else judged // graph.batch * graph.ranks.batch
    return divisors


def named_metrics(graph: TrainingGraph) -> tuple[str, ...]:
    """Return the metrics that the source names, in its order."""
    return tuple(name for name in map(name_of, graph.metrics) if name is not None)

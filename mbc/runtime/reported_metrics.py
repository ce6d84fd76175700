"""What a step reports beside its loss, as users see it."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph
from mbc.ir.metrics import measured_by, name_of

ACCURACY = "accuracy"


def judged_rows(graph: TrainingGraph) -> dict[str, int]:
    """By what users call the metrics of a step, in their order, what each is divided by. Of `accuracy`, of the first
    loss in the source that classifies, `accuracy_2` of the second, and so on, it is how many rows (positions, in
    segmentation) all ranks together judge; a metric that the source names is its value as it is: 1; in all
    mini-batches of the step together."""
    found: dict[str, int] = {}
    for number, metric in enumerate(graph.metrics, 1):
        named = name_of(metric)
        if named is not None:
            found[named] = graph.optimizer.accumulate
            continue
        operation = measured_by(graph, metric)
        name = ACCURACY if number == 1 else f"{ACCURACY}_{number}"
        logits = graph.values[operation.inputs[0]].type
        judged = logits.elements // logits.shape[1] * graph.optimizer.accumulate
        found[name] = judged if graph.ranks is None else judged // graph.batch * graph.ranks.batch
    return found


def named_metrics(graph: TrainingGraph) -> tuple[str, ...]:
    """The metrics that the source names, in its order."""
    return tuple(name for name in map(name_of, graph.metrics) if name is not None)

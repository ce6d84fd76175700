"""What a step reports beside its loss, as users see it."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph


def judged_rows(graph: TrainingGraph) -> dict[str, int]:
    """How many rows (positions, in segmentation) the metrics of a step judge, those of all ranks together, by what
    users call them: `accuracy` for the first loss in the source that classifies, `accuracy_2` for the second, and so
    on."""
    found: dict[str, int] = {}
    for number, metric in enumerate(graph.metrics, 1):
        operation = next(operation for operation in graph.train if metric in operation.outputs)
        if operation.kind == "all_reduce":
            operation = next(other for other in graph.train if operation.inputs[0] in other.outputs)
        name = "accuracy" if number == 1 else f"accuracy_{number}"
        logits = graph.values[operation.inputs[0]].type
        judged = logits.elements // logits.shape[1]
        found[name] = judged if graph.ranks is None else judged // graph.batch * graph.ranks.batch
    return found

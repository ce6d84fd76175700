"""What a step reports beside its loss, as users see it."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph


def judged_rows(graph: TrainingGraph) -> dict[str, int]:
    """How many rows (positions, in segmentation) the metrics of a step judge, by what users call them: `accuracy` for
    the first loss in the source that classifies, `accuracy_2` for the second, and so on."""
    found: dict[str, int] = {}
    for number, metric in enumerate(graph.metrics, 1):
        operation = next(operation for operation in graph.train if metric in operation.outputs)
        name = "accuracy" if number == 1 else f"accuracy_{number}"
        found[name] = graph.values[operation.inputs[1]].type.elements
    return found

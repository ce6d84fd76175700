"""The metrics of a source: how a step reports them, besides the number of rows that it classifies correctly."""

from __future__ import annotations

from mbc.ir.graph import Operation, Role, TrainingGraph

# Names of figures that every training reports, in the log and on the terminal.
_RESERVED = frozenset(
    (
        "loss", "accuracy", "kind", "step", "epoch", "waited_s", "learning_rate", "images_per_s", "seconds",
        "bad_steps",
    )
)  # fmt: skip
_VALUE = "metric."
# Metrics of `train { noise_scale = true }`; no metric of a source can have such a name. The parts of a step are the
# mini-batches of its ranks. Mean of the squared norms of the parts' gradients; squared norm of their mean.
PART_SQUARE, MEAN_SQUARE = "noise.part_square", "noise.mean_square"
_SUMS = ("sum.", "copy.", "accumulated.")  # prefixes of sums over ranks and over mini-batches, and of a copy
_SUMMED = {"all_reduce": 0, "scale": 0, "accumulate": 1}  # by kind of operation, the operand that it sums or copies


def is_reserved(name: str) -> bool:
    """Return whether a metric of this name would be mistaken for another figure.

    `accuracy_2` is the accuracy of the second loss, `test_…` are figures of the test data.
    """
    return name in _RESERVED or name.startswith(("accuracy_", "test_"))


def value_of(name: str) -> str:
    """Return the value of a training graph that holds a metric. No layer has its name: `metric` is a keyword."""
    return f"{_VALUE}{name}"


def name_of(value: str) -> str | None:
    """Return the name that the source gives to a value of `TrainingGraph.metrics`; None if the value counts rows."""
    for prefix in _SUMS:
        value = value.removeprefix(prefix)
    return value.removeprefix(_VALUE) if value.startswith(_VALUE) else None


def measured_by(graph: TrainingGraph, value: str) -> Operation:
    """Return the operation that computes a value of `TrainingGraph.metrics` for one mini-batch of one rank."""
    return measured(graph, value)[1]


def measured(graph: TrainingGraph, value: str) -> tuple[str, Operation]:
    """Return the value that a value of `TrainingGraph.metrics` sums over ranks and mini-batches, and its operation.

    Raises:
        KeyError: No operation computes `value`.
    """
    makers = {output: op for op in graph.train for output in op.outputs}
    op = makers[value]
    while op.kind in _SUMMED:
        value = op.inputs[_SUMMED[op.kind]]
        op = makers[value]
    return value, op


def is_metric(graph: TrainingGraph, value: str) -> bool:
    """Return whether a value is a number that a step may report: a count of rows, or a metric of the source."""
    type_ = graph.values[value].type
    try:
        summed, op = measured(graph, value)
    except KeyError:
        return False
    if type_.shape != (1,) or graph.values[value].role is not Role.INTERMEDIATE:
        return False
    if name_of(value) is not None:
        return op.kind == "weighted_sum"
    return summed in op.outputs[1:] and len(graph.values[op.inputs[0]].type.shape) > 1

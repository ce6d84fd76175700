"""How a step reports the metrics that a source names, beside the rows that it classifies correctly."""

from __future__ import annotations

from mbc.ir.graph import Operation, Role, TrainingGraph

# What trainings report of themselves, in the log and in their lines.
_RESERVED = frozenset(
    (
        "loss", "accuracy", "kind", "step", "epoch", "waited_s", "learning_rate", "images_per_s", "seconds",
        "bad_steps",
    )
)  # fmt: skip
_VALUE = "metric."
# Of `train { noise_scale = true }`; no metric of a source can be called so. The mean of the squared norms of the
# gradients of the parts of a step (each mini-batch of each rank), and the squared norm of the mean of these gradients.
PART_SQUARE, MEAN_SQUARE = "noise.part_square", "noise.mean_square"
_SUMS = ("sum.", "copy.", "accumulated.")  # over ranks, and over mini-batches, in a state that is copied for it
_SUMMED = {"all_reduce": 0, "scale": 0, "accumulate": 1}  # by kind of operation, the operand that it sums, or copies


def is_reserved(name: str) -> bool:
    """Whether a metric of this name would be taken for another figure: `accuracy_2` is of the second loss, `test_…` of
    the test data."""
    return name in _RESERVED or name.startswith(("accuracy_", "test_"))


def value_of(name: str) -> str:
    """The value of a training graph that holds a metric; no layer can be called so, since `metric` is a word."""
    return f"{_VALUE}{name}"


def name_of(value: str) -> str | None:
    """What the source calls a value of `TrainingGraph.metrics`; None for one that counts rows."""
    for prefix in _SUMS:
        value = value.removeprefix(prefix)
    return value.removeprefix(_VALUE) if value.startswith(_VALUE) else None


def measured_by(graph: TrainingGraph, value: str) -> Operation:
    """The operation that computes a value of `TrainingGraph.metrics` for one mini-batch of one rank."""
    return measured(graph, value)[1]


def measured(graph: TrainingGraph, value: str) -> tuple[str, Operation]:
    """Return what a value of `TrainingGraph.metrics` sums over ranks and mini-batches, and the operation that makes
    that. KeyError where no operation does."""
    made = {output: op for op in graph.train for output in op.outputs}
    op = made[value]
    while op.kind in _SUMMED:
        value = op.inputs[_SUMMED[op.kind]]
        op = made[value]
    return value, op


def is_metric(graph: TrainingGraph, value: str) -> bool:
    """Whether a value is a number that a step may report: of rows that a loss counts, or of a metric of the source."""
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

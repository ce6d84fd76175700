"""The output and the input that give a network's accuracy, and the inputs of a network as data sources see them."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.runtime.arrays import classes_of, ignored_of
from mbc.train.inputs import Input


def inputs_of(graph: TrainingGraph) -> tuple[Input, ...]:
    """Return the inputs of a step as data sources see them."""
    return tuple(
        Input(name, graph.values[name].type, classes_of(graph, name), ignored_of(graph, name)) for name in graph.inputs
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """The output and the input whose comparison gives the network's accuracy."""

    output: int  # index into the inference outputs
    target: int  # index into the inputs: class numbers, or probabilities of classes


def judged(graph: TrainingGraph) -> Judged | None:
    """Return the first classified output whose target is an input; None if there is none."""
    for operation in graph.train:
        if KINDS[operation.kind].classifies:
            logits, target = operation.inputs[0], source_of(graph, operation.inputs[1])
            if logits in graph.outputs and target in graph.inputs:
                return Judged(graph.outputs.index(logits), graph.inputs.index(target))
    return None


def source_of(graph: TrainingGraph, value: str) -> str:
    """Return the input of which a value is a working copy, or the value itself if it is no copy."""
    casts = {op.outputs[0]: op.inputs[0] for op in graph.train if op.kind == "cast"}
    return casts.get(value, value)

"""How often a network is right on data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.runtime.arrays import classes_of
from mbc.train.data import Data
from mbc.train.inputs import Input, converted

Array = NDArray[Any]


class Predicts(Protocol):
    """What can be tested."""

    def forward(self, *inputs: Array) -> Any: ...


def inputs_of(graph: TrainingGraph) -> tuple[Input, ...]:
    """The inputs of a step, as data sources see them."""
    return tuple(Input(name, graph.values[name].type, classes_of(graph, name)) for name in graph.inputs)


@dataclass(frozen=True, slots=True)
class Judged:
    """Which output is compared with which input to tell how often the network is right."""

    output: int  # index into the inference outputs
    target: int  # index into the inputs


def judged(graph: TrainingGraph) -> Judged | None:
    """The first classified output whose target is an input; None when there is none."""
    for operation in graph.train:
        if KINDS[operation.kind].classifies:
            logits, target = operation.inputs[:2]
            if logits in graph.outputs and target in graph.inputs:
                return Judged(graph.outputs.index(logits), graph.inputs.index(target))
    return None


def accuracy_on(net: Predicts, graph: TrainingGraph, data: Data) -> float | None:
    """Share of rows (of positions, in segmentation) whose largest logit is the target's, over all of `data`."""
    which = judged(graph)
    if which is None:
        return None
    fed = [graph.inputs.index(name) for name in graph.infer_inputs]
    right = total = 0
    inputs = inputs_of(graph)
    for rows in data.in_order(graph.batch):
        batch = converted(rows, inputs)
        outputs = net.forward(*(batch[i] for i in fed))
        logits = np.asarray(cast("Sequence[Any]", outputs)[which.output] if isinstance(outputs, tuple) else outputs)
        target = batch[which.target]
        right += int(np.count_nonzero(np.argmax(logits, axis=1) == target))
        total += target.size
    return right / total if total else None

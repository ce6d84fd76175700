"""How often a network is right on data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.runtime.arrays import classes_of, ignored_of
from mbc.train.data import Data
from mbc.train.inputs import Input, converted
from mbc.train.share import Group, share_of

Array = NDArray[Any]

_COUNTS = struct.Struct("<qq")  # right ones, of all


class Predicts(Protocol):
    """What can be tested."""

    def forward(self, *inputs: Array) -> Any: ...


def inputs_of(graph: TrainingGraph) -> tuple[Input, ...]:
    """The inputs of a step, as data sources see them."""
    return tuple(
        Input(name, graph.values[name].type, classes_of(graph, name), ignored_of(graph, name)) for name in graph.inputs
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """Which output is compared with which input to tell how often the network is right."""

    output: int  # index into the inference outputs
    target: int  # index into the inputs: class numbers, or probabilities of classes


def judged(graph: TrainingGraph) -> Judged | None:
    """The first classified output whose target is an input; None when there is none."""
    for operation in graph.train:
        if KINDS[operation.kind].classifies:
            logits, target = operation.inputs[0], _source(graph, operation.inputs[1])
            if logits in graph.outputs and target in graph.inputs:
                return Judged(graph.outputs.index(logits), graph.inputs.index(target))
    return None


def _source(graph: TrainingGraph, value: str) -> str:
    """The input that a value is, or is a working copy of."""
    casts = {op.outputs[0]: op.inputs[0] for op in graph.train if op.kind == "cast"}
    return casts.get(value, value)


def accuracy_on(net: Predicts, graph: TrainingGraph, data: Data, group: Group | None = None) -> float | None:
    """Share of rows (of positions, in segmentation) whose largest logit is the target's, over all of `data` but what
    the loss ignores. Of several ranks, which then have the same states, each tests a part of the rows."""
    which = judged(graph)
    if which is None:
        return None
    fed = [graph.inputs.index(name) for name in graph.infer_inputs]
    right = total = 0
    inputs = inputs_of(graph)
    for rows in data.in_order(share_of(graph, 0 if group is None else group.rank)):
        batch = converted(rows, inputs)
        outputs = net.forward(*(batch[i] for i in fed))
        logits = np.asarray(cast("Sequence[Any]", outputs)[which.output] if isinstance(outputs, tuple) else outputs)
        target = batch[which.target]
        classes = np.argmax(target, axis=1) if target.ndim == logits.ndim else target
        counts = ~np.isin(classes, inputs[which.target].ignored)
        right += int(np.count_nonzero((np.argmax(logits, axis=1) == classes) & counts))
        total += int(np.count_nonzero(counts))
    if group is not None:
        counts = [_COUNTS.unpack(one) for one in group.gather(_COUNTS.pack(right, total))]
        right, total = (sum(count) for count in zip(*counts, strict=True))
    return right / total if total else None

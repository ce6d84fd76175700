"""What a network is worth on test data: how often it is right, and the metrics of the source."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.metrics import measured_by, name_of
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.loss import WeightedSum
from mbc.train.accuracy import inputs_of, judged, source_of
from mbc.train.data import Data
from mbc.train.inputs import converted
from mbc.train.share import Group, share_of

Array = NDArray[Any]


class Predicts(Protocol):
    """What can be tested."""

    def forward(self, *inputs: Array) -> Any: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`accuracy` is None where the network does not classify; `metrics` are those that outputs and inputs tell."""

    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of the source: operations on outputs and inputs, each with its weight. All are means over rows."""

    name: str
    terms: tuple[tuple[Operation, float], ...]


def measures(graph: TrainingGraph) -> tuple[Measure, ...]:
    """The metrics that are known from outputs and inputs alone: others exist within a training step only."""
    made = {output: op for op in graph.train for output in op.outputs}
    known = {*graph.outputs, *graph.inputs}
    share = 1.0 if graph.ranks is None else graph.ranks.share
    found: list[Measure] = []
    for value in graph.metrics:
        name = name_of(value)
        if name is None:
            continue
        total = measured_by(graph, value)
        assert isinstance(total.attributes, WeightedSum)
        operations = [made[operand] for operand in total.inputs]
        if all(source_of(graph, operand) in known for op in operations for operand in op.inputs):
            weights = (weight / share for weight in total.attributes.weights)
            found.append(Measure(name, tuple(zip(operations, weights, strict=True))))
    return tuple(found)


def evaluate_on(net: Predicts, graph: TrainingGraph, data: Data, group: Group | None = None) -> Evaluation:
    """Over all of `data`; of the accuracy without what the loss ignores. Of several ranks, which then have the same
    states, each tests a part of the rows."""
    which, measured = judged(graph), measures(graph)
    if which is None and not measured:
        return Evaluation()
    fed = [graph.inputs.index(name) for name in graph.infer_inputs]
    inputs = inputs_of(graph)
    right = total = rows = 0
    sums = np.zeros(len(measured))
    for part in data.in_order(share_of(graph, 0 if group is None else group.rank)):
        batch = converted(part, inputs)
        made = net.forward(*(batch[i] for i in fed))
        outputs = cast("Sequence[Any]", made) if isinstance(made, tuple) else (made,)
        values = dict(zip(graph.outputs, map(np.asarray, outputs), strict=True)) | dict(
            zip(graph.inputs, batch, strict=True)
        )
        rows += len(batch[0])
        sums += [len(batch[0]) * _value(graph, measure, values) for measure in measured]
        if which is not None:
            logits, target = values[graph.outputs[which.output]], batch[which.target]
            classes = np.argmax(target, axis=1) if target.ndim == logits.ndim else target
            counts = ~np.isin(classes, inputs[which.target].ignored)
            right += int(np.count_nonzero((np.argmax(logits, axis=1) == classes) & counts))
            total += int(np.count_nonzero(counts))
    if group is not None:
        form = struct.Struct(f"<qqq{len(measured)}d")
        told = [form.unpack(one) for one in group.gather(form.pack(right, total, rows, *sums))]
        right, total, rows, *sums = (sum(column) for column in zip(*told, strict=True))
    means = {measure.name: float(s) / rows for measure, s in zip(measured, sums, strict=True)} if rows else {}
    return Evaluation(right / total if total else None, means)


def _value(graph: TrainingGraph, measure: Measure, values: Mapping[str, Array]) -> float:
    found = 0.0
    for op, weight in measure.terms:
        kind = KINDS[op.kind]
        assert kind.evaluate is not None
        operands = [values[source_of(graph, operand)] for operand in op.inputs]
        types = tuple(graph.values[output].type for output in op.outputs)
        result, *_ = kind.evaluate(op.attributes, operands, Call(types, 0, len(operands[0]), Precision.FP32))
        found += weight * float(result[0])
    return found

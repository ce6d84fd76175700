"""What a network is worth on test data: how often it is right, and the metrics of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.metrics import measured_by, name_of
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.loss import WeightedSum
from mbc.ops.mean_iou import OVERLAP_MEAN
from mbc.ops.top_k import TopKMean
from mbc.ops.weighted_cross_entropy import WeightedMean
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
    """A metric of the source: operations on outputs and inputs, each with its weight."""

    name: str
    terms: tuple[tuple[Operation, float], ...]


def named_terms(graph: TrainingGraph) -> dict[str, tuple[tuple[Operation, float], ...]]:
    """The metrics of the source by name: the operations that each is a sum of, and what they are multiplied by."""
    made = {output: op for op in graph.train for output in op.outputs}
    share = 1.0 if graph.ranks is None else graph.ranks.share
    found: dict[str, tuple[tuple[Operation, float], ...]] = {}
    for value in graph.metrics:
        name = name_of(value)
        if name is None:
            continue
        total = measured_by(graph, value)
        assert isinstance(total.attributes, WeightedSum)
        weights = (weight / share for weight in total.attributes.weights)
        found[name] = tuple(zip((made[operand] for operand in total.inputs), weights, strict=True))
    return found


def measures(graph: TrainingGraph) -> tuple[Measure, ...]:
    """The metrics that are known from outputs and inputs alone: others exist within a training step only."""
    told = _Told(graph)
    known = (Measure(name, terms) for name, terms in named_terms(graph).items())
    return tuple(measure for measure in known if all(told.is_known(op) for op, _ in measure.terms))


class _Told:
    """What operations on outputs and inputs say of rows, as numbers that can be added up over parts of them: a mean
    times its weight, and that weight; of an intersection over union its counts."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph
        self._known = {*graph.outputs, *graph.inputs}
        self._made = {output: op for op in graph.train for output in op.outputs}

    def is_known(self, op: Operation) -> bool:
        return all(self._source(v) in self._known or self._counts(v) is not None for v in op.inputs)

    def of(self, op: Operation, values: Mapping[str, Array]) -> Array:
        counts = {v: self._counts(v) for v in op.inputs}
        given = {v: self._run(made, values, {}) for v, made in counts.items() if made is not None}
        if op.kind == OVERLAP_MEAN:
            return np.ravel(given[op.inputs[0]])
        weighted = isinstance(op.attributes, WeightedMean | TopKMean)
        weight = float(given[op.inputs[2]][0]) if weighted else len(values[self._graph.outputs[0]])
        # Where no position counts the value is NaN, and counts nothing.
        value = float(self._run(op, values, given)[0]) if weight else 0.0
        return np.array([value * weight, weight])

    def value(self, op: Operation, told: Array) -> float:
        """Of all rows, which `told` is the sum of."""
        if op.kind == OVERLAP_MEAN:
            return float(self._run(op, {}, {op.inputs[0]: told.reshape(2, -1)})[0])
        return float(told[0] / told[1]) if told[1] else np.nan

    def width(self, op: Operation) -> int:
        return self._graph.values[op.inputs[0]].type.elements if op.kind == OVERLAP_MEAN else 2

    def _source(self, value: str) -> str:
        return source_of(self._graph, value)

    def _counts(self, value: str) -> Operation | None:
        """The operation that counts positions of these rows, if `value` is such a count, of all ranks or of one."""
        op = self._made.get(value)
        while op is not None and op.kind in ("sum_gathered", "all_gather"):
            op = self._made.get(op.inputs[0])
        if op is None or op.kind not in ("class_weight_sum", "class_overlap", "dice_sums"):
            return None
        return op if all(self._source(v) in self._known for v in op.inputs) else None

    def _run(self, op: Operation, values: Mapping[str, Array], given: Mapping[str, Array]) -> Array:
        """Its first output. These rows are all that there are: no other rank has a share."""
        kind, a = KINDS[op.kind], op.attributes
        assert kind.evaluate is not None
        a = replace(a, share=1.0) if isinstance(a, WeightedMean | TopKMean) else a
        operands = [given[v] if v in given else values[self._source(v)] for v in op.inputs]
        types = tuple(self._graph.values[output].type for output in op.outputs)
        return kind.evaluate(a, operands, Call(types, 0, len(operands[0]), Precision.FP32))[0]


def evaluate_on(net: Predicts, graph: TrainingGraph, data: Data, group: Group | None = None) -> Evaluation:
    """Over all of `data`; of the accuracy without what the loss ignores. Of several ranks, which then have the same
    states, each tests a part of the rows."""
    which, measured = judged(graph), measures(graph)
    if which is None and not measured:
        return Evaluation()
    fed = [graph.inputs.index(name) for name in graph.infer_inputs]
    inputs = inputs_of(graph)
    right = total = rows = 0
    told = _Told(graph)
    terms = [op for measure in measured for op, _ in measure.terms]
    sums = [np.zeros(told.width(op)) for op in terms]
    for part in data.in_order(share_of(graph, 0 if group is None else group.rank)):
        batch = converted(part, inputs)
        made = net.forward(*(batch[i] for i in fed))
        outputs = cast("Sequence[Any]", made) if isinstance(made, tuple) else (made,)
        values = dict(zip(graph.outputs, map(np.asarray, outputs), strict=True)) | dict(
            zip(graph.inputs, batch, strict=True)
        )
        rows += len(batch[0])
        sums = [total + told.of(op, values) for total, op in zip(sums, terms, strict=True)]
        if which is not None:
            logits, target = values[graph.outputs[which.output]], batch[which.target]
            classes = np.argmax(target, axis=1) if target.ndim == logits.ndim else target
            counts = ~np.isin(classes, inputs[which.target].ignored)
            right += int(np.count_nonzero((np.argmax(logits, axis=1) == classes) & counts))
            total += int(np.count_nonzero(counts))
    if group is not None:
        flat = np.concatenate([np.array([right, total, rows]), *sums]).astype("<f8")
        gathered = [np.frombuffer(one, "<f8") for one in group.gather(flat.tobytes())]
        (right, total, rows), *sums = np.split(
            np.sum(gathered, axis=0), np.cumsum([3, *(len(one) for one in sums)])[:-1]
        )
    if not rows:
        return Evaluation(None, {})
    found = iter(told.value(op, total) for op, total in zip(terms, sums, strict=True))
    means = {measure.name: sum(weight * next(found) for _, weight in measure.terms) for measure in measured}
    return Evaluation(right / total if total else None, means)

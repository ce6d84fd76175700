"""Metrics of a network on test data: its accuracy, and the metrics of the source."""

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
from mbc.ops.dice import Dice, loss_of_parts, sums_of_part
from mbc.ops.loss import WeightedSum
from mbc.ops.mean_iou import OVERLAP_MEAN
from mbc.ops.top_k import TopKMean
from mbc.ops.weighted_cross_entropy import WeightedMean
from mbc.train.accuracy import inputs_of, judged, source_of
from mbc.train.data import Data
from mbc.train.inputs import Input, converted
from mbc.train.share import Group, share_of

Array = NDArray[Any]


class Predicts(Protocol):
    """An object that computes outputs, to be tested."""

    def forward(self, *inputs: Array) -> Any:
        """Return the output, or a tuple of outputs."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of a test.

    Attributes:
        accuracy: Share of rows that were classified correctly; None if the network does not classify.
        metrics: Metrics of the source that depend on outputs and inputs alone.
    """

    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of the source: operations on outputs and inputs, each with its weight."""

    name: str
    terms: tuple[tuple[Operation, float], ...]


def named_terms(graph: TrainingGraph) -> dict[str, tuple[tuple[Operation, float], ...]]:
    """Return the metrics of the source by name, each as the operations of which it is a sum, with their weights."""
    producers = {output: op for op in graph.train for output in op.outputs}
    share = 1.0 if graph.ranks is None else graph.ranks.share
    terms: dict[str, tuple[tuple[Operation, float], ...]] = {}
    for value in graph.metrics:
        name = name_of(value)
        if name is None:
            continue
        total = measured_by(graph, value)
        assert isinstance(total.attributes, WeightedSum)
        weights = (weight / share for weight in total.attributes.weights)
        terms[name] = tuple(zip((producers[operand] for operand in total.inputs), weights, strict=True))
    return terms


def measures(graph: TrainingGraph) -> tuple[Measure, ...]:
    """Return the metrics that depend on outputs and inputs alone; others exist only within a training step."""
    partial = _Partial(graph)
    metrics = (Measure(name, terms) for name, terms in named_terms(graph).items())
    return tuple(measure for measure in metrics if all(partial.is_available(op) for op, _ in measure.terms))


class _Partial:
    """Partial results of operations on outputs and inputs, as numbers that can be summed over parts of the rows.

    For a mean these numbers are the mean times its weight, and the weight; for an intersection over union its counts.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph
        self._available = {*graph.outputs, *graph.inputs}
        self._producers = {output: op for op in graph.train for output in op.outputs}

    def is_available(self, op: Operation) -> bool:
        return all(self._source(v) in self._available or self._counts(v) is not None for v in op.inputs)

    def of(self, op: Operation, values: Mapping[str, Array]) -> Array:
        counts = {v: self._counts(v) for v in op.inputs}
        given = {v: self._run(count, values, {}) for v, count in counts.items() if count is not None}
        if (a := _with_total(op)) is not None:
            return sums_of_part(a, given[op.inputs[0]])
        if op.kind == OVERLAP_MEAN:
            return np.ravel(given[op.inputs[0]])
        weighted = isinstance(op.attributes, WeightedMean | TopKMean)
        weight = float(given[op.inputs[2]][0]) if weighted else len(values[self._graph.outputs[0]])
        # If no position counts, the value is NaN and must not be added.
        value = float(self._run(op, values, given)[0]) if weight else 0.0
        return np.array([value * weight, weight])

    def value(self, op: Operation, total: Array) -> float:
        """Return an operation's result over all rows from the sum of its partial results."""
        if op.kind == OVERLAP_MEAN:
            return float(self._run(op, {}, {op.inputs[0]: total.reshape(2, -1)})[0])
        if (a := _with_total(op)) is not None:
            return loss_of_parts(a, total)
        return float(total[0] / total[1]) if total[1] else np.nan

    def width(self, op: Operation) -> int:
        sums = self._graph.values[op.inputs[0]].type
        return sums.elements if op.kind == OVERLAP_MEAN else 2 + sums.shape[1] if _with_total(op) else 2

    def _source(self, value: str) -> str:
        return source_of(self._graph, value)

    def _counts(self, value: str) -> Operation | None:
        """Return the operation that counts positions of these rows if `value` is such a count, or None."""
        op = self._producers.get(value)
        while op is not None and op.kind in ("sum_gathered", "all_gather", "channel_sum"):
            op = self._producers.get(op.inputs[0])
        if op is None or op.kind not in ("class_weight_sum", "class_overlap", "dice_sums"):
            return None
        return op if all(self._source(v) in self._available for v in op.inputs) else None

    def _run(self, op: Operation, values: Mapping[str, Array], given: Mapping[str, Array]) -> Array:
        """Return the first output of an operation on these rows, without a share of other ranks."""
        kind, a = KINDS[op.kind], op.attributes
        assert kind.evaluate is not None
        a = replace(a, share=1.0) if isinstance(a, WeightedMean | TopKMean) else a
        operands = [given[v] if v in given else values[self._source(v)] for v in op.inputs]
        types = tuple(self._graph.values[output].type for output in op.outputs)
        return kind.evaluate(a, operands, Call(types, 0, len(operands[0]), Precision.FP32))[0]


def _with_total(op: Operation) -> Dice | None:
    """Return the settings of a loss that is computed from the sums over all images, or None."""
    return op.attributes if isinstance(op.attributes, Dice) and op.attributes.has_total else None


def evaluate_on(net: Predicts, graph: TrainingGraph, data: Data, group: Group | None = None) -> Evaluation:
    """Return the accuracy and the metrics over all of `data`; the accuracy leaves out labels that the loss ignores.

    Several ranks, which then have equal states, test a part of the rows each.

    Args:
        net: The module.
        graph: The network.
        data: The test data.
        group: The ranks; None for one process.
    """
    which, measured = judged(graph), measures(graph)
    if which is None and not measured:
        return Evaluation()
    fed = [graph.inputs.index(name) for name in graph.infer_inputs]
    inputs = inputs_of(graph)
    right = total = rows = 0
    partial = _Partial(graph)
    terms = [op for measure in measured for op, _ in measure.terms]
    sums = [np.zeros(partial.width(op)) for op in terms]
    for part in data.in_order(share_of(graph, 0 if group is None else group.rank)):
        batch = converted(part, inputs)
        result = net.forward(*(batch[i] for i in fed))
        outputs = cast("Sequence[Any]", result) if isinstance(result, tuple) else (result,)
        values = dict(zip(graph.outputs, map(np.asarray, outputs), strict=True)) | dict(
            zip(graph.inputs, batch, strict=True)
        )
        rows += len(batch[0])
        sums = [so_far + partial.of(op, values) for so_far, op in zip(sums, terms, strict=True)]
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
    results = iter(partial.value(op, summed) for op, summed in zip(terms, sums, strict=True))
    means = {measure.name: sum(weight * next(results) for _, weight in measure.terms) for measure in measured}
    return Evaluation(right / total if total else None, means)


def dice_scores(classes: Array, labels: Array, i: Input) -> tuple[float | None, ...]:
    """Return the Dice score of each class over the positions that count; None for a class that neither array has.

    Args:
        classes: Predicted class numbers.
        labels: Class numbers, of the same shape.
        i: The input that labels feed; its ignored classes do not count.
    """
    counts = ~np.isin(labels, i.ignored)
    arrays = (labels[counts & (classes == labels)], classes[counts], labels[counts])
    both, predicted, there = (np.bincount(array, minlength=i.classes or 0) for array in arrays)
    return tuple(float(2 * b / (p + t)) if p + t else None for b, p, t in zip(both, predicted, there, strict=True))


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Return the mean of the scores that exist; None if none does."""
    there = [score for score in scores if score is not None]
    return sum(there) / len(there) if there else None

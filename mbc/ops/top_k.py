"""Top-k accuracy: a metric, not a loss.

If a class number is left out, the share is over the positions that count (of all ranks). Their number is an operation
of its own, as in a cross entropy with `ignore_index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.collective import over_all_ranks
from mbc.ops.loss import check_classes, positions
from mbc.ops.weighted_cross_entropy import IGNORE_INDEX, ClassWeights, ignored_by


@dataclass(frozen=True, slots=True)
class TopK(Attributes):
    """Settings of the metric. `k`: the number of largest logits among which the target must be."""

    k: int


@dataclass(frozen=True, slots=True)
class CountedTopK(Attributes):
    """Settings of the metric with a class number that is left out, `ignored`."""

    k: int
    ignored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopKMean(Attributes):
    """Settings of the mean, as in `CountedTopK`. `share`: the share of the global mini-batch that this rank has."""

    k: int
    ignored: tuple[int, ...]
    share: float


def _shape(a: TopK | CountedTopK | TopKMean, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    if not 1 <= a.k <= logits.shape[1]:
        raise ShapeError(f"k is {a.k}, but must be from 1 to {logits.shape[1]}, the number of classes")
    return (TensorType((1,), master(logits.dtype)),)


def _mean_shape(a: TopKMean, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, sums = inputs
    if sums != TensorType((2,), master(logits.dtype)):
        raise ShapeError(f"the weights and the number of positions that count are two numbers, but are {sums}")
    return _shape(a, (logits, target))


def _right(a: TopK | TopKMean, logits: Array, target: Array) -> Array:
    """Return which positions are right.

    The first of equal logits is the largest. NaN counts as greater than every number, so a target whose logit is NaN is
    wrong.
    """
    classes = logits.shape[1]
    own = np.take_along_axis(logits, np.clip(target, 0, classes - 1)[:, None], 1)
    numbers: Array = np.arange(classes, dtype=np.int32).reshape(1, classes, *(1,) * (logits.ndim - 2))
    before = ~(logits <= own) | ((logits == own) & (numbers < target[:, None]))
    return (before.sum(axis=1) < a.k) & (target >= 0) & (target < classes) & ~np.isnan(own[:, 0])


def _evaluate(a: TopK, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    return (np.array([_right(a, logits, target).sum() / positions(logits, call)], logits.dtype),)


def _mean(a: TopKMean, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, sums = inputs
    right = _right(a, logits, target) & ~np.isin(target, a.ignored)
    with np.errstate(invalid="ignore", divide="ignore"):  # where no position counts
        return (np.array([right.sum() / (sums[1].astype(np.float64) * a.share)], logits.dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a, (logits, target) = op.attributes, op.inputs
    assert isinstance(a, CountedTopK)
    kind, name = e.type(logits), f"{op.outputs[0]}.counted"
    counted = ClassWeights(kind.shape[1], (), a.ignored, master(kind.dtype).value)
    sums = over_all_ranks(e, "class_weight_sum", counted, (target,), name)
    mean = TopKMean(a.k, a.ignored, 1.0 if e.ranks is None else e.ranks.share)
    return e.emit("top_k_mean", mean, (logits, target, sums), op.outputs, op.name)


OPS = (
    OpKind("top_k", TopK, _shape, _evaluate, reduces=True),
    OpKind("counted_top_k", CountedTopK, _shape, expand=_expand, reduces=True),
    OpKind("top_k_mean", TopKMean, _mean_shape, _mean, reduces=True),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    ignored = ignored_by(settings)
    if ignored:
        return builder.emit("counted_top_k", CountedTopK(settings["k"], ignored), inputs)[0]
    return builder.emit("top_k", TopK(settings["k"]), inputs)[0]


LAYERS = (
    Layer(
        "top_k",
        (Parameter("k", "int", 5), IGNORE_INDEX),
        _build,
        (2, 2),
        "(logits, target) |> top_k: share of rows and positions whose target is among the k largest logits. Positions "
        "whose target is ignore_index do not count. A metric.",
        metric=True,
    ),
)

"""Softmax cross entropy with a weight for each class, in which positions of one class number may be left out.

As in PyTorch the mean is weighted: the losses of all positions that count, each times the weight of its class, are
summed and divided by the sum of these weights. The sum of weights is an operation of its own, of targets alone. With
several ranks it is the sum of the whole mini-batch, so that N GPUs compute the result of one. If no position counts,
the loss is NaN, and `guard` skips the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, OpKind, Parameter, ShapeError, master
from mbc.ops.collective import over_all_ranks
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.loss import check_classes, log_softmax, positions
from mbc.ops.soft_cross_entropy import cross_entropies

NONE = "none"
IGNORE_INDEX = Parameter("ignore_index", "index", NONE, (NONE,))  # for layers that take class numbers
MOST_WEIGHTS = 256  # weights that fit a kernel's arguments, as in cross_entropy_targets.cu


@dataclass(frozen=True, slots=True)
class WeightedCrossEntropy(Attributes):
    """Settings of the loss.

    Attributes:
        smoothing: The share of the target that is spread evenly over all classes.
        class_weights: The weight of each class; empty: all are 1.
        ignored: Class numbers that are left out, at most one.
    """

    smoothing: float
    class_weights: tuple[float, ...]
    ignored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassWeights(Attributes):
    """Settings of the sum of weights, as in `WeightedCrossEntropy`. `sums`: the type of the sum, fp32 or fp64."""

    classes: int
    class_weights: tuple[float, ...]
    ignored: tuple[int, ...]
    sums: str


@dataclass(frozen=True, slots=True)
class WeightedMean(Attributes):
    """Settings of the mean, as in `WeightedCrossEntropy`.

    `share` is the share of the global mini-batch that this rank has.
    """

    smoothing: float
    class_weights: tuple[float, ...]
    ignored: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class WeightedMeanBackward(Attributes):
    """Settings of the mean's gradient; `weight` is that of this loss in the total."""

    smoothing: float
    class_weights: tuple[float, ...]
    ignored: tuple[int, ...]
    share: float
    weight: float


def ignored_by(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the class numbers that the setting `ignore_index` leaves out, at most one."""
    return () if settings["ignore_index"] == NONE else (settings["ignore_index"],)


Weighted = WeightedCrossEntropy | ClassWeights | WeightedMean | WeightedMeanBackward


def _check(a: Weighted, classes: int) -> None:
    if a.class_weights and len(a.class_weights) != classes:
        raise ShapeError(f"class_weights has {len(a.class_weights)} weights, but there are {classes} classes")
    if len(a.class_weights) > MOST_WEIGHTS:
        raise ShapeError(f"class_weights has {len(a.class_weights)} weights, but at most {MOST_WEIGHTS} are possible")
    if len(a.ignored) > 1 or any(not 0 <= w < np.inf for w in a.class_weights):
        raise ShapeError(f"class_weights must be finite and at least 0, but are {a.class_weights}")
    if a.class_weights and not any(a.class_weights):
        raise ShapeError("class_weights are all 0, so that the loss is always 0")


def _shape(a: WeightedCrossEntropy, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    _check(a, logits.shape[1])
    scalar = TensorType((1,), master(logits.dtype))
    return scalar, scalar


def _sums_shape(a: ClassWeights, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (target,) = inputs
    if target.dtype is not DType.INT32:
        raise ShapeError(f"class numbers are int32, but are {target}")
    _check(a, a.classes)
    return (TensorType((2,), DType(a.sums)),)


def _mean_shape(a: WeightedMean, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, sums = inputs
    check_classes(logits, target)
    _check(a, logits.shape[1])
    if sums != TensorType((2,), master(logits.dtype)):
        raise ShapeError(f"the weights and the number of positions that count are two numbers, but are {sums}")
    scalar = TensorType((1,), master(logits.dtype))
    return scalar, scalar


def _backward_shape(a: WeightedMeanBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, sums, control = inputs
    _mean_shape(WeightedMean(a.smoothing, a.class_weights, a.ignored, a.share), (logits, target, sums))
    control_shape(control)
    return (logits,)


def _counted(a: Weighted, target: Array, classes: int) -> tuple[Array, Array]:
    """Return which positions count, and which positions count or are left out."""
    counts = (target >= 0) & (target < classes)
    left_out = np.isin(target, a.ignored)
    return counts & ~left_out, counts | left_out


def _weights(a: Weighted, classes: int) -> Array:
    return np.array(a.class_weights or (1.0,) * classes)


def _sums(a: ClassWeights, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (target,) = inputs
    counts, _ = _counted(a, target, a.classes)
    weights = _weights(a, a.classes)[target[counts]]
    return (np.array([weights.sum(), weights.size], np.float64 if a.sums == "fp64" else np.float32),)


def _shares(a: Weighted, logits: Array, target: Array, smoothing: float) -> Array:
    """Return the weight of each class in the loss of each position, [N, C, ...]; 0 for positions that do not count."""
    classes = logits.shape[1]
    across = (1, classes, *(1,) * (logits.ndim - 2))
    weights = _weights(a, classes).reshape(across)
    numbers: Array = np.arange(classes, dtype=np.int32).reshape(across)
    hot: Array = numbers == target[:, None]
    shares: Array = weights * ((1 - smoothing) * hot + smoothing / classes)
    return np.where(_counted(a, target, classes)[0][:, None], shares, 0)


def _evaluate(a: WeightedMean, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, sums = inputs
    counts, valid = _counted(a, target, logits.shape[1])
    losses = np.where(valid, cross_entropies(log_softmax(logits), _shares(a, logits, target, a.smoothing)), np.nan)
    correct = (counts & (logits.argmax(axis=1) == target)).sum()
    with np.errstate(invalid="ignore", divide="ignore"):  # where no position counts
        mean = losses.sum() / (sums[0].astype(np.float64) * a.share)
        judged = correct * positions(logits, call) / (sums[1].astype(np.float64) * a.share)
    return np.array([mean], logits.dtype), np.array([judged], logits.dtype)


def _backward(a: WeightedMeanBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, sums, control = inputs
    shares = _shares(a, logits, target, a.smoothing)
    gradient = np.exp(log_softmax(logits)) * shares.sum(axis=1, keepdims=True) - shares
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = a.weight * float(control_record(control)["loss_scale"]) / (sums[0].astype(np.float64) * a.share)
        gradient = np.where(_counted(a, target, logits.shape[1])[0][:, None], gradient * factor, 0)
    return (gradient.astype(logits.dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    assert isinstance(a, WeightedCrossEntropy)
    logits, target = op.inputs
    loss, kind = op.outputs[0], e.type(logits)
    name, share = f"{loss}.class_weights", 1.0 if e.ranks is None else e.ranks.share
    weights = ClassWeights(kind.shape[1], a.class_weights, a.ignored, master(kind.dtype).value)
    sums = over_all_ranks(e, "class_weight_sum", weights, (target,), name)
    mean = WeightedMean(a.smoothing, a.class_weights, a.ignored, share)
    return e.emit("weighted_cross_entropy_mean", mean, (logits, target, sums), op.outputs, op.name)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a, logits = op.attributes, op.inputs[0]
    assert isinstance(a, WeightedMean)
    if not g.needs(logits):
        return None, None, None
    backward = WeightedMeanBackward(a.smoothing, a.class_weights, a.ignored, a.share, g.weight(op.outputs[0]))
    inputs = (*op.inputs, dy)
    return g.emit("weighted_cross_entropy_mean_backward", backward, inputs, logits)[0], None, None


OPS = (
    OpKind("weighted_cross_entropy", WeightedCrossEntropy, _shape, expand=_expand, reduces=True, loss=True),
    OpKind("class_weight_sum", ClassWeights, _sums_shape, _sums, reduces=True),
    OpKind(
        "weighted_cross_entropy_mean",
        WeightedMean,
        _mean_shape,
        _evaluate,
        _gradient,
        reduces=True,
        loss=True,
        classifies=True,
    ),
    OpKind("weighted_cross_entropy_mean_backward", WeightedMeanBackward, _backward_shape, _backward),
)

LAYERS: tuple[Layer, ...] = ()  # `softmax_cross_entropy` with such settings

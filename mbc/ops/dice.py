"""Dice loss of class numbers (Milletari et al., "V-Net", 2016; the mean over images and classes as in MONAI).

For an image and a class, p is the softmax of the logits, and t is 1 where the target is that class and else 0. Over the
positions that count, the loss is 1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth). These sums are an operation of
their own, image by image, so that they can be computed in micro-batches; each of several ranks has its own images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.loss import check_classes, log_softmax
from mbc.ops.weighted_cross_entropy import IGNORE_INDEX, ignored_by


@dataclass(frozen=True, slots=True)
class Dice(Attributes):
    """Settings of the loss.

    Attributes:
        smooth: Number that is added to numerator and denominator.
        ignored: Class numbers that are left out, at most one.
    """

    smooth: float
    ignored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiceSums(Attributes):
    """Settings of the sums; `ignored` as in `Dice`."""

    ignored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiceMean(Attributes):
    """Settings of the mean; `smooth` as in `Dice`."""

    smooth: float


@dataclass(frozen=True, slots=True)
class DiceMeanBackward(Attributes):
    """Settings of the mean's gradient; `weight` is that of this loss in the total."""

    smooth: float
    weight: float


def _shape(_: Dice, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    return (TensorType((1,), master(logits.dtype)),)


def _sums_shape(_: DiceSums, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    shape = (logits.shape[0], 2 * logits.shape[1], *(1,) * (len(logits.shape) - 2))
    return (TensorType(shape, master(logits.dtype)),)


def _sums_backward_shape(a: DiceSums, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, slopes = inputs
    if (slopes,) != _sums_shape(a, (logits, target)):
        raise ShapeError(f"two gradients for each class and image are needed, but they are {slopes}")
    return (logits,)


def _mean_shape(_: DiceMean, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (sums,) = inputs
    rows, twice = (*sums.shape, 1, 1)[:2]
    if twice % 2 or sums.elements != rows * twice or sums.dtype is not master(sums.dtype):
        raise ShapeError(f"two sums for each class and image are needed, but they are {sums}")
    return (TensorType((1,), sums.dtype),)


def _mean_backward_shape(a: DiceMeanBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    sums, control = inputs
    _mean_shape(DiceMean(a.smooth), (sums,))
    control_shape(control)
    return (sums,)


def _parts(a: DiceSums, logits: Array, target: Array) -> tuple[Array, Array, Array]:
    """Return probabilities, one-hot target and counted positions, in float64.

    Probabilities and target are [N, C, positions]. The counted positions are [N, 1, positions]: 1, 0 where the class is
    left out, and NaN where the target is no class.
    """
    rows, classes = logits.shape[:2]
    labels = target.reshape(rows, 1, -1)
    counts = np.where((labels >= 0) & (labels < classes), 1.0, np.nan)
    counts[np.isin(labels, a.ignored)] = 0
    numbers: Array = np.arange(classes, dtype=np.int32).reshape(1, classes, 1)
    hot: Array = labels == numbers
    return np.exp(log_softmax(logits)).reshape(rows, classes, -1), hot.astype(np.float64), counts


def _sums(a: DiceSums, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    p, hot, counts = _parts(a, *inputs)
    both, sizes = ((x * counts).sum(axis=2) for x in (p * hot, p + hot))
    sums = np.concatenate((both, sizes), axis=1)
    return (sums.reshape(*sums.shape, *(1,) * (inputs[0].ndim - 2)).astype(inputs[0].dtype),)


def _sums_backward(a: DiceSums, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, slopes = inputs
    p, hot, counts = _parts(a, logits, target)
    of_both, of_sizes = np.split(slopes.astype(np.float64).reshape(len(slopes), -1, 1), 2, axis=1)
    by_p = of_both * hot + of_sizes
    gradient = np.where(counts == 1, p * (by_p - (p * by_p).sum(axis=1, keepdims=True)), 0)
    return (gradient.reshape(logits.shape).astype(logits.dtype),)


def _mean(a: DiceMean, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    both, sizes = np.split(inputs[0].astype(np.float64), 2, axis=1)
    losses = 1 - (2 * both + a.smooth) / (sizes + a.smooth)
    return (np.array([losses.sum() / (call.batch * losses.shape[1])], inputs[0].dtype),)


def _mean_backward(a: DiceMeanBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    sums, control = inputs
    both, sizes = np.split(sums.astype(np.float64), 2, axis=1)
    factor = a.weight * float(control_record(control)["loss_scale"]) / (call.batch * both.shape[1])
    below = factor / (sizes + a.smooth)
    gradient = np.concatenate((-2 * below, (2 * both + a.smooth) / (sizes + a.smooth) * below), axis=1)
    return (gradient.astype(sums.dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a, loss = op.attributes, op.outputs[0]
    assert isinstance(a, Dice)
    sums = e.emit("dice_sums", DiceSums(a.ignored), op.inputs, (f"{loss}.sums",), f"{op.name}.sums")
    return e.emit("dice_mean", DiceMean(a.smooth), sums, op.outputs, op.name)


def _sums_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (slopes,) = dys
    logits, target = op.inputs
    if slopes is None or not g.needs(logits):
        return None, None
    return g.emit("dice_sums_backward", op.attributes, (logits, target, slopes), logits)[0], None


def _mean_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    a, (sums,) = op.attributes, op.inputs
    assert isinstance(a, DiceMean)
    if not g.needs(sums):
        return (None,)
    backward = DiceMeanBackward(a.smooth, g.weight(op.outputs[0]))
    return g.emit("dice_mean_backward", backward, (sums, g.control), sums)


OPS = (
    OpKind("dice", Dice, _shape, expand=_expand, reduces=True, loss=True),
    OpKind("dice_sums", DiceSums, _sums_shape, _sums, _sums_gradient, divisible=True, labelled=True),
    OpKind("dice_sums_backward", DiceSums, _sums_backward_shape, _sums_backward, divisible=True),
    OpKind("dice_mean", DiceMean, _mean_shape, _mean, _mean_gradient, reduces=True, loss=True),
    OpKind("dice_mean_backward", DiceMeanBackward, _mean_backward_shape, _mean_backward),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    smooth = settings["smooth"]
    if not 0 < smooth < np.inf:
        raise ShapeError(f"smooth is {smooth}, but must be positive: a class may be in no image")
    return builder.emit("dice", Dice(smooth, ignored_by(settings)), inputs)[0]


LAYERS = (
    Layer(
        "dice",
        (Parameter("smooth", "float", 1.0), IGNORE_INDEX),
        _build,
        (2, 2),
        "(logits, target) |> dice: 1 - (2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth) of the softmax p and the "
        "target t of each class, mean over images and classes. Positions whose target is ignore_index do not count.",
        loss=True,
    ),
)

"""Softmax cross entropy with targets that give the probability of every class, as in mixup, cutmix and distillation.

`correct` counts rows (positions) in which the largest logit is that of the most probable class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, OpKind, ShapeError, master
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.framework_calls import Calls
from mbc.ops.loss import CrossEntropy, gradients_by_side, log_softmax, positions


@dataclass(frozen=True, slots=True)
class SoftTargetBackward(Attributes):
    """Settings of a gradient: `weight` of this loss in the total; `side` 0: of the logits, 1: of the probabilities."""

    smoothing: float
    weight: float
    side: int


def check_probabilities(logits: TensorType, target: TensorType) -> None:
    """Raise ShapeError unless the target holds the probabilities of all classes at each position of the logits.

    Raises:
        ShapeError: The target has another shape or type.
    """
    if len(logits.shape) < 2 or target != logits or target.dtype is DType.INT32:
        raise ShapeError(
            f"probabilities of all classes have the shape of the logits {logits}, but the target is {target}"
        )


def _shape(_: CrossEntropy, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_probabilities(logits, target)
    scalar = TensorType((1,), master(logits.dtype))
    return scalar, scalar


def _backward_shape(_: SoftTargetBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, control = inputs
    check_probabilities(logits, target)
    control_shape(control)
    return (logits,)


def cross_entropies(log_p: Array, shares: Array) -> Array:
    """Return the cross entropy of each position; a class without a share does not count, however improbable it is."""
    return -np.where(shares == 0, 0, shares * log_p).sum(axis=1)


def _smoothed(target: Array, smoothing: float) -> Array:
    return (1 - smoothing) * target.astype(np.float64) + smoothing / target.shape[1]


def _evaluate(a: CrossEntropy, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    losses = cross_entropies(log_softmax(logits), _smoothed(target, a.smoothing))
    correct = (logits.argmax(axis=1) == target.argmax(axis=1)).sum()
    return np.array([losses.sum() / positions(logits, call)], logits.dtype), np.array([correct], logits.dtype)


def _backward(a: SoftTargetBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, control = inputs
    log_p = log_softmax(logits)
    if a.side:
        gradient = (a.smoothing - 1) * log_p
    else:
        shares = _smoothed(target, a.smoothing)
        gradient = np.exp(log_p) * shares.sum(axis=1, keepdims=True) - shares
    factor = a.weight * float(control_record(control)["loss_scale"]) / positions(logits, call)
    return ((gradient * factor).astype(logits.dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, CrossEntropy)
    return gradients_by_side(g, op, dy, partial(SoftTargetBackward, a.smoothing))


OPS = (
    OpKind(
        "soft_target_cross_entropy",
        CrossEntropy,
        _shape,
        _evaluate,
        _gradient,
        reduces=True,
        loss=True,
        classifies=True,
        probabilities=(1,),
        calls=Calls(
            "F.cross_entropy(wide(x), wide(y), label_smoothing=smoothing)",
            jax="-((wide(y) * (1 - smoothing) + smoothing / len(x[0])) * jax.nn.log_softmax(wide(x), 1)).sum(1).mean()",
        ),
    ),
    OpKind("soft_target_cross_entropy_backward", SoftTargetBackward, _backward_shape, _backward, probabilities=(1,)),
)

LAYERS: tuple[Layer, ...] = ()  # `softmax_cross_entropy` with such a target

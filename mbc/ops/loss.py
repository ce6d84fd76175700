"""Losses: scalars [1] in the master type, means over the whole mini-batch; and their weighted sum.

A target outside [0, classes) makes the loss NaN, so that `guard` suppresses the update; the gradient of that row is
zero. The backward operations multiply by `weight` and by the control block's loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, ShapeError, master
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.framework_calls import Calls
from mbc.ops.rearrange import StridedSlice


@dataclass(frozen=True, slots=True)
class CrossEntropy(Attributes):
    """Settings of cross entropy.

    `smoothing` is the share of the target that is spread evenly over all classes (PyTorch's label_smoothing).
    """

    smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class CrossEntropyBackward(Attributes):
    """Settings of the gradient; `weight` is that of this loss in the total."""

    smoothing: float
    weight: float


@dataclass(frozen=True, slots=True)
class WeightedSum(Attributes):
    """Settings of a weighted sum: one weight for each input."""

    weights: tuple[float, ...]


def check_classes(logits: TensorType, target: TensorType) -> None:
    """Raise ShapeError unless the target holds a class number for each position of the logits.

    Raises:
        ShapeError: The target has another shape or type.
    """
    if len(logits.shape) < 2 or target.shape != (logits.shape[0], *logits.shape[2:]):
        raise ShapeError(
            f"logits {logits} need a target of the same shape without the classes, but the target is {target}"
        )
    if target.dtype is not DType.INT32:
        raise ShapeError(f"the target must hold class numbers (int32), but is {target}")


def resampled(builder: LayerBuilder, logits: str, target: str) -> str:
    """Return the target in the size of the logits: itself, or its nearest elements as PyTorch's interpolate takes them.

    Args:
        builder: The builder of the loss.
        logits: Logits [N, C, ...].
        target: Class numbers [N, ...], or a tensor [N, C, ...].

    Raises:
        ShapeError: The target's size is no whole multiple of that of the logits.
    """
    size, whole = builder.type(logits), builder.type(target)
    places = len(size.shape) - 2
    if len(whole.shape) < places + 1 or size.shape[2:] == whole.shape[-places:] or places < 1:
        return target
    count = (*whole.shape[1:-places], *size.shape[2:])
    if any(n % m for n, m in zip(whole.shape[1:], count, strict=True)):
        raise ShapeError(f"the target {whole} is neither of the size of the logits {size} nor a whole multiple of it")
    step = tuple(n // m for n, m in zip(whole.shape[1:], count, strict=True))
    ones = (1,) * len(step)
    a = StridedSlice(whole.shape[1:], tuple(0 for _ in step), step, ones, count)
    return builder.emit("strided_slice", a, (target,), "target")[0]


def check_log_probabilities(builder: LayerBuilder, value: str, what: str) -> None:
    """Raise ShapeError unless `log_softmax` over the classes computes `value`.

    Raises:
        ShapeError: Another operation computes it; `what` is the layer that the message names.
    """
    made_by = builder.producer(value)
    if made_by is None or made_by.kind != "log_softmax" or getattr(made_by.attributes, "axis", 0) != 1:
        raise ShapeError(
            f"{what} takes the log_softmax of logits over axis 1, and nothing else; softmax_cross_entropy takes logits"
        )


def _entropy_shape(_: CrossEntropy, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    scalar = TensorType((1,), master(logits.dtype))
    return scalar, scalar


def _entropy_backward_shape(_: CrossEntropyBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target, control = inputs
    check_classes(logits, target)
    control_shape(control)
    return (logits,)


def _sum_shape(a: WeightedSum, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if len(set(inputs)) != 1 or inputs[0].shape != (1,) or len(a.weights) != len(inputs):
        raise ShapeError(f"a weighted sum of {len(a.weights)} losses got {', '.join(map(str, inputs))}")
    return inputs[:1]


def _one_hot(logits: Array, target: Array) -> tuple[Array, Array]:
    """Return [N, C, ...] with 1 at the target's class (all 0 if it is none), and whether the target is a class."""
    numbers: Array = np.asarray(range(logits.shape[1]), np.int32)
    classes = numbers[np.newaxis, :, *((np.newaxis,) * (logits.ndim - 2))]
    return classes == target[:, None], (target >= 0) & (target < logits.shape[1])


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax over axis 1, in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _entropy(a: CrossEntropy, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    log_p = log_softmax(logits)
    hot, valid = _one_hot(logits, target)
    loss = -(1 - a.smoothing) * np.where(hot, log_p, 0).sum(axis=1)
    if a.smoothing:
        loss -= a.smoothing * log_p.mean(axis=1)
    mean = np.where(valid, loss, np.nan).sum() / positions(logits, call)
    correct = (logits.argmax(axis=1) == target).sum()
    return np.array([mean], logits.dtype), np.array([correct], logits.dtype)


def positions(logits: Array, call: Call) -> int:
    """Return the number of rows and positions over which the mean is taken."""
    return call.batch * (logits.size // (logits.shape[0] * logits.shape[1]))


def _entropy_backward(a: CrossEntropyBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, control = inputs
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    hot, valid = _one_hot(logits, target)
    factor = a.weight * float(control_record(control)["loss_scale"]) / positions(logits, call)
    gradient = (p - (1 - a.smoothing) * hot - a.smoothing / logits.shape[1]) * factor
    return (np.where(valid[:, None], gradient, 0).astype(logits.dtype),)


def _sum(a: WeightedSum, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    total = sum(w * float(x[0]) for w, x in zip(a.weights, inputs, strict=True))
    return (np.array([total], inputs[0].dtype),)


def gradients_by_side(
    g: Gradients, op: Operation, dy: str, backward: Callable[[float, int], Attributes]
) -> tuple[str | None, ...]:
    """Return the gradients of both operands of a loss.

    Args:
        g: The backward pass.
        op: The loss. Its kind with the suffix `_backward` computes one gradient.
        dy: The control block.
        backward: Returns the attributes of a gradient, for the loss's weight in the total and the operand's number.
    """
    weight, inputs = g.weight(op.outputs[0]), (*op.inputs, dy)
    return tuple(
        g.emit(f"{op.kind}_backward", backward(weight, side), inputs, x)[0] if g.needs(x) else None
        for side, x in enumerate(op.inputs)
    )


def _entropy_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    logits, target = op.inputs
    assert isinstance(op.attributes, CrossEntropy)
    if not g.needs(logits):
        return None, None
    a = CrossEntropyBackward(op.attributes.smoothing, g.weight(op.outputs[0]))
    return g.emit("softmax_cross_entropy_backward", a, (logits, target, dy), logits)[0], None


OPS = (
    OpKind(
        "softmax_cross_entropy",
        CrossEntropy,
        _entropy_shape,
        _entropy,
        _entropy_gradient,
        reduces=True,
        loss=True,
        classifies=True,
        calls=Calls("F.cross_entropy(wide(x), y, label_smoothing=smoothing)"),
    ),
    OpKind("softmax_cross_entropy_backward", CrossEntropyBackward, _entropy_backward_shape, _entropy_backward),
    OpKind("weighted_sum", WeightedSum, _sum_shape, _sum, reduces=True),
)

LAYERS: tuple[Layer, ...] = ()

"""Losses that compare two tensors element by element: mse, l1, smooth l1 and binary cross entropy.

They are means over the elements of the whole mini-batch, and both operands have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.activation import sigmoid
from mbc.ops.activation_variants import softplus
from mbc.ops.base import (
    Array,
    Call,
    Gradients,
    Layer,
    LayerBuilder,
    NoAttributes,
    OpKind,
    Parameter,
    ShapeError,
    master,
)
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.framework_calls import Calls
from mbc.ops.loss import gradients_by_side


@dataclass(frozen=True, slots=True)
class PlainLossBackward(Attributes):
    """Settings of the gradient of a loss without settings.

    `weight` is the loss's weight in the total; `side` is 0 for the gradient of the prediction, 1 for the target's.
    """

    weight: float
    side: int


@dataclass(frozen=True, slots=True)
class SmoothL1(Attributes):
    """Settings of smooth l1. `beta`: the difference above which the loss is linear."""

    beta: float = 1.0


@dataclass(frozen=True, slots=True)
class SmoothL1Backward(Attributes):
    """Settings of the gradient of smooth l1; `weight` and `side` as in `PlainLossBackward`."""

    beta: float
    weight: float
    side: int


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy(Attributes):
    """Settings of binary cross entropy. `pos_weight`: factor of the target's share of 1."""

    pos_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropyBackward(Attributes):
    """Settings of the gradient of binary cross entropy; `weight` and `side` as in `PlainLossBackward`."""

    pos_weight: float
    weight: float
    side: int


Backward = PlainLossBackward | SmoothL1Backward | BinaryCrossEntropyBackward


@dataclass(frozen=True)
class _Rule:
    """Definition of one loss.

    Attributes:
        attributes: Class of the loss's attributes.
        backward_attributes: Class of the gradient's attributes.
        value: Computes the loss of an element in float64.
        derivatives: Compute its derivatives with respect to prediction and target.
        backward: Makes the gradient's attributes from the loss's attributes, the weight and the side.
        calls: As in `OpKind`.
        probabilities: As in `OpKind`.
    """

    attributes: type[Attributes]
    backward_attributes: type[Attributes]
    value: Callable[[Any, Array, Array], Array]
    derivatives: tuple[Callable[[Any, Array, Array], Array], Callable[[Any, Array, Array], Array]]
    backward: Callable[[Any, float, int], Attributes]
    calls: Calls
    probabilities: tuple[int, ...] = ()


def _smooth_l1(a: SmoothL1, x: Array, y: Array) -> Array:
    distance = np.abs(x - y)
    return np.where(distance < a.beta, 0.5 * distance * distance / a.beta, distance - 0.5 * a.beta)


def _slope(a: SmoothL1Backward, x: Array, y: Array) -> Array:
    return np.clip((x - y) / a.beta, -1, 1)


# For a target in [0, 1] all terms have one sign, so that nothing cancels where the network is nearly certain.
def _binary(a: BinaryCrossEntropy, x: Array, y: Array) -> Array:
    return a.pos_weight * y * softplus(-x) + (1 - y) * softplus(x)


def _binary_by_logit(a: BinaryCrossEntropyBackward, x: Array, y: Array) -> Array:
    return (1 - y) * sigmoid(x) - a.pos_weight * y * sigmoid(-x)


def _binary_by_target(a: BinaryCrossEntropyBackward, x: Array, y: Array) -> Array:
    return (a.pos_weight - 1) * softplus(-x) - x


_LEAST_LOG, _LEAST_VARIANCE = -100.0, 1e-12  # as in PyTorch


def _log(p: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(np.log(p), _LEAST_LOG)


def _of_probability(_: NoAttributes, p: Array, y: Array) -> Array:
    return -(y * _log(p) + (1 - y) * _log(1 - p))


def _by_probability(_: PlainLossBackward, p: Array, y: Array) -> Array:
    return (p - y) / np.maximum(p * (1 - p), _LEAST_VARIANCE)


def _probability_by_target(_: PlainLossBackward, p: Array, y: Array) -> Array:
    return _log(1 - p) - _log(p)


_RULES: dict[str, _Rule] = {
    "mse": _Rule(
        NoAttributes,
        PlainLossBackward,
        lambda a, x, y: (x - y) ** 2,
        (lambda a, x, y: 2 * (x - y), lambda a, x, y: 2 * (y - x)),
        lambda a, weight, side: PlainLossBackward(weight, side),
        Calls("F.mse_loss(x, y)", jax="jnp.mean((wide(x) - wide(y)) ** 2)"),
    ),
    "l1": _Rule(
        NoAttributes,
        PlainLossBackward,
        lambda a, x, y: np.abs(x - y),
        (lambda a, x, y: np.sign(x - y), lambda a, x, y: np.sign(y - x)),
        lambda a, weight, side: PlainLossBackward(weight, side),
        Calls("F.l1_loss(wide(x), wide(y))", jax="jnp.mean(jnp.abs(wide(x) - wide(y)))"),
    ),
    "smooth_l1": _Rule(
        SmoothL1,
        SmoothL1Backward,
        _smooth_l1,
        (_slope, lambda a, x, y: _slope(a, y, x)),
        lambda a, weight, side: SmoothL1Backward(a.beta, weight, side),
        Calls("F.smooth_l1_loss(wide(x), wide(y), beta=beta)"),
    ),
    "binary_cross_entropy": _Rule(
        BinaryCrossEntropy,
        BinaryCrossEntropyBackward,
        _binary,
        (_binary_by_logit, _binary_by_target),
        lambda a, weight, side: BinaryCrossEntropyBackward(a.pos_weight, weight, side),
        Calls(
            # A weight that is computed on the device: a captured step must not copy from the host.
            "F.binary_cross_entropy_with_logits(wide(x), wide(y), pos_weight=wide(x).new_full((), pos_weight))",
            jax="jnp.mean(pos_weight * wide(y) * jax.nn.softplus(-wide(x)) + (1 - wide(y)) * jax.nn.softplus(wide(x)))",
        ),
        probabilities=(1,),
    ),
    "probability_cross_entropy": _Rule(
        NoAttributes,
        PlainLossBackward,
        _of_probability,
        (_by_probability, _probability_by_target),
        lambda a, weight, side: PlainLossBackward(weight, side),
        Calls("F.binary_cross_entropy(wide(x), wide(y))"),
        probabilities=(0, 1),
    ),
}


def _kinds(name: str, rule: _Rule) -> tuple[OpKind, OpKind]:
    backward_name = f"{name}_backward"

    def shape(_: Attributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        prediction, target = inputs
        if prediction.dtype is DType.INT32 or prediction != target:
            raise ShapeError(f"{name} compares float tensors of one shape, but got {prediction} and {target}")
        return (TensorType((1,), master(prediction.dtype)),)

    def backward_shape(a: Backward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        shape(NoAttributes(), inputs[:2])
        control_shape(inputs[2])
        return (inputs[a.side],)

    def evaluate(a: Attributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
        prediction, target = (x.astype(np.float64) for x in inputs)
        mean = rule.value(a, prediction, target).sum() / _elements(prediction, call)
        return (np.array([mean], inputs[0].dtype),)

    def evaluate_backward(a: Backward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
        prediction, target = (x.astype(np.float64) for x in inputs[:2])
        factor = a.weight * float(control_record(inputs[2])["loss_scale"]) / _elements(prediction, call)
        return ((rule.derivatives[a.side](a, prediction, target) * factor).astype(inputs[0].dtype),)

    def gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
        return gradients_by_side(g, op, dy, partial(rule.backward, op.attributes))

    return (
        OpKind(
            name,
            rule.attributes,
            shape,
            evaluate,
            gradient,
            reduces=True,
            loss=True,
            probabilities=rule.probabilities,
            calls=rule.calls,
        ),
        OpKind(
            backward_name, rule.backward_attributes, backward_shape, evaluate_backward, probabilities=rule.probabilities
        ),
    )


def _elements(x: Array, call: Call) -> int:
    """Return the number of elements over which the mean is taken."""
    return call.batch * (x.size // x.shape[0])


OPS = tuple(kind for name, rule in _RULES.items() for kind in _kinds(name, rule))


def _build_mse(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("mse", NoAttributes(), inputs)[0]


def _build_l1(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("l1", NoAttributes(), inputs)[0]


def _build_smooth_l1(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("smooth_l1", SmoothL1(_positive("beta", settings["beta"])), inputs)[0]


def _build_binary(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    attributes = BinaryCrossEntropy(_positive("pos_weight", settings["pos_weight"]))
    if not settings["logits"]:
        if attributes.pos_weight != 1.0:
            raise ShapeError("pos_weight is for logits, but logits=false says that there are none")
        return builder.emit("probability_cross_entropy", NoAttributes(), inputs)[0]
    return builder.emit("binary_cross_entropy", attributes, inputs)[0]


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ShapeError(f"{name} is {value}, but must be positive")
    return value


LAYERS = (
    Layer("mse", (), _build_mse, (2, 2), "(prediction, target) |> mse: mean squared difference.", loss=True),
    Layer("l1", (), _build_l1, (2, 2), "(prediction, target) |> l1: mean absolute difference.", loss=True),
    Layer(
        "smooth_l1",
        (Parameter("beta", "float", 1.0),),
        _build_smooth_l1,
        (2, 2),
        "(prediction, target) |> smooth_l1: mean of d^2 / (2 beta) where d = |difference| < beta, else d - beta / 2.",
        loss=True,
    ),
    Layer(
        "binary_cross_entropy",
        (Parameter("pos_weight", "float", 1.0), Parameter("logits", "bool", True)),
        _build_binary,
        (2, 2),
        "(logits, target) |> binary_cross_entropy: mean over elements, targets from 0 to 1. "
        "pos_weight multiplies the loss of ones. logits = false: the first tensor holds probabilities.",
        loss=True,
    ),
)

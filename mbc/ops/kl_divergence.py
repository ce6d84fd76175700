"""The Kullback-Leibler divergence of the softmax of logits from given probabilities, the loss of distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, master
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.framework_calls import Calls
from mbc.ops.loss import check_log_probabilities, gradients_by_side, log_softmax, positions
from mbc.ops.soft_cross_entropy import check_probabilities


@dataclass(frozen=True, slots=True)
class KlBackward(Attributes):
    """Settings of a gradient: `weight` of this loss in the total; `side` 0: of the logits, 1: of the probabilities."""

    weight: float
    side: int


def _shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    check_probabilities(*inputs)
    return (TensorType((1,), master(inputs[0].dtype)),)


def _backward_shape(a: KlBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    check_probabilities(*inputs[:2])
    control_shape(inputs[2])
    return (inputs[a.side],)


def _log(target: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):  # the logarithm of 0 is minus infinity
        return np.log(target.astype(np.float64))


def _evaluate(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    with np.errstate(invalid="ignore"):
        terms = np.where(target == 0, 0, target * (_log(target) - log_softmax(logits)))
    return (np.array([terms.sum() / positions(logits, call)], logits.dtype),)


def _backward(a: KlBackward, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target, control = inputs
    log_p = log_softmax(logits)
    if a.side:
        gradient = _log(target) + 1 - log_p
    else:
        shares = target.astype(np.float64)
        gradient = np.exp(log_p) * shares.sum(axis=1, keepdims=True) - shares
    factor = a.weight * float(control_record(control)["loss_scale"]) / positions(logits, call)
    return ((gradient * factor).astype(logits.dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return gradients_by_side(g, op, dy, KlBackward)


OPS = (
    OpKind(
        "kl_divergence",
        NoAttributes,
        _shape,
        _evaluate,
        _gradient,
        reduces=True,
        loss=True,
        probabilities=(1,),
        calls=Calls(
            "F.kl_div(F.log_softmax(wide(x), 1), wide(y), reduction='sum') / (x.numel() // x.shape[1])",
            jax="(jax.scipy.special.xlogy(wide(y), wide(y)) - wide(y) * jax.nn.log_softmax(wide(x), 1)).sum(1).mean()",
        ),
    ),
    OpKind("kl_divergence_backward", KlBackward, _backward_shape, _backward, probabilities=(1,)),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    if not settings["logits"]:  # the softmax of log-probabilities is the probabilities
        check_log_probabilities(builder, inputs[0], "kl_divergence(logits=false)")
    return builder.emit("kl_divergence", NoAttributes(), inputs)[0]


LAYERS = (
    Layer(
        "kl_divergence",
        (Parameter("logits", "bool", True),),
        _build,
        (2, 2),
        "(logits, probabilities) |> kl_divergence: divergence of the logits' softmax from the probabilities, mean over "
        "rows and positions. logits = false: the first tensor is a log_softmax.",
        loss=True,
    ),
)

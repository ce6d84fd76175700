"""Layer-wise adaptive rates: LARS and LAMB.

Both scale the step of a parameter by a ratio of norms, which needs the whole gradient. Hence each is two operations, of
which the first computes the ratio. Parameters without weight decay are not adapted; `mbc.ops.update` has their updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ir.optional import optional
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, OpKind, ShapeError
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.update import AdamW, Sgd, same_states, unscaled

RATIOS = frozenset({"lars_ratio", "lamb_ratio"})


@dataclass(frozen=True, slots=True)
class LarsRatio(Attributes):
    """trust * |p| / (|g| + weight_decay * |p| + eps), in L2 norms; 1 if either norm is 0. `clip_value` as in `Sgd`.

    You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, with the learning rate outside of
    the velocity, as in `torch.optim.SGD`: v = momentum * v + ratio * (g + weight_decay * p); p -= learning rate * v.
    """

    trust: float
    eps: float
    weight_decay: float
    clip_value: float = optional(0.0)


def _scalar(parameter: TensorType) -> TensorType:
    return TensorType((1,), parameter.dtype)


def _check_ratio(parameter: TensorType, ratio: TensorType) -> None:
    if ratio != _scalar(parameter):
        raise ShapeError(f"{ratio} is not a ratio for parameter {parameter}")


def _lars_ratio_shape(a: LarsRatio, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    same_states(inputs, ())
    return (_scalar(inputs[0]),)


def _lars_update_shape(a: Sgd, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    parameter, _, _, ratio, *momentum = inputs
    if bool(momentum) != bool(a.momentum):
        raise ShapeError(f"lars with momentum {a.momentum} got {len(inputs)} operands")
    same_states(inputs, tuple(momentum))
    _check_ratio(parameter, ratio)
    return (parameter, *momentum)


def _lamb_ratio_shape(a: AdamW, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    parameter, _, _, m, v = inputs
    same_states(inputs, (m, v))
    return m, v, _scalar(parameter)


def _lamb_update_shape(a: AdamW, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    parameter, control, m, v, ratio = inputs
    control_shape(control)
    if m != parameter or v != parameter:
        raise ShapeError(f"{m} and {v} do not fit parameter {parameter}")
    _check_ratio(parameter, ratio)
    return (parameter,)


def _norm(values: Array) -> float:
    return math.sqrt(float(np.square(values, dtype=np.float64).sum()))


def _one(parameter: Array, ratio: float) -> Array:
    return np.full((1,), ratio, parameter.dtype)


def _lars_ratio(a: LarsRatio, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    parameter, gradient, control = inputs
    record = control_record(control)
    p, g = _norm(parameter), _norm(unscaled(a.clip_value, gradient, record))
    adapts = record["proceed"] and p > 0 and g > 0
    return (_one(parameter, a.trust * p / (g + a.weight_decay * p + a.eps) if adapts else 1.0),)


def _lars_update(a: Sgd, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    parameter, gradient, control, ratio, *state = inputs
    record = control_record(control)
    if not record["proceed"]:
        return (parameter, *state)
    kind = parameter.dtype.type
    step = (unscaled(a.clip_value, gradient, record) + kind(a.weight_decay) * parameter) * ratio[0]
    if state:
        velocity = kind(a.momentum) * state[0] + step
        state = [velocity]
        step = step + kind(a.momentum) * velocity if a.nesterov else velocity
    return (parameter - kind(record["learning_rate"] * a.rate) * step, *state)


def _lamb_step(a: AdamW, parameter: Array, m: Array, v: Array, record: Any) -> Array:
    """Return the step before it is multiplied by the ratio."""
    kind, count = parameter.dtype.type, int(record["updates"])
    divisor = np.sqrt(v) * kind(1 / np.sqrt(1 - a.beta2**count)) + kind(a.eps)
    return kind(1 / (1 - a.beta1**count)) * (m / divisor) + kind(a.weight_decay) * parameter


def _lamb_ratio(a: AdamW, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    parameter, gradient, control, m, v = inputs
    record = control_record(control)
    if not record["proceed"]:
        return m, v, _one(parameter, 1.0)
    kind = parameter.dtype.type
    g = unscaled(a.clip_value, gradient, record)
    m = kind(a.beta1) * m + kind(1 - a.beta1) * g
    v = kind(a.beta2) * v + kind(1 - a.beta2) * (g * g)
    p, step = _norm(parameter), _norm(_lamb_step(a, parameter, m, v, record))
    return m, v, _one(parameter, p / step if p > 0 and step > 0 else 1.0)


def _lamb_update(a: AdamW, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    parameter, control, m, v, ratio = inputs
    record = control_record(control)
    if not record["proceed"]:
        return (parameter,)
    rate = parameter.dtype.type(float(record["learning_rate"]) * a.rate)
    return (parameter - rate * ratio[0] * _lamb_step(a, parameter, m, v, record),)


OPS = (
    OpKind("lars_ratio", LarsRatio, _lars_ratio_shape, _lars_ratio, reduces=True),
    OpKind("lars_update", Sgd, _lars_update_shape, _lars_update, updates=((0, 0), (1, 4)), reduces=True),
    OpKind("lamb_ratio", AdamW, _lamb_ratio_shape, _lamb_ratio, updates=((0, 3), (1, 4)), reduces=True),
    OpKind("lamb_update", AdamW, _lamb_update_shape, _lamb_update, updates=((0, 0),), reduces=True),
)

LAYERS: tuple[Any, ...] = ()

"""The end of a step: whether the step counts, and the new parameters.

Updates read the control block that `guard` wrote, divide the gradient by `gradient_scale`, and do nothing if `proceed`
is 0. Arithmetic is in the master type. Clipping to a global norm is one more factor of all gradients: `guard`, which
then reads them all, includes it in `gradient_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.control import GROWTH_INTERVAL, SCALE_BACKOFF, SCALE_GROWTH
from mbc.ir.graph import Attributes
from mbc.ir.optional import optional
from mbc.ir.types import Precision, TensorType
from mbc.ops.base import Array, Call, NoAttributes, OpKind, ShapeError
from mbc.ops.control_record import control_record, control_shape

NORM_EPSILON = 1e-6  # as in PyTorch's clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Guard(Attributes):
    """Settings of the guard.

    Attributes:
        clip_norm: Largest L2 norm of all gradients together, without the loss scale; 0: there is no limit.
        accumulate: Number of mini-batches whose gradients were summed; the step uses their mean.
    """

    clip_norm: float = optional(0.0)
    accumulate: int = optional(1)


@dataclass(frozen=True, slots=True)
class Sgd(Attributes):
    """g += weight_decay * p; v = momentum * v + g; p -= learning rate * (nesterov: g + momentum * v, else v).

    `rate` is a factor of the step's learning rate. `clip_value` is the largest absolute value of an element of g,
    before weight decay; 0: there is no limit.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    rate: float = optional(1.0)
    clip_value: float = optional(0.0)


@dataclass(frozen=True, slots=True)
class AdamW(Attributes):
    """Settings of AdamW, computed as in PyTorch; `rate` and `clip_value` as in `Sgd`.

    Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    rate: float = optional(1.0)
    clip_value: float = optional(0.0)


@dataclass(frozen=True, slots=True)
class Ema(Attributes):
    """average = decay * average + (1 - decay) * value; the first update sets the average to the value.

    PyTorch's counterpart is `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.
    """

    decay: float


def _guard_shape(a: Guard, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    control_shape(inputs[0])
    if a.clip_norm and len(inputs) < 3:
        raise ShapeError("the norm of gradients can only be clipped if the guard reads gradients")
    return inputs[:1]


def same_states(inputs: tuple[TensorType, ...], states: tuple[TensorType, ...]) -> None:
    """Raise ShapeError unless gradient and states have the parameter's type; `inputs`: parameter, gradient, control.

    Raises:
        ShapeError: One of them has another type.
    """
    control_shape(inputs[2])
    for other in (inputs[1], *states):
        if other != inputs[0]:
            raise ShapeError(f"{other} does not fit parameter {inputs[0]}")


def _sgd_shape(a: Sgd, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    parameter, _, _, *momentum = inputs
    if bool(momentum) != bool(a.momentum):
        raise ShapeError(f"sgd with momentum {a.momentum} got {len(inputs)} operands")
    same_states(inputs, tuple(momentum))
    return (parameter, *momentum)


def _adamw_shape(a: AdamW, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    parameter, _, _, m, v = inputs
    same_states(inputs, (m, v))
    return parameter, m, v


def _ema_shape(a: Ema, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    average, _, _ = inputs
    same_states(inputs, ())
    return (average,)


def _guard(a: Guard, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    control, *values = inputs
    after = control.copy()
    record = control_record(after)
    proceed = all(bool(np.isfinite(v).all()) for v in values)
    record["proceed"] = proceed
    scale = float(record["loss_scale"]) * a.accumulate
    record["gradient_scale"] = scale
    if a.clip_norm and proceed:
        squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in values[1:])
        excess = (math.sqrt(squares) / scale + NORM_EPSILON) / a.clip_norm
        record["gradient_scale"] = scale * max(1.0, excess)
    if proceed:
        record["updates"] += np.uint32(1)
        record["since_growth"] += np.uint32(1)
    else:
        record["skipped"] += np.uint32(1)
    # Only the range of fp16 is so small that gradients need a scale.
    if call.precision is Precision.FP16:
        if not proceed:
            record["loss_scale"] *= np.float32(SCALE_BACKOFF)
            record["since_growth"] = 0
        elif record["since_growth"] >= GROWTH_INTERVAL:
            record["loss_scale"] *= np.float32(SCALE_GROWTH)
            record["since_growth"] = 0
    return (after,)


def unscaled(clip_value: float, gradient: Array, record: Array) -> Array:
    """Return a gradient without the scale of this step, clipped."""
    unclipped = gradient * gradient.dtype.type(1 / float(record["gradient_scale"]))
    return np.clip(unclipped, -clip_value, clip_value) if clip_value else unclipped


def updated_by_sgd(a: Sgd, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the parameter and its momentum after a step."""
    parameter, gradient, control, *state = inputs
    record = control_record(control)
    if not record["proceed"]:
        return (parameter, *state)
    kind = parameter.dtype.type
    step = unscaled(a.clip_value, gradient, record)
    if a.weight_decay:
        step = step + kind(a.weight_decay) * parameter
    if state:
        velocity = kind(a.momentum) * state[0] + step
        state = [velocity]
        step = step + kind(a.momentum) * velocity if a.nesterov else velocity
    return (parameter - kind(record["learning_rate"] * a.rate) * step, *state)


def updated_by_adamw(a: AdamW, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the parameter and both moments after a step."""
    parameter, gradient, control, m, v = inputs
    record = control_record(control)
    if not record["proceed"]:
        return parameter, m, v
    kind = parameter.dtype.type
    rate, count = float(record["learning_rate"]) * a.rate, int(record["updates"])
    g = unscaled(a.clip_value, gradient, record)
    m = kind(a.beta1) * m + kind(1 - a.beta1) * g
    v = kind(a.beta2) * v + kind(1 - a.beta2) * (g * g)
    divisor = np.sqrt(v) * kind(1 / np.sqrt(1 - a.beta2**count)) + kind(a.eps)
    step = kind(rate / (1 - a.beta1**count)) * (m / divisor)
    return kind(1 - rate * a.weight_decay) * parameter - step, m, v


def _ema(a: Ema, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    average, value, control = inputs
    record = control_record(control)
    if not record["proceed"]:
        return (average,)
    if record["updates"] <= 1:
        return (value,)
    return (average + average.dtype.type(1 - a.decay) * (value - average),)


def _accumulate_shape(a: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    same_states(inputs, ())
    return inputs[:1]


def _accumulate(a: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    before, value, control = inputs
    return (before + value if control_record(control)["accumulated"] else value,)


def _check_loss_shape(a: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    control_shape(inputs[0])
    return inputs[:1]


def _check_loss(a: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    control, loss = inputs
    after = control.copy()
    control_record(after)["proceed"] = bool(np.isfinite(loss).all())
    return (after,)


def _copy_control_shape(a: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    control_shape(inputs[0])
    return inputs


def _copy_control(a: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (inputs[0].copy(),)


OPS = (
    OpKind("guard", Guard, _guard_shape, _guard, updates=((0, 0),), reduces=True),
    OpKind("sgd_update", Sgd, _sgd_shape, updated_by_sgd, updates=((0, 0), (1, 3)), reduces=True),
    OpKind("adamw_update", AdamW, _adamw_shape, updated_by_adamw, updates=((0, 0), (1, 3), (2, 4)), reduces=True),
    OpKind("accumulate", NoAttributes, _accumulate_shape, _accumulate, updates=((0, 0),), reduces=True),
    OpKind("check_loss", NoAttributes, _check_loss_shape, _check_loss, reduces=True),
    OpKind("copy_control", NoAttributes, _copy_control_shape, _copy_control, reduces=True),
    OpKind("ema_update", Ema, _ema_shape, _ema, updates=((0, 0),), reduces=True),
)

LAYERS: tuple[Any, ...] = ()

"""Bias of convolutions and linear layers: one number a channel (axis 1), and the reduction over all other axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mbc.ir.graph import Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, LayerBuilder, NoAttributes, OpKind, ShapeError, master
from mbc.ops.device import Expression, device
from mbc.ops.framework_calls import Calls


def _bias_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y, b = inputs
    if len(y.shape) < 2 or b.shape != y.shape[1:2]:
        raise ShapeError(f"bias {b} does not fit the channels of {y}")
    return (y,)


def _channel_sum_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (dy,) = inputs
    return (TensorType(dy.shape[1:2], master(dy.dtype)),)


def _bias_add(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    y, b = inputs
    return (y + b.reshape((1, -1) + (1,) * (y.ndim - 2)),)


def _channel_sum(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    return (channel_sums(dy).astype(dy.dtype),)


def channel_sums(x: Array) -> Array:
    """Return the sums over all axes but axis 1, in float64."""
    axes = (0, *range(2, x.ndim))
    return np.asarray(np.sum(x, axis=axes, dtype=np.float64))


def _bias_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    b = op.inputs[1]
    return dy, g.emit("channel_sum", NoAttributes(), (dy,), b)[0] if g.needs(b) else None


OPS = (
    OpKind(
        "bias_add",
        NoAttributes,
        _bias_shape,
        _bias_add,
        _bias_gradient,
        divisible=True,
        in_place=((0, 0),),
        device=device("x, bias", "x + bias"),
        calls=Calls(
            "x + y.reshape(1, -1, *(1,) * (x.ndim - 2))",
            jax="x + y.reshape(1, -1, *(1,) * (x.ndim - 2)).astype(x.dtype)",
        ),
    ),
    OpKind(
        "channel_sum",
        NoAttributes,
        _channel_sum_shape,
        _channel_sum,
        divisible=True,
        accumulates=True,
        reduces=True,
        device=lambda a, inputs: Expression(("dy",), "", sums=("dy",), finishes=("sum0",)),
    ),
)

LAYERS: tuple[Any, ...] = ()


def add_bias(builder: LayerBuilder, y: str, channels: int) -> str:
    """Return the layer's output `y` with a trained bias added, which starts at zero."""
    bias = builder.state("bias", (channels,), Initializer("constant"))
    return builder.emit("bias_add", NoAttributes(), (y, bias), "bias_add")[0]

"""Fully connected layers and changes of element type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.bias import add_bias
from mbc.ops.framework_calls import Calls
from mbc.ops.initial import INITIALIZERS, initializer
from mbc.ops.products import product
from mbc.ops.rounding import operand
from mbc.ops.window import positive


@dataclass(frozen=True, slots=True)
class Linear(Attributes):
    """Settings of a linear layer. `sample_shape` is x without its rows: x is read as [rows, product(sample_shape)]."""

    sample_shape: tuple[int, ...]

    @property
    def features_in(self) -> int:
        """Number of input features."""
        return math.prod(self.sample_shape)


@dataclass(frozen=True, slots=True)
class Cast(Attributes):
    """Settings of a change of element type; `to` is a `DType`."""

    to: str


def _linear_shape(a: Linear, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, w = inputs
    if len(x.shape) < 2 or x.shape[1:] != a.sample_shape:
        raise ShapeError(f"input {x} does not have the shape {a.sample_shape} per row that the layer is for")
    if len(w.shape) != 2 or w.shape[1] != a.features_in:
        raise ShapeError(f"weight {w} does not fit the {a.features_in} features of input {x}")
    return (TensorType((x.shape[0], w.shape[0]), x.dtype),)


def _data_shape(a: Linear, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    dy, w = inputs
    if len(dy.shape) != 2 or w.shape != (dy.shape[1], a.features_in):
        raise ShapeError(f"gradient {dy} does not fit weight {w} and {a.features_in} input features")
    return (TensorType((dy.shape[0], *a.sample_shape), dy.dtype),)


def _filter_shape(a: Linear, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, dy = inputs
    if x.shape[1:] != a.sample_shape or len(dy.shape) != 2 or dy.shape[0] != x.shape[0]:
        raise ShapeError(f"input {x} and gradient {dy} do not belong to one linear layer")
    return (TensorType((dy.shape[1], a.features_in), master(x.dtype)),)


def _linear(a: Linear, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, w = (operand(v, call.precision) for v in inputs)
    return (product(x.reshape(x.shape[0], -1), w.T),)


def _data(a: Linear, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    dy, w = (operand(v, call.precision) for v in inputs)
    return (product(dy, w).reshape(dy.shape[0], *a.sample_shape),)


def _filter(a: Linear, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, dy = (operand(v, call.precision) for v in inputs)
    return (product(dy.T, x.reshape(x.shape[0], -1)),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, w = op.inputs
    dw = g.emit("linear_backward_filter", op.attributes, (x, dy), w)[0] if g.needs(w) else None
    dx = g.emit("linear_backward_data", op.attributes, (dy, w), x)[0] if g.needs(x) else None
    return dx, dw


def _cast_shape(a: Cast, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (TensorType(inputs[0].shape, DType(a.to)),)


def _cast(a: Cast, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    # bf16 and fp16 are float32 here; storing rounds them.
    return (inputs[0].astype(np.float64 if a.to == DType.FP64 else np.float32, copy=False),)


def _cast_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    (x,) = op.inputs
    return g.emit("cast", Cast(g.type(x).dtype.value), (dy,), x)


OPS = (
    OpKind(
        "linear",
        Linear,
        _linear_shape,
        _linear,
        _gradient,
        divisible=True,
        working_inputs=(1,),
        flops=lambda a, inputs, outputs: 2 * inputs[0].shape[0] * inputs[1].elements,
    ),
    OpKind(
        "linear_backward_data",
        Linear,
        _data_shape,
        _data,
        divisible=True,
        working_inputs=(1,),
        flops=lambda a, inputs, outputs: 2 * inputs[0].shape[0] * inputs[1].elements,
    ),
    OpKind(
        "linear_backward_filter",
        Linear,
        _filter_shape,
        _filter,
        divisible=True,
        accumulates=True,
        reduces=True,
        flops=lambda a, inputs, outputs: 2 * inputs[0].shape[0] * outputs[0].elements,
    ),
    OpKind("cast", Cast, _cast_shape, _cast, _cast_gradient, divisible=True, calls=Calls("x", jax="x")),
)


def _build_linear(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    (x,) = inputs
    kind = builder.type(x)
    if len(kind.shape) < 2:
        raise ShapeError(f"linear needs a tensor with rows and features, but got {kind}")
    features = settings["features"]
    positive("features", (features,))
    a = Linear(kind.shape[1:])
    w = builder.state("weight", (features, a.features_in), initializer(settings["init"], a.features_in, features))
    (y,) = builder.emit("linear", a, (x, w))
    return add_bias(builder, y, features) if settings["bias"] else y


LAYERS = (
    Layer(
        "linear",
        (Parameter("features", "int"), Parameter("bias", "bool", True), Parameter("init", "word", "he", INITIALIZERS)),
        _build_linear,
        help="Fully connected layer; every dimension after the first is flattened.",
    ),
)

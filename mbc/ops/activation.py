"""Elementwise operations: activations, addition and multiplication, scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ops.base import Array, Gradients, NoAttributes, OpKind
from mbc.ops.device import device
from mbc.ops.erf import erf
from mbc.ops.framework_calls import Calls
from mbc.ops.pointwise import Pointwise, kinds_of, layers_of, same_shape


@dataclass(frozen=True, slots=True)
class LeakyRelu(Attributes):
    """x where x > 0, else slope * x. `slope` is positive, so that the output has the sign of the input."""

    slope: float = 0.01


@dataclass(frozen=True, slots=True)
class Scale(Attributes):
    """factor * x + offset."""

    factor: float = 1.0
    offset: float = 0.0


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow."""
    # exp of a negative number cannot overflow; the two branches are the same function.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def _gelu(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _gelu_backward(x: Array, dy: Array) -> Array:
    wide = x.astype(np.float64)
    density = np.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    return (dy * (_normal_cdf(wide) + wide * density)).astype(x.dtype)


def _silu_backward(x: Array, dy: Array) -> Array:
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _add_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return dy, dy


def _mul_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a, b = op.inputs
    da = g.emit("mul", NoAttributes(), (dy, b), a)[0] if g.needs(a) else None
    db = g.emit("mul", NoAttributes(), (dy, a), b)[0] if g.needs(b) else None
    return da, db


def _scale_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    assert isinstance(op.attributes, Scale)
    return g.emit("scale", Scale(op.attributes.factor), (dy,), *op.inputs)


LEAKY_RELU = Calls("F.leaky_relu(x, slope)", jax="jnp.where(x > 0, x, x * slope)", onnx="LeakyRelu(x, alpha=slope)")

POINTWISE = (
    # NaN passes through relu, as in cuDNN and PyTorch: maximum(NaN, 0) is NaN.
    Pointwise(
        "relu",
        lambda a, x: np.maximum(x, 0),
        lambda a, y, dy: np.where(y > 0, dy, 0).astype(dy.dtype),
        ("x < 0.0f ? 0.0f : x", "y > 0.0f ? dy : 0.0f"),
        "max(x, 0).",
        Calls("F.relu(x)", jax="jax.nn.relu(x)", onnx="Relu(x)"),
        of_output=True,
        signs=(0,),
    ),
    Pointwise(
        "leaky_relu",
        lambda a, x: np.where(x > 0, x, x * x.dtype.type(a.slope)),
        lambda a, y, dy: np.where(y > 0, dy, dy * dy.dtype.type(a.slope)),
        ("x < 0.0f ? slope * x : x", "y > 0.0f ? dy : slope * dy"),
        calls=LEAKY_RELU,
        attributes=LeakyRelu,
        of_output=True,
        signs=(0,),
    ),
    Pointwise(
        "sigmoid",
        lambda a, x: sigmoid(x),
        lambda a, y, dy: dy * y * (1 - y),
        ("logistic(x)", "dy * y * (1.0f - y)"),
        "1 / (1 + exp(-x)).",
        Calls("torch.sigmoid(x)", jax="jax.nn.sigmoid(x)", onnx="Sigmoid(x)"),
        of_output=True,
    ),
    Pointwise(
        "tanh",
        lambda a, x: np.tanh(x),
        lambda a, y, dy: dy * (1 - y * y),
        ("tanhf(x)", "dy * (1.0f - y * y)"),
        "Hyperbolic tangent.",
        Calls("torch.tanh(x)", jax="jnp.tanh(x)", onnx="Tanh(x)"),
        of_output=True,
    ),
    Pointwise(
        "silu",
        lambda a, x: x * sigmoid(x),
        lambda a, x, dy: _silu_backward(x, dy),
        ("x * logistic(x)", "s = logistic(x); dy * s * (1.0f + x * (1.0f - s))"),
        "x * sigmoid(x), also called swish.",
        Calls("F.silu(x)", jax="jax.nn.silu(x)", onnx="Mul(x, Sigmoid(x))"),
    ),
    Pointwise(
        "gelu",
        lambda a, x: _gelu(x),
        lambda a, x, dy: _gelu_backward(x, dy),
        ("x * Normal(x).below", "normal = Normal(x); dy * fmaf(x * INVERSE_SQRT_2PI, normal.bell, normal.below)"),
        "x * Phi(x), exact (not the tanh approximation).",
        Calls(
            "F.gelu(x, approximate='none')", jax="jax.nn.gelu(x, approximate=False)", onnx="Gelu(x, approximate='none')"
        ),
    ),
)
OPS = (
    *kinds_of(POINTWISE),
    OpKind(
        "add",
        NoAttributes,
        same_shape,
        lambda a, inputs, call: (inputs[0] + inputs[1],),
        _add_gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        device=device("a, b", "a + b"),
        calls=Calls("x + y", jax="x + y", onnx="Add(x, y)"),
    ),
    OpKind(
        "mul",
        NoAttributes,
        same_shape,
        lambda a, inputs, call: (inputs[0] * inputs[1],),
        _mul_gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        device=device("a, b", "a * b"),
        calls=Calls("x * y", jax="x * y", onnx="Mul(x, y)"),
    ),
    OpKind(
        "scale",
        Scale,
        same_shape,
        lambda a, inputs, call: (inputs[0] * inputs[0].dtype.type(a.factor) + inputs[0].dtype.type(a.offset),),
        _scale_gradient,
        divisible=True,
        in_place=((0, 0),),
        device=device("x", "fmaf(factor, x, offset)", "factor", "offset"),
        calls=Calls("factor * x + offset", jax="factor * x + offset"),
    ),
)
LAYERS = layers_of(POINTWISE)

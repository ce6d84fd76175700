"""Elementary functions of each element: roots, absolute values, exponentials, logarithms, powers; and gelu by tanh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ops.base import Array
from mbc.ops.framework_calls import Calls
from mbc.ops.pointwise import Pointwise, kinds_of, layers_of

_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True, slots=True)
class Power(Attributes):
    """x to the power of `exponent`."""

    exponent: float


def _power(x: Array, exponent: float) -> Array:
    with np.errstate(all="ignore"):
        return np.power(x, x.dtype.type(exponent))


def _quiet(function: Callable[..., Array], *operands: Array) -> Array:
    """Return a function's result; outside its domain it is NaN or infinite, as on a GPU, without a warning."""
    with np.errstate(all="ignore"):
        return np.asarray(function(*operands))


def _gelu_tanh(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (0.5 * wide * (1 + np.tanh(_SLOPE * (wide + _CUBE * wide**3)))).astype(x.dtype)


def _gelu_tanh_backward(x: Array, dy: Array) -> Array:
    wide = x.astype(np.float64)
    t = np.tanh(_SLOPE * (wide + _CUBE * wide**3))
    slope = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * _SLOPE * (1 + 3 * _CUBE * wide**2)
    return (dy * slope).astype(x.dtype)


POINTWISE = (
    Pointwise(
        "sqrt",
        lambda a, x: _quiet(np.sqrt, x),
        lambda a, y, dy: _quiet(np.divide, dy, 2 * y),
        ("sqrtf(x)", "dy / (2.0f * y)"),
        "Square root; NaN for negative elements.",
        Calls("torch.sqrt(x)", jax="jnp.sqrt(x)", onnx="Sqrt(x)"),
        of_output=True,
    ),
    Pointwise(
        "abs",
        lambda a, x: np.abs(x),
        lambda a, x, dy: dy * np.sign(x),
        ("fabsf(x)", "x > 0.0f ? dy : x < 0.0f ? -dy : 0.0f * x"),
        "Absolute value; its gradient at 0 is 0.",
        Calls("torch.abs(x)", jax="jnp.abs(x)", onnx="Abs(x)"),
    ),
    Pointwise(
        "exp",
        lambda a, x: _quiet(np.exp, x),
        lambda a, y, dy: dy * y,
        ("expf(x)", "dy * y"),
        "Exponential.",
        Calls("torch.exp(x)", jax="jnp.exp(x)", onnx="Exp(x)"),
        of_output=True,
    ),
    Pointwise(
        "log",
        lambda a, x: _quiet(np.log, x),
        lambda a, x, dy: _quiet(np.divide, dy, x),
        ("logf(x)", "dy / x"),
        "Natural logarithm; NaN for negative elements.",
        Calls("torch.log(x)", jax="jnp.log(x)", onnx="Log(x)"),
    ),
    Pointwise(
        "pow",
        lambda a, x: _power(x, a.exponent),
        lambda a, x, dy: dy * dy.dtype.type(a.exponent) * _power(x, a.exponent - 1),
        ("power(x, exponent)", "dy * exponent * power(x, exponent - 1.0f)"),
        calls=Calls("x**exponent", jax="x**exponent", onnx="Pow(x, exponent)"),
        attributes=Power,
    ),
    Pointwise(
        "gelu_tanh",
        lambda a, x: _gelu_tanh(x),
        lambda a, x, dy: _gelu_tanh_backward(x, dy),
        (
            "x * gelu_gate(x)",
            "s = gelu_gate(x); dy * (s + 2.0f * x * s * (1.0f - s) * GELU_SLOPE * (1.0f + 3.0f * GELU_CUBE * x * x))",
        ),
        "gelu approximated by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).",
        Calls(
            "F.gelu(x, approximate='tanh')", jax="jax.nn.gelu(x, approximate=True)", onnx="Gelu(x, approximate='tanh')"
        ),
    ),
)
OPS = kinds_of(POINTWISE)
LAYERS = layers_of(POINTWISE)

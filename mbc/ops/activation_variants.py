"""Activations of mobile and later networks: hard (piecewise) activations, elu, mish, softplus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ops.activation import sigmoid
from mbc.ops.base import Array
from mbc.ops.framework_calls import Calls
from mbc.ops.pointwise import Pointwise, kinds_of, layers_of


@dataclass(frozen=True, slots=True)
class Elu(Attributes):
    """x where x > 0, else alpha * (exp(x) - 1). `alpha` is positive, so that the gradient follows from the output."""

    alpha: float = 1.0


def _hardsigmoid(x: Array) -> Array:
    return np.clip(x + 3, 0, 6) / 6


def _hardswish_slope(x: Array) -> Array:
    return np.where(x <= -3, 0, np.where(x < 3, x / 3 + 0.5, 1)).astype(x.dtype)


def _elu(a: Elu, x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)) * x.dtype.type(a.alpha))


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish_slope(x: Array) -> Array:
    t = np.tanh(softplus(x))
    return t + x * sigmoid(x) * (1 - t * t)


POINTWISE = (
    # The gradient is zero at 0 and at 6, as in PyTorch.
    Pointwise(
        "relu6",
        lambda a, x: np.clip(x, 0, 6),
        lambda a, y, dy: np.where((y > 0) & (y < 6), dy, 0).astype(dy.dtype),
        ("relu6(x)", "y > 0.0f && y < 6.0f ? dy : 0.0f"),
        "min(max(x, 0), 6).",
        Calls("F.relu6(x)", jax="jax.nn.relu6(x)", onnx="Clip(x, 0.0, 6.0)"),
        of_output=True,
    ),
    # The gradient reads the input: the output rounded to 16 bits may be 1 where the gradient is not zero.
    Pointwise(
        "hardsigmoid",
        lambda a, x: _hardsigmoid(x),
        lambda a, x, dy: np.where((x > -3) & (x < 3), dy / 6, 0).astype(dy.dtype),
        ("relu6(x + 3.0f) / 6.0f", "x > -3.0f && x < 3.0f ? dy / 6.0f : 0.0f"),
        "min(max(x + 3, 0), 6) / 6.",
        Calls(
            "F.hardsigmoid(x)",
            exact="F.relu6(x + 3) / 6",  # the call divides its gradient by 6 in fp32
            jax="jax.nn.hard_sigmoid(x)",
            onnx="HardSigmoid(x, alpha=1 / 6, beta=0.5)",
        ),
    ),
    Pointwise(
        "hardswish",
        lambda a, x: x * _hardsigmoid(x),
        lambda a, x, dy: dy * _hardswish_slope(x),
        ("x * (relu6(x + 3.0f) / 6.0f)", "dy * (x <= -3.0f ? 0.0f : x < 3.0f ? x / 3.0f + 0.5f : 1.0f)"),
        "x * hardsigmoid(x).",
        Calls("F.hardswish(x)", jax="jax.nn.hard_swish(x)", onnx="HardSwish(x)"),
    ),
    Pointwise(
        "elu",
        _elu,
        lambda a, y, dy: np.where(y > 0, dy, dy * (y + dy.dtype.type(a.alpha))),
        ("x > 0.0f ? x : alpha * expm1f(x)", "y > 0.0f ? dy : dy * (y + alpha)"),
        calls=Calls("F.elu(x, alpha)", jax="jax.nn.elu(x, alpha)", onnx="Elu(x, alpha=alpha)"),
        attributes=Elu,
        of_output=True,
    ),
    Pointwise(
        "mish",
        lambda a, x: x * np.tanh(softplus(x)),
        lambda a, x, dy: dy * _mish_slope(x),
        ("x * tanhf(softplus(x))", "t = tanhf(softplus(x)); dy * (t + x * logistic(x) * (1.0f - t * t))"),
        "x * tanh(softplus(x)).",
        Calls("F.mish(x)", jax="jax.nn.mish(x)", onnx="Mish(x)"),
    ),
    Pointwise(
        "softplus",
        lambda a, x: softplus(x),
        lambda a, y, dy: dy * -np.expm1(-y),
        ("softplus(x)", "dy * -expm1f(-y)"),
        calls=Calls("F.softplus(x)", jax="jax.nn.softplus(x)", onnx="Softplus(x)"),
        of_output=True,
    ),
)
OPS = kinds_of(POINTWISE)
LAYERS = layers_of(POINTWISE)

"""Elementwise operations: activations, addition and multiplication, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, NoAttributes, OpKind, ShapeError
from mbc.ops.device import device
from mbc.ops.erf import erf


@dataclass(frozen=True, slots=True)
class LeakyRelu(Attributes):
    """x where x > 0, else slope * x. `slope` is positive, so that the output has the sign of the input."""

    slope: float = 0.01


@dataclass(frozen=True, slots=True)
class Scale(Attributes):
    """factor * x + offset."""

    factor: float = 1.0
    offset: float = 0.0


def _same(_: Any, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    first = inputs[0]
    for other in inputs[1:]:
        if other.shape != first.shape:
            raise ShapeError(f"the shapes {first} and {other} differ")
        if other.dtype != first.dtype:
            raise ShapeError(f"the element types of {first} and {other} differ")
    return (first,)


Rule = Callable[[Any, Array], Array]
BackwardRule = Callable[[Any, Array, Array], Array]


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


def _forward(rule: Rule) -> Callable[[Any, Sequence[Array], Call], tuple[Array, ...]]:
    return lambda a, inputs, call: (rule(a, inputs[0]),)


def _backward(rule: BackwardRule) -> Callable[[Any, Sequence[Array], Call], tuple[Array, ...]]:
    return lambda a, inputs, call: (rule(a, inputs[0], inputs[1]),)


def _gradient(of_output: bool) -> Callable[[Gradients, Operation, tuple[str | None, ...]], tuple[str | None, ...]]:
    """Return the gradient rule of an activation whose `<kind>_backward` reads dy and its output (or its input)."""

    def rule(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
        (dy,) = dys
        (x,) = op.inputs
        if dy is None or not g.needs(x):
            return (None,)
        read = op.outputs[0] if of_output else x
        return (g.emit(f"{op.kind}_backward", op.attributes, (read, dy), x)[0],)

    return rule


def activation(
    name: str,
    attributes: type[Attributes],
    forward: Rule,
    backward: BackwardRule,
    of_output: bool,
    texts: tuple[str, ...],
    signs: tuple[int, ...] = (),
) -> tuple[OpKind, OpKind]:
    """Return the kind `name` and the kind of its gradient, which reads dy and the output (or the input).

    Args:
        name: Name of the kind.
        attributes: Class of its attributes.
        forward: Computes the output from attributes and input.
        backward: Computes the gradient of the input from attributes, output (or input) and dy.
        of_output: Whether the gradient reads the output rather than the input.
        texts: The device expressions of the output over `x`, and of the gradient over `dy` and `y` (or `x`); then the
            names of attributes that these read.
        signs: Inputs of the gradient of which only the sign is read.
    """
    text, backward_text, *reals = texts
    return (
        OpKind(
            name,
            attributes,
            _same,
            _forward(forward),
            _gradient(of_output),
            divisible=True,
            in_place=((0, 0),),
            device=device("x", text, *reals),
        ),
        OpKind(
            f"{name}_backward",
            attributes,
            _same,
            _backward(backward),
            divisible=True,
            in_place=((0, 1),),
            signs=signs,
            device=device("y, dy" if of_output else "x, dy", backward_text, *reals),
        ),
    )


def _add_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return dys[0], dys[0]


def _mul_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    a, b = op.inputs
    if dy is None:
        return None, None
    da = g.emit("mul", NoAttributes(), (dy, b), a)[0] if g.needs(a) else None
    db = g.emit("mul", NoAttributes(), (dy, a), b)[0] if g.needs(b) else None
    return da, db


def _scale_gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    (x,) = op.inputs
    assert isinstance(op.attributes, Scale)
    if dy is None or not g.needs(x):
        return (None,)
    return (g.emit("scale", Scale(op.attributes.factor), (dy,), x)[0],)


OPS = (
    # NaN passes through relu, as in cuDNN and PyTorch: maximum(NaN, 0) is NaN.
    *activation(
        "relu",
        NoAttributes,
        lambda a, x: np.maximum(x, 0),
        lambda a, y, dy: np.where(y > 0, dy, 0).astype(dy.dtype),
        of_output=True,
        texts=("x < 0.0f ? 0.0f : x", "y > 0.0f ? dy : 0.0f"),
        signs=(0,),
    ),
    *activation(
        "leaky_relu",
        LeakyRelu,
        lambda a, x: np.where(x > 0, x, x * x.dtype.type(a.slope)),
        lambda a, y, dy: np.where(y > 0, dy, dy * dy.dtype.type(a.slope)),
        of_output=True,
        texts=("x < 0.0f ? slope * x : x", "y > 0.0f ? dy : slope * dy", "slope"),
        signs=(0,),
    ),
    *activation(
        "sigmoid",
        NoAttributes,
        lambda a, x: sigmoid(x),
        lambda a, y, dy: dy * y * (1 - y),
        of_output=True,
        texts=("logistic(x)", "dy * y * (1.0f - y)"),
    ),
    *activation(
        "tanh",
        NoAttributes,
        lambda a, x: np.tanh(x),
        lambda a, y, dy: dy * (1 - y * y),
        of_output=True,
        texts=("tanhf(x)", "dy * (1.0f - y * y)"),
    ),
    *activation(
        "silu",
        NoAttributes,
        lambda a, x: x * sigmoid(x),
        lambda a, x, dy: _silu_backward(x, dy),
        of_output=False,
        texts=("x * logistic(x)", "s = logistic(x); dy * s * (1.0f + x * (1.0f - s))"),
    ),
    *activation(
        "gelu",
        NoAttributes,
        lambda a, x: _gelu(x),
        lambda a, x, dy: _gelu_backward(x, dy),
        of_output=False,
        texts=("x * Normal(x).below", "normal = Normal(x); dy * fmaf(x * INVERSE_SQRT_2PI, normal.bell, normal.below)"),
    ),
    OpKind(
        "add",
        NoAttributes,
        _same,
        lambda a, inputs, call: (inputs[0] + inputs[1],),
        _add_gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        device=device("a, b", "a + b"),
    ),
    OpKind(
        "mul",
        NoAttributes,
        _same,
        lambda a, inputs, call: (inputs[0] * inputs[1],),
        _mul_gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        device=device("a, b", "a * b"),
    ),
    OpKind(
        "scale",
        Scale,
        _same,
        lambda a, inputs, call: (inputs[0] * inputs[0].dtype.type(a.factor) + inputs[0].dtype.type(a.offset),),
        _scale_gradient,
        divisible=True,
        in_place=((0, 0),),
        device=device("x", "fmaf(factor, x, offset)", "factor", "offset"),
    ),
)


def plain(name: str, text: str) -> Layer:
    """Return the layer of an operation without settings and with the help `text`."""
    return Layer(name, (), lambda builder, settings, inputs: builder.emit(name, NoAttributes(), inputs)[0], help=text)


LAYERS = (
    plain("relu", "max(x, 0)."),
    plain("sigmoid", "1 / (1 + exp(-x))."),
    plain("tanh", "Hyperbolic tangent."),
    plain("silu", "x * sigmoid(x), also called swish."),
    plain("gelu", "x * Phi(x), exact (not the tanh approximation)."),
)

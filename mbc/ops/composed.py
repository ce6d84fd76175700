"""Activations that are written as several operations: selu, celu, glu, shrinkage, and others.

Each has the values and the gradients of its namesake in PyTorch, also at its kinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mbc.ir.graph import Attributes
from mbc.ops.activation import LEAKY_RELU, LeakyRelu, Scale
from mbc.ops.activation_variants import Elu
from mbc.ops.arithmetic import combine
from mbc.ops.base import Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.comparison import AXIS, Select
from mbc.ops.elementary import Power
from mbc.ops.framework_calls import Calls
from mbc.ops.piecewise import Clamp, Indicator
from mbc.ops.reshaping import axis_of, parts

NONE = NoAttributes()
# As in torch.nn.SELU.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
STEEP = 20.0  # above, softplus equals its argument within 2e-9


class _Writer:
    """Writer of operations of one operand, or of two of one shape, by name."""

    def __init__(self, builder: LayerBuilder) -> None:
        """Take the builder of the layer."""
        self._builder = builder

    def __call__(self, kind: str, *inputs: str, of: Attributes = NONE) -> str:
        """Return the output of an operation, which is emitted."""
        return self._builder.emit(kind, of, inputs)[0]

    def scale(self, x: str, factor: float, offset: float = 0.0) -> str:
        return x if (factor, offset) == (1.0, 0.0) else self("scale", x, of=Scale(factor, offset))

    def below(self, x: str) -> str:
        """Return min(x, 0), whose gradient at 0 is 1."""
        return self("clamp", x, of=Clamp((), (0.0,)))

    def sub(self, a: str, b: str) -> str:
        return self._combined("sub", a, b)

    def div(self, a: str, b: str) -> str:
        return self._combined("div", a, b)

    def fill(self, x: str, mask: str, value: float) -> str:
        return self("select", x, mask, of=Select("fill", value=value))

    def keep(self, x: str, mask: str) -> str:
        return self("select", x, mask, of=Select("keep"))

    def holds(self, operator: str, x: str, value: float) -> str:
        return self("indicator", x, of=Indicator(operator, value))

    def _combined(self, operator: str, a: str, b: str) -> str:
        def emit(kind: str, attributes: Attributes, values: tuple[str, ...], suffix: str) -> str:
            return self._builder.emit(kind, attributes, values)[0]

        return combine(operator, a, b, self._builder, emit)


def _elu(w: _Writer, x: str, alpha: float, scale: float, input_scale: float) -> str:
    """Return scale * (max(x, 0) + alpha * (exp(input_scale * min(x, 0)) - 1))."""
    if alpha == 0.0 or input_scale == 0.0:
        return w.scale(w("relu", x), scale)
    if alpha > 0.0 and input_scale == 1.0:
        return w.scale(w("elu", x, of=Elu(alpha)), scale)
    below = w.scale(w.below(x), input_scale)
    curve = w("elu", below, of=Elu(1.0)) if input_scale > 0.0 else w.scale(w("exp", below), 1.0, -1.0)
    return w.scale(w("add", w("relu", x), w.scale(curve, alpha)), scale)


def _celu(w: _Writer, x: str, alpha: float) -> str:
    if alpha == 0.0:
        raise ShapeError("alpha is 0, but celu divides by alpha")
    return _elu(w, x, alpha, 1.0, 1.0 / alpha)


def _selu(w: _Writer, x: str) -> str:
    return _elu(w, x, SELU_ALPHA, SELU_SCALE, 1.0)


def _leaky_relu(w: _Writer, x: str, slope: float) -> str:
    if slope > 0.0:
        return w("leaky_relu", x, of=LeakyRelu(slope))
    positive = w("relu", x)
    return positive if slope == 0.0 else w("add", positive, w.scale(w.below(x), slope))


def _softplus(w: _Writer, x: str, beta: float, threshold: float) -> str:
    if beta == 0.0:
        raise ShapeError("beta is 0, but softplus divides by beta")
    steep = w.scale(x, beta)
    curve = w.scale(w("softplus", steep), 1.0 / beta)
    if threshold >= STEEP:
        return curve
    linear = w.holds("gt", steep, threshold)
    return w("add", w.keep(x, linear), w.fill(curve, linear, 0.0))


def _logsigmoid(w: _Writer, x: str) -> str:
    return w.scale(w("softplus", w.scale(x, -1.0)), -1.0)


def _softsign(w: _Writer, x: str) -> str:
    return w.div(x, w.scale(w("abs", x), 1.0, 1.0))


def _tanhshrink(w: _Writer, x: str) -> str:
    return w.sub(x, w("tanh", x))


def _threshold(w: _Writer, x: str, threshold: float, value: float) -> str:
    return w.fill(x, w.holds("le", x, threshold), value)


def _softshrink(w: _Writer, x: str, threshold: float) -> str:
    if threshold < 0.0:
        raise ShapeError(f"threshold is {threshold}, but must be at least 0")
    return w.sub(x, w("clamp", x, of=Clamp((-threshold,), (threshold,))))


def _hardshrink(w: _Writer, x: str, threshold: float) -> str:
    return w.fill(x, w.holds("le", w("abs", x), threshold), 0.0)


def _power(w: _Writer, x: str, exponent: float) -> str:
    return w("pow", w("detach", x) if exponent == 0.0 else x, of=Power(exponent))


def _glu(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    axis = axis_of(x, settings["axis"], "glu")
    if x.shape[axis] % 2:
        raise ShapeError(f"axis {axis} of {x} has {x.shape[axis]} elements, which cannot be divided into two halves")
    w = _Writer(builder)
    value, gate = parts(builder, inputs[0], (x.shape[axis] // 2,) * 2, axis)
    return w("mul", value, w("sigmoid", gate))


def _layer(name: str, text: str, write: Callable[..., str], calls: Calls, *parameters: Parameter) -> Layer:
    """Return a layer that `write` writes from its operand and its settings in order."""

    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        return write(_Writer(builder), inputs[0], *(settings[p.name] for p in parameters))

    return Layer(name, parameters, build, help=text, calls=calls)


def _number(name: str, default: float | None = None) -> Parameter:
    return Parameter(name, "float", default)


OPS: tuple[OpKind, ...] = ()

LAYERS = (
    _layer("leaky_relu", "x where positive, else slope * x.", _leaky_relu, LEAKY_RELU, _number("slope", 0.01)),
    _layer(
        "elu",
        "scale * x where positive, else scale * alpha * (exp(input_scale * x) - 1).",
        _elu,
        Calls("torch.ops.aten.elu(x, alpha, scale, input_scale)", onnx="Elu(x, alpha=alpha)"),
        _number("alpha", 1.0),
        _number("scale", 1.0),
        _number("input_scale", 1.0),
    ),
    _layer(
        "celu",
        "x where positive, else alpha * (exp(x / alpha) - 1).",
        _celu,
        Calls("F.celu(x, alpha)", onnx="Celu(x, alpha=alpha)"),
        _number("alpha", 1.0),
    ),
    _layer("selu", "elu with the alpha and the scale of self-normalizing networks.", _selu, Calls("F.selu(x)")),
    _layer(
        "softplus",
        "log(1 + exp(beta * x)) / beta, but x where beta * x is above the threshold.",
        _softplus,
        Calls("F.softplus(x, beta, threshold)", onnx="Softplus(x)"),
        _number("beta", 1.0),
        Parameter("threshold", "real", STEEP),
    ),
    _layer("logsigmoid", "log(sigmoid(x)).", _logsigmoid, Calls("torch.ops.aten.log_sigmoid(x)")),
    _layer("softsign", "x / (1 + abs(x)).", _softsign, Calls("F.softsign(x)")),
    _layer("tanhshrink", "x - tanh(x).", _tanhshrink, Calls("F.tanhshrink(x)")),
    _layer(
        "softshrink",
        "x moved towards 0 by the threshold; 0 where abs(x) is at most the threshold.",
        _softshrink,
        Calls("F.softshrink(x, threshold)"),
        _number("threshold", 0.5),
    ),
    _layer(
        "hardshrink",
        "x where its absolute value is above the threshold, else 0.",
        _hardshrink,
        Calls("F.hardshrink(x, threshold)"),
        _number("threshold", 0.5),
    ),
    _layer(
        "threshold",
        "x where it is above the threshold, else the value.",
        _threshold,
        Calls("F.threshold(x, threshold, value)"),
        _number("threshold"),
        _number("value"),
    ),
    _layer("pow", "x to a constant power, such as x ** 2.", _power, Calls("x**exponent"), _number("exponent")),
    Layer(
        "glu",
        (AXIS,),
        _glu,
        help="The first half of an axis times the sigmoid of the second.",
        calls=Calls("F.glu(x, axis)"),
    ),
)

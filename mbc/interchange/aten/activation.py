"""Elementwise layers, softmax, dropout and stochastic depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mbc.interchange.aten.base import Call, Rule, as_activation
from mbc.interchange.aten.operands import Noise, Refused, Result, Scores


def _plain(op: str, call: Call) -> Result:
    return call.elementwise(op, call.lazy("self"))


def _leaky_relu(call: Call) -> Result:
    return call.elementwise("leaky_relu", call.lazy("self"), {"slope": call.real("negative_slope", 0.01)})


def _elu(call: Call) -> Result:
    settings = {name: call.real(name, 1.0) for name in ("alpha", "scale", "input_scale")}
    return call.elementwise("elu", call.lazy("self"), settings)


def _with_reals(op: str, names: Mapping[str, tuple[str, float]], call: Call) -> Result:
    """Return a layer whose settings are real numbers; `names` maps ATen's argument to the setting and its default."""
    return call.elementwise(op, call.lazy("self"), {to: call.real(name, d) for name, (to, d) in names.items()})


def _glu(call: Call) -> Result:
    x, axis = call.along(call.activation("self"), call.integer("dim", -1))
    if x.shape[axis] % 2:
        raise Refused(f"its dimension has {x.shape[axis]} elements, which have no halves", "give it an even size")
    half = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    return replace(call.layer("glu", x, half, {"axis": axis}), view=x.view)


def _log_softmax(call: Call) -> Result:
    x, axis = call.along(call.activation("self"), call.integer("dim", 1))
    call.ignore("dtype")  # of the result, which is checked
    return replace(call.layer("log_softmax", x, x.shape, {"axis": axis}), view=x.view)


def _gelu(call: Call) -> Result:
    exact = call.text("approximate", "none") == "none"
    return call.elementwise("gelu" if exact else "gelu_tanh", call.lazy("self"))


def _prelu(call: Call) -> Result:
    x, slope = call.plain("self"), call.weight("weight")
    if len(x.shape) == 1:  # one number for each sample
        column = call.layer("reshape", x, (*x.shape, 1), {"sizes": 1})
        result = call.layer("prelu", column, column.shape, {"channels": False}, weight=slope)
        return call.layer("squeeze", result, x.shape)
    return call.layer("prelu", x, x.shape, {"channels": slope.shape != (1,)}, weight=slope)


def _softmax(call: Call) -> Result:
    scores = call.operand("self")
    if isinstance(scores, Scores):
        if scores.shares or call.integer("dim", -1) not in (-1, len(scores.shape) - 1):
            raise Refused("it takes the softmax of scores over queries", "take it over the last dimension")
        return replace(scores, shares=True)
    x, axis = call.along(call.activation("self"), call.integer("dim", 1))
    return replace(call.layer("softmax", x, x.shape, {"axis": axis}), view=x.view)


def _dropout(call: Call) -> Result:
    operand, p, is_training = call.operand("input"), call.real("p", 0.5), call.flag("train", True)
    layer = call.node.modules[-1].name if call.node.modules else ""
    if not is_training and layer.startswith("Dropout"):
        raise Refused("it drops nothing: the module is in eval mode", "export the model after model.train()")
    if p == 0.0 or not is_training:
        return operand
    if not 0.0 < p < 1.0:
        raise Refused(f"its probability is {p:g}", "give it one of at least 0 and less than 1")
    return call.elementwise("dropout", as_activation(operand), {"p": p})


def _empty(call: Call) -> Result:
    call.ignore("self")  # its type and device
    return Noise(call.node.outputs[0], call.shape_said_by("size"))


def _bernoulli(call: Call) -> Result:
    if not isinstance(call.operand("self"), Noise):
        raise Refused("it draws random numbers", "use nn.Dropout, or stochastic depth of whole samples")
    return Noise(call.node.outputs[0], call.result_shape, keep=call.real("p", 0.5))


RULES: Mapping[str, Rule] = {
    **{
        f"aten.{name}.default": partial(_plain, name)
        for name in (
            "relu",
            "relu6",
            "sigmoid",
            "tanh",
            "silu",
            "hardswish",
            "hardsigmoid",
            "mish",
            "sqrt",
            "abs",
            "exp",
            "log",
        )
    },
    "aten.leaky_relu.default": _leaky_relu,
    "aten.elu.default": _elu,
    "aten.gelu.default": _gelu,
    "aten.softplus.default": partial(
        _with_reals, "softplus", {"beta": ("beta", 1.0), "threshold": ("threshold", 20.0)}
    ),
    "aten.celu.default": partial(_with_reals, "celu", {"alpha": ("alpha", 1.0)}),
    "aten.softshrink.default": partial(_with_reals, "softshrink", {"lambd": ("threshold", 0.5)}),
    "aten.hardshrink.default": partial(_with_reals, "hardshrink", {"lambd": ("threshold", 0.5)}),
    "aten.threshold.default": partial(
        _with_reals, "threshold", {"threshold": ("threshold", 0.0), "value": ("value", 0.0)}
    ),
    "aten.selu.default": partial(_plain, "selu"),
    "aten.log_sigmoid.default": partial(_plain, "logsigmoid"),
    "aten.glu.default": _glu,
    "aten.log_softmax.int": _log_softmax,
    "aten.prelu.default": _prelu,
    "aten.softmax.int": _softmax,
    "aten.dropout.default": _dropout,
    "aten.empty.memory_format": _empty,
    "aten.new_empty.default": _empty,
    "aten.bernoulli.p": _bernoulli,
}
NOT_TAKEN: Mapping[str, str] = {
    "aten.feature_dropout.default": "use nn.Dropout",
    "aten.alpha_dropout.default": "use nn.Dropout",
    "aten.native_dropout.default": "export without decompositions",
}

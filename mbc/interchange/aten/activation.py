"""Elementwise layers, softmax, dropout and stochastic depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Noise, Refused, Result, Scores, as_activation


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


def _dropout(channels: bool, call: Call) -> Result:
    operand, p, is_training = call.operand("input"), call.real("p", 0.5), call.flag("train", True)
    layer = call.node.modules[-1].name if call.node.modules else ""
    if not is_training and layer.startswith("Dropout"):
        raise Refused("it drops nothing: the module is in eval mode", "export the model after model.train()")
    if p == 0.0 or not is_training:
        return operand
    if not 0.0 < p < 1.0:
        raise Refused(f"its probability is {p:g}", "give it one of at least 0 and less than 1")
    if channels:
        x = call.plain("input")
        return call.layer("dropout", x, x.shape, {"p": p, "channels": True})
    return call.elementwise("dropout", as_activation(operand), {"p": p})


def _empty(call: Call) -> Result:
    call.ignore("self")  # its type and device
    return Noise(call.node.outputs[0], call.shape_said_by("size"))


def _bernoulli(call: Call) -> Result:
    if not isinstance(call.operand("self"), Noise):
        raise Refused("it draws random numbers", "use nn.Dropout, or stochastic depth of whole samples")
    return Noise(call.node.outputs[0], call.result_shape, keep=call.real("p", 0.5))


RULES: Mapping[str, Rule] = {
    "aten.glu.default": _glu,
    "aten.log_softmax.int": _log_softmax,
    "aten.prelu.default": _prelu,
    "aten.softmax.int": _softmax,
    "aten.dropout.default": partial(_dropout, False),
    "aten.feature_dropout.default": partial(_dropout, True),
    "aten.empty.memory_format": _empty,
    "aten.new_empty.default": _empty,
    "aten.bernoulli.p": _bernoulli,
}
NOT_TAKEN: Mapping[str, str] = {
    "aten.alpha_dropout.default": "use nn.Dropout",
    "aten.feature_alpha_dropout.default": "use nn.Dropout2d",
    "aten.native_dropout.default": "export without decompositions",
}

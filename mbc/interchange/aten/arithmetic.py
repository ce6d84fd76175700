"""Sums, products, differences, quotients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mbc.interchange.aten.base import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    UNKNOWN,
    Activation,
    Call,
    Noise,
    Operand,
    Refused,
    Result,
    Rule,
    Unknown,
    Weight,
)


def _binary(op: str, call: Call) -> Result:
    a, b = _side(call, "self"), _side(call, "other")
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return UNKNOWN
    alpha = call.real("alpha", 1.0) if op in "+-" else 1.0
    return _combine(op, call, a, b, alpha)


def _reversed_difference(call: Call) -> Result:
    """`other - self`"""
    return _combine("-", call, _side(call, "other"), _side(call, "self"), call.real("alpha", 1.0))


def _side(call: Call, name: str) -> Operand | float:
    """A number where a number stands there, or a constant of one element."""
    if not call.is_tensor(name):
        return call.real(name, math.nan)
    found = call.operand(name)
    if isinstance(found, Weight) and found.held.kind != "parameter" and math.prod(found.shape) == 1:
        return float(call.array(found).reshape(-1)[0])
    return found


def _combine(op: str, call: Call, a: Operand | float, b: Operand | float, alpha: float) -> Result:
    if alpha != 1.0:
        if isinstance(b, float):
            b = b * alpha
        elif isinstance(b, Activation):
            b = replace(b, value=call.operator("*", alpha, b, b.shape).value)
    if isinstance(a, Noise) or isinstance(b, Noise):
        return _with_noise(op, call, a, b)
    if isinstance(a, Weight) or isinstance(b, Weight):
        return _with_weight(op, call, a, b)
    if isinstance(a, Activation) and isinstance(b, Activation):
        return _tensors(op, call, a, b)
    if isinstance(a, float) and isinstance(b, Activation):
        if op == "/":
            raise Refused("it divides by a tensor", "multiply instead")
        return _with_number(op, call, a, b, b)
    if isinstance(b, float) and isinstance(a, Activation):
        if (op in "+-" and b == 0.0) or (op in "*/" and b == 1.0):
            return a
        return _with_number(op, call, a, b, a)
    raise Refused("it has no tensor of the network", "use it on what a layer gave")


def _with_number(op: str, call: Call, a: Activation | float, b: Activation | float, x: Activation) -> Activation:
    made = call.operator(op, a, b, x.shape)
    return replace(x, value=made.value)


def _with_noise(op: str, call: Call, a: Operand | float, b: Operand | float) -> Result:
    """The noise itself, divided by what is kept of it; and a tensor times it: stochastic depth."""
    if isinstance(a, Noise) and isinstance(b, float) and op in "/*":
        return replace(a, scale=a.scale / b if op == "/" else a.scale * b)
    noise, x = (a, b) if isinstance(a, Noise) else (b, a)
    assert isinstance(noise, Noise)
    if op != "*" or not isinstance(x, Activation):
        raise Refused("it calculates with random numbers", "use nn.Dropout, or stochastic depth of whole samples")
    whole = noise.shape == (x.shape[0],) + (1,) * (len(x.seen) - 1)
    if not whole or not math.isclose(noise.scale * noise.keep, 1.0, rel_tol=1e-6):
        raise Refused(
            "it drops parts of samples, or does not scale what is kept", "drop whole samples, as mode='row' does"
        )
    return call.elementwise("drop_path", x, {"p": float(f"{1.0 - noise.keep:.12g}")})


def _with_weight(op: str, call: Call, a: Operand | float, b: Operand | float) -> Result:
    """A tensor times a parameter with a number for each channel (LayerScale): a depthwise pointwise convolution."""
    weight, x = (a, b) if isinstance(a, Weight) else (b, a)
    assert isinstance(weight, Weight)
    if not isinstance(x, Activation) or op != "*" or weight.held.kind != "parameter":
        raise Refused(
            f"it calculates with the {weight.held.kind} '{weight.held.key}'",
            "a parameter can multiply the channels of an image, and nothing else",
        )
    seen = x.seen
    padded = (1,) * (len(seen) - len(weight.shape)) + weight.shape
    axis = len(seen) - 1 if x.view == CHANNELS_LAST else 1
    if (
        len(x.shape) != 4
        or x.view not in ("plain", CHANNELS_LAST)
        or padded != tuple(x.shape[1] if i == axis else 1 for i in range(len(seen)))
    ):
        raise Refused(
            f"it multiplies {list(seen)} by the parameter '{weight.held.key}' of {list(weight.shape)}",
            "a parameter can multiply the channels of an image, and nothing else",
        )
    channels = x.shape[1]
    settings = {"channels": channels, "kernel": 1, "groups": channels}
    made = call.layer("conv", x, x.shape, settings, weight=(weight, (channels, 1, 1, 1)))
    return replace(made, view=x.view)


def _tensors(op: str, call: Call, a: Activation, b: Activation) -> Result:
    if op == "/":
        raise Refused("it divides by a tensor", "multiply instead")
    if a.view != b.view:
        a, b = (call.settle(x) if x.view in (FLAT, CHANNELS_LAST) else x for x in (a, b))
    if a.shape == b.shape and a.view == b.view:
        made = call.operator(op, a, b, a.shape)
        return replace(a, value=made.value)
    for image, gate in ((a, b), (b, a)):
        if gate.view in (GATE, image.view) and image.view in ("plain", CHANNELS_LAST) and len(image.shape) == 4:
            ones = (*image.shape[:2], 1, 1)
            if gate.shape == ones or (gate.view == GATE and gate.shape == ones[:2]):
                return replace(image, value=call.operator(op, a, b, image.shape).value)
    raise Refused(
        f"the shapes {list(a.seen)} and {list(b.seen)} differ",
        "operands have one shape, or one of them a number for each channel, [N, C, 1, 1]",
    )


def _negative(call: Call) -> Result:
    x = call.activation("self")
    return replace(x, value=call.operator("*", -1.0, x, x.shape).value)


RULES: Mapping[str, Rule] = {
    **{
        f"aten.{name}.{kind}": partial(_binary, op)
        for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))
        for kind in ("Tensor", "Scalar")
    },
    "aten.rsub.Scalar": _reversed_difference,
    "aten.neg.default": _negative,
}
NOT_TAKEN: Mapping[str, str] = {
    "aten.pow.Tensor_Scalar": "multiply the tensor by itself",
    "aten.square.default": "multiply the tensor by itself",
    "aten.sum.dim_IntList": "use the mean over all pixels",
}

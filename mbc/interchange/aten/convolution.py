"""Convolutions and fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.factors import (
    axes_of,
    channels_behind,
    factored,
    over_channels,
    regarded,
    reshaped,
    with_channels,
)
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    Activation,
    Computed,
    Factored,
    Known,
    Operand,
    Padded,
    Refused,
    Result,
    Scaled,
    Standardized,
    Weight,
    as_setting,
)
from mbc.interchange.aten.parameters import shaped
from mbc.interchange.steps import Setting

_TWO_DIMENSIONS = "images have two dimensions here: use a layer for [N, C, H, W]"


def _image(call: Call, name: str = "input") -> tuple[Activation, tuple[int, int, int, int]]:
    """Return what a convolution reads, and the zeros around it that the convolution takes into its own padding."""
    x = call.lazy(name)
    pad = (0, 0, 0, 0)
    if isinstance(x.view, Padded) and not x.view.value:
        pad, x = x.view.pad, Activation(x.value, x.shape)
    x = call.settle(x)
    if len(x.shape) != 4:
        raise Refused(f"its tensor has the shape {list(x.shape)}", _TWO_DIMENSIONS)
    return x, pad


def sides(pad: tuple[int, int, int, int]) -> int | tuple[int, ...]:
    """Return the setting for zeros above, below, left and right of an image, in as few numbers as say it."""
    top, bottom, left, right = pad
    return as_setting((top, left) if (top, left) == (bottom, right) else pad)


def _convolve(call: Call, pads: tuple[int, int, int, int], transposed: bool) -> Result:
    x, around = _image(call)
    weight, gain, standardised = _filters(call) if not transposed else (call.weight("weight"), None, {})
    bias, computed_bias = _bias(call)
    if len(weight.shape) != 4:
        raise Refused(f"its filters have the shape {list(weight.shape)}", _TWO_DIMENSIONS)
    groups = call.integer("groups", 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    top, bottom, left, right = (own + outer for own, outer in zip(pads, around, strict=True))
    settings: dict[str, Setting] = {
        "channels": channels,
        "kernel": as_setting(weight.shape[2:]),
        "stride": as_setting(call.pair("stride", 1)),
        "pad": sides((top, bottom, left, right)),
        "dilation": as_setting(call.pair("dilation", 1)),
        "groups": groups,
        "bias": bias is not None,
        **standardised,
    }
    if transposed:
        if any(around):
            raise Refused("zeros stand around the tensor of a transposed convolution", "crop its result instead")
        settings["output_pad"] = as_setting(call.pair("output_padding", 0))
    op = "conv_transpose" if transposed else "conv"
    made = call.layer(op, x, call.result_shape, settings, weight=weight, gain=gain, bias=bias)
    return _with_bias(call, made, computed_bias)


def _bias(call: Call) -> tuple[Weight | None, Operand | None]:
    """Return a bias that is a parameter, and one that is computed of parameters: one of them, or none."""
    operand = call.optional("bias")
    if isinstance(operand, Computed | Scaled) or (isinstance(operand, Known) and operand.weight is None):
        return None, operand
    return call.optional_weight("bias"), None


def _with_bias(call: Call, x: Activation, bias: Operand | None) -> Activation:
    """Return the result of a layer plus a bias that is computed, a number for each channel."""
    if bias is None:
        return x
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    return call.operator("+", x, shaped(call, bias, shape), x.shape)


def _filters(call: Call) -> tuple[Weight, tuple[Weight, tuple[int, ...]] | None, dict[str, Setting]]:
    """The filters that a convolution holds, their gains, and the settings that say what it does with these."""
    found = call.operand("weight")
    if not isinstance(found, Standardized):
        return call.weight("weight"), None, {}
    weight = replace(found.weight, shape=found.shape)
    if found.shape != weight.held.meta.sizes:
        raise Refused(f"its filters have the shape {list(found.shape)}", "give them back the shape of the parameter")
    if not found.eps > 0 or (found.gain is not None and not found.gain.factor > 0):
        raise Refused("it standardises filters with an eps or a gain factor that is not above 0", "give both above 0")
    settings: dict[str, Setting] = {"standardize": found.eps}
    if found.gain is None:
        return weight, None, settings
    # The factor as written: what is left of the root that it was divided by is rounding.
    settings["gain"] = float(f"{found.gain.factor * math.prod(found.shape[1:]) ** 0.5:.12g}")
    return weight, (found.gain.weight, found.shape[:1]), settings


def _conv2d(call: Call) -> Result:
    vertical, horizontal = call.pair("padding", 0)
    return _convolve(call, (vertical, vertical, horizontal, horizontal), transposed=False)


def _conv2d_padding(call: Call) -> Result:
    """`padding="same"`: what is odd goes to the end."""
    if call.text("padding", "valid") != "same":
        return _convolve(call, (0, 0, 0, 0), transposed=False)
    kernel, dilation = _filters(call)[0].shape[2:], call.pair("dilation", 1)
    vertical, horizontal = (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    pads = (vertical // 2, vertical - vertical // 2, horizontal // 2, horizontal - horizontal // 2)
    return _convolve(call, pads, transposed=False)


def _conv_transpose2d(call: Call) -> Result:
    vertical, horizontal = call.pair("padding", 0)
    return _convolve(call, (vertical, vertical, horizontal, horizontal), transposed=True)


def _linear(call: Call) -> Result:
    """A linear layer; one over the channels of each pixel is a pointwise convolution."""
    x = call.activation("input")
    weight, (bias, computed_bias) = call.weight("weight"), _bias(call)
    features = weight.shape[0]
    x = over_channels(call, x)
    view = channels_behind(x)
    if x.view is CHANNELS_LAST or view is not None:
        settings: Mapping[str, Setting] = {"channels": features, "kernel": 1, "bias": bias is not None}
        made = call.layer(
            "conv", x, (x.shape[0], features, *x.shape[2:]), settings, weight=(weight, (*weight.shape, 1, 1)), bias=bias
        )
        made = _with_bias(call, made, computed_bias)
        return replace(made, view=CHANNELS_LAST) if view is None else with_channels(view, made)
    if x.view is FLAT:
        x = Activation(x.value, x.shape)  # a linear layer flattens by itself
    else:
        x = call.settle(x)
        if len(x.shape) > 2:
            return _over_last(call, x, weight, bias, computed_bias)
        if len(x.shape) != 2:
            raise Refused(f"it works on {list(x.shape)}", "give it [N, ..., features]")
    settings = {"features": features, "bias": bias is not None}
    made = call.layer("linear", x, (x.shape[0], features), settings, weight=weight, bias=bias)
    return _with_bias(call, made, computed_bias)


def _over_last(
    call: Call, x: Activation, weight: Weight, bias: Weight | None, computed_bias: Operand | None
) -> Activation:
    """A linear layer over the last dimension of [N, ..., features]: a pointwise convolution of [N, features, T, 1]."""
    features, channels = weight.shape
    rows, count = x.shape[0], math.prod(x.shape[1:-1])
    x = call.layer("reshape", x, (rows, count, channels), {"sizes": (count, channels)}) if len(x.shape) > 3 else x
    x = call.layer("permute", x, (rows, channels, count), {"axes": (0, 2, 1)})
    x = call.layer("reshape", x, (rows, channels, count, 1), {"sizes": (channels, count, 1)})
    settings: Mapping[str, Setting] = {"channels": features, "kernel": 1, "bias": bias is not None}
    held = (weight, (features, channels, 1, 1))
    made = call.layer("conv", x, (rows, features, count, 1), settings, weight=held, bias=bias)
    made = _with_bias(call, made, computed_bias)
    batch, behind, positions, _ = axes_of(made)
    made = regarded(made, Factored((batch, positions, behind)))
    view = factored(made)
    split = None if view is None else reshaped(made, view, call.result_shape)
    assert split is not None  # one axis is cut into its factors
    return split


RULES: Mapping[str, Rule] = {
    "aten.conv2d.default": _conv2d,
    "aten.conv2d.padding": _conv2d_padding,
    "aten.conv_transpose2d.input": _conv_transpose2d,
    "aten.linear.default": _linear,
}
NOT_TAKEN: Mapping[str, str] = {
    "aten.conv3d.default": "images have two dimensions here, with nn.Conv2d",
    "aten.conv_transpose3d.input": "images have two dimensions here, with nn.ConvTranspose2d",
    "aten._weight_norm.default": "remove it: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    "aten.einsum.default": "use torch.matmul or nn.Linear",
    "aten.scaled_dot_product_attention.default": "mbc compiles convolutional networks, without attention",
}

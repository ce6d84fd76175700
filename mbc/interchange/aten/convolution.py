"""Convolutions and fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

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


def _image(call: Call) -> tuple[Activation, tuple[int, ...]]:
    """Return the input of a convolution, and the zeros around the input that the convolution adds to its own padding.

    Raises:
        Refused: The input has another number of axes.
    """
    x = call.lazy("input")
    pad = (0, 0) * call.rank
    if isinstance(x.view, Padded) and not x.view.value:
        pad, x = x.view.pad, Activation(x.value, x.shape)
    x = call.settle(x)
    if len(x.shape) != 2 + call.rank:
        axes = ", ".join(("D", "H", "W")[-call.rank :])
        raise Refused(f"its tensor has the shape {list(x.shape)}", f"give it [N, C, {axes}]")
    return x, pad


def sides(pad: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return the setting for zeros before and after each axis, with as few numbers as possible."""
    return as_setting(pad[::2] if pad[::2] == pad[1::2] else pad)


def _convolve(call: Call, pads: tuple[int, ...], transposed: bool) -> Result:
    x, around = _image(call)
    weight, gain, standardised = _filters(call) if not transposed else (call.weight("weight"), None, {})
    bias, computed_bias = _bias(call)
    groups = call.integer("groups", 1)
    settings: dict[str, Setting] = {
        "channels": weight.shape[1] * groups if transposed else weight.shape[0],
        "kernel": as_setting(weight.shape[2:]),
        "stride": as_setting(call.per_axis("stride", 1)),
        "pad": sides(tuple(map(sum, zip(pads, around, strict=True)))),
        "dilation": as_setting(call.per_axis("dilation", 1)),
        "groups": groups,
        "bias": bias is not None,
        **standardised,
    }
    if transposed:
        if any(around):
            raise Refused(
                "its tensor is padded with zeros, which a transposed convolution cannot take", "crop its result instead"
            )
        settings["output_pad"] = as_setting(call.per_axis("output_padding", 0))
    op = "conv_transpose" if transposed else "conv"
    result = call.layer(op, x, call.result_shape, settings, weight=weight, gain=gain, bias=bias)
    return _with_bias(call, result, computed_bias)


def _bias(call: Call) -> tuple[Weight | None, Operand | None]:
    """Return the bias as a parameter and as a value computed from parameters. At least one of both is None."""
    operand = call.optional("bias")
    if isinstance(operand, Computed | Scaled) or (isinstance(operand, Known) and operand.weight is None):
        return None, operand
    return call.optional_weight("bias"), None


def _with_bias(call: Call, x: Activation, bias: Operand | None) -> Activation:
    """Return the result of a layer plus a computed bias of one number for each channel."""
    if bias is None:
        return x
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    return call.operator("+", x, shaped(call, bias, shape), x.shape)


def _filters(call: Call) -> tuple[Weight, tuple[Weight, tuple[int, ...]] | None, dict[str, Setting]]:
    """Return the filters of a convolution, their gains, and the settings of weight standardisation.

    Raises:
        Refused: The filters have another shape than the parameter, or an eps or gain factor is not above 0.
    """
    filters = call.operand("weight")
    if not isinstance(filters, Standardized):
        return call.weight("weight"), None, {}
    weight = replace(filters.weight, shape=filters.shape)
    if filters.shape != weight.held.meta.sizes:
        raise Refused(f"its filters have the shape {list(filters.shape)}", "give them back the shape of the parameter")
    if not filters.eps > 0 or (filters.gain is not None and not filters.gain.factor > 0):
        raise Refused("it standardises filters with an eps or a gain factor that is not above 0", "give both above 0")
    settings: dict[str, Setting] = {"standardize": filters.eps}
    if filters.gain is None:
        return weight, None, settings
    # Rounding to 12 digits gives the factor as written: the division by the root left only rounding errors.
    settings["gain"] = float(f"{filters.gain.factor * math.prod(filters.shape[1:]) ** 0.5:.12g}")
    return weight, (filters.gain.weight, filters.shape[:1]), settings


def _conv(call: Call, transposed: bool = False) -> Result:
    return _convolve(call, tuple(n for n in call.per_axis("padding", 0) for _ in range(2)), transposed)


def _conv_same(call: Call) -> Result:
    """Return a convolution with `padding="same"`; an odd zero stands at the end."""
    if call.text("padding", "valid") != "same":
        return _convolve(call, (0, 0) * call.rank, transposed=False)
    axes = zip(_filters(call)[0].shape[2:], call.per_axis("dilation", 1), strict=True)
    zeros = [distance * (k - 1) for k, distance in axes]
    return _convolve(call, tuple(side for n in zeros for side in (n // 2, n - n // 2)), transposed=False)


def _linear(call: Call) -> Result:
    """Return a linear layer; over the channels of each pixel it is a pointwise convolution.

    Raises:
        Refused: The input has no dimension beside the samples.
    """
    x = call.activation("input")
    weight, (bias, computed_bias) = call.weight("weight"), _bias(call)
    features = weight.shape[0]
    x = over_channels(call, x)
    view = channels_behind(x)
    if x.view is CHANNELS_LAST or view is not None:
        settings: Mapping[str, Setting] = {"channels": features, "kernel": 1, "bias": bias is not None}
        held = (weight, (*weight.shape, *(1,) * (len(x.shape) - 2)))
        result = call.layer("conv", x, (x.shape[0], features, *x.shape[2:]), settings, weight=held, bias=bias)
        result = _with_bias(call, result, computed_bias)
        return replace(result, view=CHANNELS_LAST) if view is None else with_channels(view, result)
    if x.view is FLAT:
        x = Activation(x.value, x.shape)  # a linear layer flattens by itself
    else:
        x = call.settle(x)
        if len(x.shape) > 2:
            return _over_last(call, x, weight, bias, computed_bias)
        if len(x.shape) != 2:
            raise Refused(f"its tensor has the shape {list(x.shape)}", "give it [N, ..., features]")
    settings = {"features": features, "bias": bias is not None}
    result = call.layer("linear", x, (x.shape[0], features), settings, weight=weight, bias=bias)
    return _with_bias(call, result, computed_bias)


def _over_last(
    call: Call, x: Activation, weight: Weight, bias: Weight | None, computed_bias: Operand | None
) -> Activation:
    """Return a linear layer over the last dimension of [N, ..., features].

    The layer is a pointwise convolution of [N, features, T, 1].
    """
    features, channels = weight.shape
    rows, count = x.shape[0], math.prod(x.shape[1:-1])
    x = call.layer("reshape", x, (rows, count, channels), {"sizes": (count, channels)}) if len(x.shape) > 3 else x
    x = call.layer("permute", x, (rows, channels, count), {"axes": (0, 2, 1)})
    x = call.layer("reshape", x, (rows, channels, count, 1), {"sizes": (channels, count, 1)})
    settings: Mapping[str, Setting] = {"channels": features, "kernel": 1, "bias": bias is not None}
    held = (weight, (features, channels, 1, 1))
    result = call.layer("conv", x, (rows, features, count, 1), settings, weight=held, bias=bias)
    result = _with_bias(call, result, computed_bias)
    batch, behind, positions, _ = axes_of(result)
    result = regarded(result, Factored((batch, positions, behind)))
    view = factored(result)
    split = None if view is None else reshaped(result, view, call.result_shape)
    assert split is not None  # one axis is cut into its factors
    return split


RULES: Mapping[str, Rule] = {
    **{f"aten.conv{rank}d.default": _conv for rank in (1, 2, 3)},
    **{f"aten.conv{rank}d.padding": _conv_same for rank in (1, 2, 3)},
    **{
        f"aten.conv_transpose{rank}d.{'default' if rank == 1 else 'input'}": partial(_conv, transposed=True)
        for rank in (1, 2, 3)
    },
    "aten.linear.default": _linear,
}
NOT_TAKEN: Mapping[str, str] = {
    "aten._weight_norm.default": "remove it: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')",
    "aten.einsum.default": "use torch.matmul or nn.Linear",
}

"""Normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.factors import channels_behind, over_channels, with_channels
from mbc.interchange.aten.moments import affine, layer_norm
from mbc.interchange.aten.operands import CHANNELS_LAST, PLAIN, Refused, Result, Scaled, Standardized, Weight
from mbc.interchange.steps import Setting


def _batch_norm(call: Call) -> Result:
    normalised = call.operand("input")
    if isinstance(normalised, Weight):
        return _standardized(call, normalised)
    frozen = not call.flag("training", True)
    if frozen and not call.is_training:
        raise Refused(
            "its statistics are fixed, and nothing in the model is in training mode",
            "export the model after model.train(); batch norms in it may be in eval mode",
        )
    held = {name: call.optional_weight(name) for name in ("running_mean", "running_var")}
    tracks = None not in held.values()
    settings: dict[str, Setting] = {"eps": call.real("eps", 1e-5), "momentum": call.real("momentum", 0.1)}
    settings |= {"frozen": True} if frozen else {}
    settings |= {} if tracks else {"track": False}
    return _layer(call, "bn", settings, **(held if tracks else {}))


def _layer(call: Call, name: str, settings: Mapping[str, Setting], **held: Weight | None) -> Result:
    """Return a layer's result; a scale or an offset alone is an operator behind the layer."""
    x = call.plain("input")
    weight, bias = call.optional_weight("weight"), call.optional_weight("bias")
    if weight is not None and bias is not None:
        return call.layer(name, x, x.shape, {**settings, "affine": True}, weight=weight, bias=bias, **held)
    result = call.layer(name, x, x.shape, {**settings, "affine": False}, **held)
    return affine(call, result, weight, bias, 1)


def _standardized(call: Call, weight: Weight) -> Standardized:
    """Return filters that batch normalisation standardises as channels of one sample, as timm writes it.

    Raises:
        Refused: The parameter is not normalised filter by filter, by its own statistics.
    """
    gain = call.optional("weight")
    if isinstance(gain, Weight):
        gain = Scaled(gain, 1.0)
    filters = weight.held.meta.sizes[0] if weight.held.meta.sizes else 0
    by_filter = call.flag("training", True) and weight.shape[:2] == (1, filters)
    # Evaluation takes running statistics, not the filter's own.
    tracked = call.optional("running_mean") is not None or call.optional("running_var") is not None
    call.ignore("momentum")
    if not by_filter or tracked or call.optional("bias") is not None or not (gain is None or isinstance(gain, Scaled)):
        raise Refused(
            f"it normalises the parameter '{weight.held.key}', and not each filter by itself, times a gain",
            "normalise weight.reshape(1, filters, -1) in training mode, without a bias and running statistics, as "
            "timm's StdConv2d does",
        )
    return Standardized(weight, weight.shape, call.real("eps", 1e-5), gain)


def _layer_norm(call: Call) -> Result:
    x = over_channels(call, call.activation("input"))
    weight, bias = call.optional_weight("weight"), call.optional_weight("bias")
    sizes = call.ints("normalized_shape")
    view = channels_behind(x)
    pixels = x.view is CHANNELS_LAST or view is not None or (x.view is PLAIN and len(x.shape) == 2)
    if not pixels or sizes != (x.shape[1],) or (weight is None) is not (bias is None):
        return layer_norm(call, x)
    settings: Mapping[str, Setting] = {"eps": call.real("eps", 1e-5), "affine": weight is not None}
    result = call.layer("layer_norm", x, x.shape, settings, weight=weight, bias=bias)
    return replace(result, view=x.view) if view is None else with_channels(view, result)


def _group_norm(call: Call) -> Result:
    return _layer(call, "group_norm", {"groups": call.integer("num_groups", 1), "eps": call.real("eps", 1e-5)})


def _instance_norm(call: Call) -> Result:
    call.ignore("momentum")  # the momentum of running statistics, which the layer has not
    tracked = call.optional("running_mean") is not None or call.optional("running_var") is not None
    if tracked or not call.flag("use_input_stats", True):
        raise Refused("it keeps running statistics", "build it with track_running_stats=False")
    return _layer(call, "instance_norm", {"eps": call.real("eps", 1e-5)})


def _local_response_norm(call: Call) -> Result:
    """Return local response normalisation, which is an operation of ONNX but not of ATen."""
    x = call.plain("self")
    settings: Mapping[str, Setting] = {
        "size": call.integer("size", 5), "alpha": call.real("alpha", 1e-4), "beta": call.real("beta", 0.75),
        "k": call.real("k", 1.0),
    }  # fmt: skip
    return call.layer("lrn", x, x.shape, settings)


RULES: Mapping[str, Rule] = {
    "onnx.LRN": _local_response_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten.layer_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.instance_norm.default": _instance_norm,
}
NOT_TAKEN: Mapping[str, str] = {}

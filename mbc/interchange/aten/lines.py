"""Layers over one axis, [N, C, L]: layers of images of height 1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.convolution import sides
from mbc.interchange.aten.operands import Activation, Refused, Result, Untaken, Weight, as_setting
from mbc.interchange.steps import Setting

_Shaped = tuple[Weight, tuple[int, ...]]


def _image(call: Call, name: str = "self", least: int = 3) -> Activation:
    """Return a tensor [N, C, L] as images of height 1; [N, L] as images of one channel if `least` is 2.

    Raises:
        Refused: The tensor has another number of dimensions.
    """
    x = call.plain(name)
    if not least <= len(x.shape) <= 3:
        raise Refused(f"its tensor has the shape {list(x.shape)}", "give it [N, C, L]")
    sizes = (*(1,) * (3 - len(x.shape)), *x.shape[1:-1], 1, x.shape[-1])
    return call.layer("reshape", x, (x.shape[0], *sizes), {"sizes": sizes})


def _line(
    call: Call, op: str, image: Activation, settings: Mapping[str, Setting], **states: Weight | _Shaped | None
) -> Activation:
    """Return the result of a layer of images of height 1, without the height."""
    shape = call.result_shape
    sizes = (*(1,) * (3 - len(shape)), *shape[1:-1], 1, shape[-1])
    result = call.layer(op, image, (shape[0], *sizes), settings, **states)
    return call.layer("reshape", result, shape, {"sizes": shape[1:]})


def _one(call: Call, name: str, default: int) -> int:
    return call.ints(name, (default,))[0]


def _window(call: Call) -> dict[str, Setting]:
    kernel = _one(call, "kernel_size", 1)
    stride = (*call.ints("stride"), kernel)[0]
    return {
        "kernel": (1, kernel), "stride": (1, stride), "pad": (0, _one(call, "padding", 0)),
        "ceil": call.flag("ceil_mode", False),
    }  # fmt: skip


def _max_pool(call: Call) -> Result:
    if _one(call, "dilation", 1) != 1:
        raise Refused("its windows are dilated", "use dilation=1")
    return _line(call, "maxpool", _image(call, least=2), _window(call))


def _average_pool(call: Call) -> Result:
    counted = call.flag("count_include_pad", True)
    return _line(call, "avgpool", _image(call, least=2), _window(call) | {"count_pad": counted})


def _adaptive(op: str, call: Call) -> Activation:
    return _line(call, f"adaptive_{op}", _image(call, least=2), {"size": (1, _one(call, "output_size", 1))})


def _adaptive_max(call: Call) -> Result:
    return _adaptive("maxpool", call), Untaken(
        "it takes the positions of maxima", "use the maxima alone (return_indices=False)"
    )


def _upsample(mode: str, call: Call) -> Result:
    name = "input" if call.is_tensor("input") else "self"
    if call.flag("align_corners", False):
        raise Refused("its corners are aligned", "use align_corners=False")
    before, after = call.plain(name).shape[-1], call.shape_said_by("output_size")[-1]
    factors = call.argument("scale_factors")
    factor = factors[0] if isinstance(factors, tuple) else call.argument("scales")
    if factor is not None and (not isinstance(factor, float | int) or before * factor != after):
        raise Refused("its factor gives no whole size", "give interpolate a size, or recompute_scale_factor=True")
    if before == after:
        return call.plain(name)
    return _line(call, "upsample", _image(call, name), {"mode": mode, "size": (1, after)})


def _convolution(call: Call, pad: int | tuple[int, ...]) -> Result:
    image = _image(call, "input")
    weight, bias = call.weight("weight"), call.optional_weight("bias")
    filters, each, size = weight.shape
    settings: dict[str, Setting] = {
        "channels": filters, "kernel": as_setting((1, size)), "stride": as_setting((1, _one(call, "stride", 1))),
        "pad": pad, "dilation": as_setting((1, _one(call, "dilation", 1))), "groups": call.integer("groups", 1),
        "bias": bias is not None,
    }  # fmt: skip
    return _line(call, "conv", image, settings, weight=(weight, (filters, each, 1, size)), bias=bias)


def _conv1d(call: Call) -> Result:
    return _convolution(call, as_setting((0, _one(call, "padding", 0))))


def _conv1d_padding(call: Call) -> Result:
    """Return a convolution with `padding="same"`; an odd zero stands at the end."""
    if call.text("padding", "valid") != "same":
        return _convolution(call, 0)
    zeros = _one(call, "dilation", 1) * (call.weight("weight").shape[2] - 1)
    return _convolution(call, sides((0, 0, zeros // 2, zeros - zeros // 2)))


def _conv_transpose(call: Call) -> Result:
    image = _image(call, "input")
    weight, bias = call.weight("weight"), call.optional_weight("bias")
    each, size = weight.shape[1:]
    groups = call.integer("groups", 1)
    settings: dict[str, Setting] = {
        "channels": each * groups, "kernel": (1, size), "stride": (1, _one(call, "stride", 1)),
        "pad": (0, _one(call, "padding", 0)), "output_pad": (0, _one(call, "output_padding", 0)),
        "dilation": (1, _one(call, "dilation", 1)), "groups": groups, "bias": bias is not None,
    }  # fmt: skip
    return _line(call, "conv_transpose", image, settings, weight=(weight, (weight.shape[0], each, 1, size)), bias=bias)


RULES: Mapping[str, Rule] = {
    "aten.max_pool1d.default": _max_pool,
    "aten.avg_pool1d.default": _average_pool,
    "aten.adaptive_avg_pool1d.default": partial(_adaptive, "avgpool"),
    "aten.adaptive_max_pool1d.default": _adaptive_max,
    "aten.conv1d.default": _conv1d,
    "aten.conv1d.padding": _conv1d_padding,
    "aten.conv_transpose1d.default": _conv_transpose,
    **{f"aten.upsample_nearest1d.{kind}": partial(_upsample, "nearest") for kind in ("vec", "default")},
    **{f"aten.upsample_linear1d.{kind}": partial(_upsample, "bilinear") for kind in ("vec", "default")},
}
NOT_TAKEN: Mapping[str, str] = {}

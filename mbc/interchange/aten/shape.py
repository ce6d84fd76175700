"""Shapes and orders of axes: most of these operations only change the view of a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.constants import constant_of, is_number
from mbc.interchange.aten.factors import axes_of, factored, permuted, reshaped
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    PLAIN,
    UNKNOWN,
    Activation,
    Expanded,
    Factored,
    Known,
    Noise,
    Refused,
    Result,
    Scaled,
    Scores,
    Standardized,
    Weight,
    as_activation,
)
from mbc.interchange.aten.operation_schemas import RESHAPES, SHAPE_ARGUMENTS
from mbc.interchange.steps import Step

_ROWS = "keep the samples of a mini-batch apart, in dimension 0"


def _same(call: Call) -> Result:
    return call.operand("self")


def _reshape(call: Call) -> Result:
    """Return a tensor in another shape with its elements in the same order (`view`, `flatten`, `squeeze`, ...).

    Raises:
        Refused: The first dimension is not the samples.
    """
    x = call.operand("self")
    shape = call.shape_said_by(*SHAPE_ARGUMENTS)
    if isinstance(x, Scores | Weight | Noise | Standardized):
        return replace(x, shape=shape)
    if isinstance(x, Scaled):
        return replace(x, weight=replace(x.weight, shape=shape))
    x = as_activation(x)
    if shape == x.seen:
        return x
    rows = x.shape[0]
    if isinstance(x.view, Factored) or (x.view is CHANNELS_LAST and shape[-1:] == x.shape[1:2] and len(x.shape) == 4):
        return _by_factors(x, shape)
    if x.view in (FLAT, GATE) and shape == x.shape:
        return replace(x, view=PLAIN)
    pixels = math.prod(x.shape[2:])
    in_order = x.view == PLAIN or (x.view == CHANNELS_LAST and pixels == 1)
    if in_order and shape == (rows, math.prod(x.shape[1:])):
        return replace(x, view=FLAT)
    if x.view == PLAIN and len(x.shape) == 2 and shape == (*x.shape, 1, 1):
        return replace(x, view=GATE)
    if not shape or shape[0] != rows:
        raise Refused(f"it makes {list(shape)} of {list(x.seen)}", _ROWS)
    if x.view in (FLAT, GATE):  # the same bytes
        x = replace(x, view=PLAIN)
    return in_shape(call, call.settle(x), shape)


def _by_factors(x: Activation, shape: tuple[int, ...]) -> Activation:
    view = factored(x)
    result = None if view is None else reshaped(x, view, shape)
    if result is None:
        raise Refused(f"it makes {list(shape)} of {list(x.seen)}", "join and split whole axes")
    return result


def _swaps_groups(step: Step, rank: int) -> bool:
    """Return True for a step that exchanges groups of channels with the channels of each group."""
    return step.op == "permute" and step.settings["axes"] == (0, 2, 1, *range(3, rank))


def in_shape(call: Call, x: Activation, shape: tuple[int, ...]) -> Activation:
    """Return a tensor in another shape, skipping earlier reshapes; ShuffleNet's shuffle is `channel_shuffle`."""
    while (origin := call.maker(x)) is not None and origin[0].op in ("reshape", "flatten", "squeeze"):
        x = origin[1]
    if x.shape == shape:
        return x
    if origin is not None and _swaps_groups(origin[0], len(x.shape)):
        grouped = call.maker(origin[1])
        rows, groups, size, *others = origin[1].shape
        joined = (rows, groups * size, *others)
        if grouped is not None and grouped[0].op == "reshape" and grouped[1].shape == joined == shape:
            return call.layer("channel_shuffle", grouped[1], shape, {"groups": groups})
    if len(shape) == 1:
        return call.layer("squeeze", x, shape)
    return call.layer("reshape", x, shape, {"sizes": shape[1:]})


def _movedim(call: Call) -> Result:
    x = call.lazy("self")
    rank = len(x.seen)
    source, destination = (tuple(d % rank for d in call.ints(name)) for name in ("source", "destination"))
    order = [d for d in range(rank) if d not in source]
    for place, axis in sorted(zip(destination, source, strict=True)):
        order.insert(place, axis)
    return _permuted(call, x, tuple(order))


def _detach(call: Call) -> Result:
    """Return a tensor through which no gradient flows."""
    operand = call.operand("self")
    return operand if is_number(operand) else call.elementwise("detach", as_activation(operand))


def _permute(call: Call) -> Result:
    x = call.lazy("self")
    rank = len(x.seen)
    return _permuted(call, x, tuple(d % rank for d in call.ints("dims")))


def _transpose(call: Call) -> Result:
    x = call.lazy("self")
    order = list(range(len(x.seen)))
    a, b = call.integer("dim0", 0), call.integer("dim1", 0)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, x, tuple(order))


def _permuted(call: Call, x: Activation, dims: tuple[int, ...]) -> Activation:
    if x.view == PLAIN and dims == (0, 2, 1) and (origin := call.maker(x)) is not None:
        # The tensor is the pixels of an image in order: a view moves nothing before a layer needs it.
        step, before = origin
        if step.op == "reshape" and len(before.shape) == 4 and before.shape[1] == x.shape[1]:
            x = _by_factors(replace(before, view=Factored(axes_of(before))), x.shape)
    if isinstance(x.view, Factored):
        return permuted(x, x.view, dims)
    if x.view is CHANNELS_LAST and len(x.shape) == 4:
        x, dims = replace(x, view=PLAIN), tuple((0, 2, 3, 1)[d] for d in dims)
    if x.view != PLAIN:
        x = call.settle(x)
    if dims == tuple(range(len(dims))):
        return x
    if dims == (0, 2, 3, 1):
        return replace(x, view=CHANNELS_LAST)
    if dims[0] != 0:
        raise Refused(f"it permutes {list(x.shape)} by {list(dims)}", _ROWS)
    return call.layer("permute", x, tuple(x.shape[d] for d in dims), {"axes": dims})


def _expand(call: Call) -> Result:
    """Return a repeated tensor as a view, because operators repeat their operands without a layer.

    Raises:
        Refused: A parameter, or the samples, would be repeated.
    """
    x, shape = call.operand("self"), call.shape_said_by("size", "other")
    if is_number(x) and (numbers := constant_of(call, x)) is not None:
        return Known(np.broadcast_to(numbers.array, shape))
    if isinstance(x, Weight) and x.shape[:1] == (1,) and x.shape[1:] == shape[1:]:
        return x  # operators and `cat` repeat parameters for each sample
    if isinstance(x, Weight):
        raise Refused(f"it repeats the {x.held.kind} '{x.held.key}'", "leave expand out: + - * / repeat their operands")
    x = as_activation(x)
    if x.seen == shape:
        return x
    if not isinstance(x.view, Expanded):
        x = call.settle(x)
    if len(x.shape) != len(shape) or x.shape[0] != shape[0]:
        raise Refused(f"it makes {list(shape)} of {list(x.seen)}", _ROWS)
    return replace(x, view=Expanded(shape))


def _channel_shuffle(call: Call) -> Result:
    x = call.plain("self")
    return call.layer("channel_shuffle", x, x.shape, {"groups": call.integer("groups", 1)})


def _pixel_shuffle(op: str, factor: str, call: Call) -> Result:
    x = call.plain("self")
    if len(x.shape) != 4:  # the channels are the third last axis
        raise Refused(f"it shuffles pixels of {list(x.shape)}", "reshape and permute volumes and signals")
    return call.layer(op, x, call.result_shape, {"factor": call.integer(factor, 1)})


def _part(call: Call) -> Result:
    """Return nothing for a node that is part of a layer: a reader has combined several nodes in the last of them."""
    return UNKNOWN


RULES: Mapping[str, Rule] = {
    "onnx.part": _part,
    **{
        f"aten.{name}": _same
        for name in (
            "contiguous.default", "clone.default", "alias.default", "lift_fresh_copy.default", "lift_fresh.default",
        )
    },
    **dict.fromkeys(RESHAPES, _reshape),
    "aten.detach.default": _detach,
    **{f"aten.{name}.{kind}": _movedim for name in ("movedim", "moveaxis") for kind in ("int", "intlist")},
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.channel_shuffle.default": _channel_shuffle,
    "aten.pixel_shuffle.default": partial(_pixel_shuffle, "pixel_shuffle", "upscale_factor"),
    "aten.pixel_unshuffle.default": partial(_pixel_shuffle, "pixel_unshuffle", "downscale_factor"),
}  # fmt: skip
NOT_TAKEN: Mapping[str, str] = {}

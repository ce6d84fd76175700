"""Shapes: most of it only changes how a tensor is regarded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mbc.interchange.aten.base import (
    CHANNELS_LAST,
    FLAT,
    GATE,
    PADDED,
    PLAIN,
    Activation,
    Call,
    Noise,
    Refused,
    Result,
    Rule,
    Weight,
    as_activation,
)

_SHAPES = "flatten to [N, features], permute to [N, H, W, C] and back; other shapes stay as they are"


def _same(call: Call) -> Result:
    return call.operand("self")


def _reshape(call: Call) -> Result:
    """`view`, `reshape`, `flatten`, `unsqueeze`, `squeeze`: whatever keeps the order of elements."""
    x = call.operand("self")
    shape = call.result_shape
    if isinstance(x, Weight):
        return replace(x, shape=shape)
    if isinstance(x, Noise):
        return replace(x, shape=shape)
    x = as_activation(x)
    if shape == x.seen:
        return x
    rows = x.shape[0]
    if x.view in (FLAT, GATE) and shape == x.shape:
        return replace(x, view=PLAIN)
    pixels = math.prod(x.shape[2:])
    in_order = x.view == PLAIN or (x.view == CHANNELS_LAST and pixels == 1)
    if in_order and shape == (rows, math.prod(x.shape[1:])):
        return replace(x, view=FLAT)
    if x.view == PLAIN and len(x.shape) == 2 and shape == (*x.shape, 1, 1):
        return replace(x, view=GATE)
    raise Refused(f"it makes {list(shape)} of {list(x.seen)}", _SHAPES)


def _permute(call: Call) -> Result:
    x = call.activation("self")
    rank = len(x.seen)
    dims = tuple(d % rank for d in call.ints("dims"))
    if dims == tuple(range(rank)):
        return x
    if x.view == PLAIN and dims == (0, 2, 3, 1):
        return replace(x, view=CHANNELS_LAST)
    if x.view == CHANNELS_LAST and dims == (0, 3, 1, 2):
        return replace(x, view=PLAIN)
    raise Refused(f"it permutes {list(x.seen)} by {list(dims)}", _SHAPES)


def _cat(call: Call) -> Result:
    parts = [as_activation(x) for x in call.operands("tensors")]
    if len(parts) == 1:
        return parts[0]
    view = parts[0].view
    if view not in (PLAIN, CHANNELS_LAST) or any(x.view != view for x in parts):
        parts, view = [call.settle(x) for x in parts], PLAIN
    rank = len(parts[0].seen)
    axis = call.integer("dim", 0) % rank
    if axis != (rank - 1 if view == CHANNELS_LAST else 1):
        raise Refused(f"it joins along dimension {axis}", "join channels")
    first = parts[0].shape
    channels = sum(x.shape[1] for x in parts)
    made = call.layer("concat", parts, (first[0], channels, *first[2:]))
    return replace(made, view=view)


def _pad(call: Call) -> Result:
    """Zeros around images are what the convolution behind them takes in."""
    x = call.activation("self") if call.is_tensor("self") else call.activation("input")
    pads = call.ints("pad")
    if not any(pads):
        return x
    value = call.node.arguments.get("value")
    outside = len(pads) > 4 and any(pads[4:])
    if call.text("mode", "constant") != "constant" or value not in (None, 0, 0.0) or outside or min(pads) < 0:
        raise Refused(
            "it pads by something else than zeros around images", "pad with zeros where a convolution follows"
        )
    left, right, top, bottom = (*pads, 0, 0)[:4]
    if x.view not in (PLAIN, PADDED) or len(x.shape) != 4:
        raise Refused(f"it pads {list(x.seen)}", "pad images where a convolution follows")
    outer = x.pad
    pad = (outer[0] + top, outer[1] + bottom, outer[2] + left, outer[3] + right)
    return Activation(x.value, x.shape, PADDED, pad)


RULES: Mapping[str, Rule] = {
    **{
        f"aten.{name}": _same
        for name in (
            "contiguous.default", "clone.default", "alias.default", "lift_fresh_copy.default",
        )
    },
    **{
        f"aten.{name}": _reshape
        for name in (
            "view.default", "reshape.default", "flatten.using_ints", "unsqueeze.default", "squeeze.default",
            "squeeze.dim", "squeeze.dims", "unflatten.int", "view_as.default",
        )
    },
    "aten.permute.default": _permute,
    "aten.cat.default": _cat,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
}  # fmt: skip
NOT_TAKEN: Mapping[str, str] = {
    "aten.transpose.int": _SHAPES,
    "aten.chunk.default": "compute the parts by two layers",
    "aten.split.Tensor": "compute the parts by several layers",
    "aten.split_with_sizes.default": "compute the parts by several layers",
    "aten.slice.Tensor": "compute what is needed by a layer of its own",
    "aten.select.int": "compute what is needed by a layer of its own",
    "aten.index.Tensor": "compute what is needed by a layer of its own",
    "aten.stack.default": "join channels by torch.cat",
    "aten.expand.default": "multiply or add with [N, C, 1, 1], which is broadcast",
    "aten.roll.default": _SHAPES,
    "aten.repeat.default": _SHAPES,
    "aten.to.dtype": "compute in one type: train { precision = bf16 } says in which",
    "aten.detach.default": "gradients flow through everything that a loss depends on",
}

"""Shapes, parts, concatenation and padding."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mbc.interchange.aten.base import Refused
from mbc.interchange.from_onnx import patterns
from mbc.interchange.from_onnx.operator import Operator, Rule


def _reshape(op: Operator) -> None:
    op.ignore(1, "axes", "axis", "allowzero")  # the shape of the result says them
    if patterns.is_flattening(op):
        op.part()
        return
    op.result  # noqa: B018 - refused here, with the node's name, where it is not known
    op.emit("aten.reshape.default", self=op.tensor())


def _squeeze(op: Operator) -> None:
    if (found := patterns.taken(op)) is not None:
        value, axis, index = found
        op.emit("aten.select.int", self=op.graph.name(value), dim=axis, index=index)
    elif not patterns.is_unbound(op):
        _reshape(op)


def _same(op: Operator) -> None:
    op.emit("aten.alias.default", self=op.tensor())


def _cast(op: Operator) -> None:
    op.ignore("to", 1, "saturate", "round_mode")  # the type of the result says it; the others are for 8 bits and less
    if op.graph.dtype(op.input(0)) not in ("float32", "bool") or op.graph.dtype(op.outputs[0]) != "float32":
        raise Refused("it makes another type of its tensor", "export it in float32: train { precision = bf16 } does so")
    _same(op)


def _transpose(op: Operator) -> None:
    rank = len(op.sizes())
    order = op.ints("perm") or tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise Refused(f"it permutes {rank} dimensions by {list(order)[:8]}", "export the model again")
    op.emit("aten.permute.default", self=op.tensor(), dims=order)


def _concat(op: Operator) -> None:
    if (found := patterns.rolled(op)) is not None:
        value, shift, axis = found
        op.emit("aten.roll.default", self=op.graph.name(value), shifts=(shift,), dims=(axis,))
        return
    op.emit("aten.cat.default", tensors=tuple(op.tensor(n) for n in range(len(op.inputs))), dim=op.integer("axis", 1))


def _split(op: Operator) -> None:
    axis = op.integer("axis", 0)
    total = op.sizes()[axis]
    sizes = op.ints("split", 1)
    if sizes is None:
        each = -(-total // len(op.outputs))
        sizes = tuple(min(each, total - n * each) for n in range(len(op.outputs)))
    op.ignore("num_outputs")  # it has so many
    if (parts := patterns.unbound(op)) is not None:
        op.graph.emit(op, "aten.unbind.int", {"self": op.tensor(), "dim": axis}, parts)
        return
    given = {"self": op.tensor(), "split_sizes": sizes, "dim": axis}
    op.emit_all(len(op.outputs), "aten.split_with_sizes.default", **given)


def _slice(op: Operator) -> None:
    if patterns.is_part_of_roll(op) or patterns.is_part_of_selection(op):
        op.part()
        return
    shape, x = list(op.sizes()), op.tensor()
    starts, ends = op.ints("starts", 1) or (), op.ints("ends", 2) or ()
    axes = op.ints("axes", 3) or tuple(range(len(starts)))
    steps = op.ints("steps", 4) or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or not starts:
        raise Refused("its starts, ends, axes and steps are not equally many", "export the model again")
    last = len(starts) - 1
    for number, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=True)):
        if step < 1:
            raise Refused("it goes backwards", "slice forwards")
        given = {"self": x, "dim": axis % len(shape), "start": start, "end": end, "step": step}
        if number == last:
            op.emit("aten.slice.Tensor", **given)
        else:
            shape[axis] = len(range(*slice(start, end, step).indices(shape[axis])))
            x = op.step("aten.slice.Tensor", tuple(shape), **given)


def _gather(op: Operator) -> None:
    if x := patterns.flattened(op):
        op.emit("aten.reshape.default", self=op.graph.name(x))
        return
    index = op.constant(1, "index")
    if index is not None and index.ndim and op.graph.array(op.input(0)) is not None and not op.integer("axis", 0):
        op.emit("aten.index.Tensor", self=op.tensor(), indices=(op.tensor(1),))
        return
    if index is None or index.ndim:
        raise Refused("it takes more than one element along an axis", "use slices")
    op.emit("aten.select.int", self=op.tensor(), dim=op.integer("axis", 0), index=int(index))


def _gather_nd(op: Operator) -> None:
    """Rows of a parameter by number."""
    index = op.constant(1, "index")
    if index is None or op.integer("batch_dims", 0) or index.shape[-1:] != (1,):
        raise Refused("it takes elements by an index of several axes", "use slices")
    if op.graph.array(op.input(0)) is None:
        raise Refused("it takes more than one element along an axis", "use slices")
    rows = op.step("aten.view.default", index.shape[:-1], self=op.tensor(1))
    op.emit("aten.index.Tensor", self=op.tensor(), indices=(rows,))


def _expand(op: Operator) -> None:
    op.result  # noqa: B018 - as above
    op.ignore(1)  # the shape of the result says it
    op.emit("aten.expand.default", self=op.tensor())


def _pad(op: Operator) -> None:
    rank = len(op.sizes())
    pads = op.ints("pads", 1) or ()
    axes = op.ints("axes", 3)
    if axes is not None:
        every = [0] * (2 * rank)
        for number, axis in enumerate(axes):
            every[axis % rank], every[axis % rank + rank] = pads[number], pads[number + len(axes)]
        pads = tuple(every)
    if len(pads) != 2 * rank:
        raise Refused(f"it has {len(pads)} pads for {rank} dimensions", "export the model again")
    value = op.number(2) if op.input(2) else op.real("value", 0.0)
    mode = {"edge": "replicate"}.get(found := op.text("mode", "constant"), found)
    # torch: the last axis first, before and behind; leading axes that are not padded left out
    ordered = [pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)]
    while len(ordered) > 4 and not any(ordered[-2:]):
        ordered = ordered[:-2]
    op.emit("aten.pad.default", input=op.tensor(), pad=tuple(ordered), mode=mode, value=value)


def _depth_to_space(op: Operator) -> None:
    if op.text("mode", "DCR") != "CRD":
        raise Refused("its channels are ordered block first (DCR)", "use nn.PixelShuffle, whose are CRD")
    op.emit("aten.pixel_shuffle.default", self=op.tensor(), upscale_factor=op.integer("blocksize", 1))


def _flatten(op: Operator) -> None:
    shape = op.sizes()
    axis = op.integer("axis", 1)
    if math.prod(shape[:axis]) != shape[0]:
        raise Refused("it makes rows of more than dimension 0", "keep the samples of a mini-batch apart")
    _reshape(op)


RULES: Mapping[str, Rule] = {
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _reshape,
    "Flatten": _flatten,
    "Identity": _same,
    "Cast": _cast,
    "CastLike": _cast,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Expand": _expand,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
}
NOT_TAKEN: Mapping[str, str] = {
    "SpaceToDepth": "use nn.PixelUnshuffle, spelt by reshape and permute",
    "If": "take the branch that trains before it is exported",
    "Loop": "unroll the loop before it is exported",
    "Scan": "unroll the loop before it is exported",
    "Where": "compute both without a condition, such as by nn.ReLU",
    "GridSample": "use nn.Upsample",
    "NonMaxSuppression": "end the network before it: what follows is not trained",
    "RoiAlign": "end the network before it",
    "Tile": "join by torch.cat; + - * / repeat by themselves",
}

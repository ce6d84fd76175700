"""Shapes, parts, concatenation and padding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx import patterns
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.ops.window import MOST_AXES

_REPEATING = frozenset(("Add", "Sub", "Mul", "Div"))


def _reshape(op: Operator) -> None:
    op.ignore(1, "axes", "axis", "allowzero")  # the shape of the result includes them
    if patterns.is_flattening(op):
        op.part()
        return
    op.result  # noqa: B018 - raises Refused, with the node's name, if the shape is not known
    op.emit("aten.reshape.default", self=op.tensor())


def _squeeze(op: Operator) -> None:
    if (selection := patterns.taken(op)) is not None:
        value, axis, index = selection
        op.emit("aten.select.int", self=op.graph.name(value), dim=axis, index=index)
    elif not patterns.is_unbound(op):
        _reshape(op)


def _same(op: Operator) -> None:
    op.emit("aten.alias.default", self=op.tensor())


def _cast(op: Operator) -> None:
    op.ignore(
        "to", 1, "saturate", "round_mode"
    )  # the type of the result includes it; the others are for types of 8 bits and less
    if op.graph.dtype(op.input(0)) not in ("float32", "bool") or op.graph.dtype(op.outputs[0]) != "float32":
        raise Refused(
            "it changes the type of its tensor",
            "export it in float32, and choose the type with train { precision = bf16 }",
        )
    _same(op)


def _transpose(op: Operator) -> None:
    rank = len(op.sizes())
    order = op.ints("perm") or tuple(reversed(range(rank)))
    if sorted(order) != list(range(rank)):
        raise Refused(f"it permutes {rank} dimensions by {list(order)[:8]}", "export the model again")
    op.emit("aten.permute.default", self=op.tensor(), dims=order)


def _concat(op: Operator) -> None:
    if (roll := patterns.rolled(op)) is not None:
        value, shift, axis = roll
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
    op.ignore("num_outputs")  # the outputs are already counted
    if (parts := patterns.unbound(op)) is not None:
        op.graph.emit(op, "aten.unbind.int", {"self": op.tensor(), "dim": axis}, parts)
        return
    given = {"self": op.tensor(), "split_sizes": sizes, "dim": axis}
    op.emit_all(len(op.outputs), "aten.split_with_sizes.default", **given)


def _slice(op: Operator) -> None:
    if patterns.is_part_of_roll(op) or patterns.is_part_of_selection(op):
        op.part()
        return
    x = Expression.of(op)
    starts, ends = op.ints("starts", 1) or (), op.ints("ends", 2) or ()
    axes = op.ints("axes", 3) or tuple(range(len(starts)))
    steps = op.ints("steps", 4) or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or not starts:
        raise Refused("its starts, ends, axes and steps differ in number", "export the model again")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(x.shape)
        first, stop, by = slice(start, end, step).indices(x.shape[axis])
        x = x.slice(axis, first, stop, by) if by > 0 else x.take(axis, range(first, stop, by))
    x.give()


def _gather(op: Operator) -> None:
    if x := patterns.flattened(op):
        op.emit("aten.reshape.default", self=op.graph.name(x))
        return
    index = op.constant(1, "index")
    if index is not None and index.ndim and op.graph.array(op.input(0)) is not None and not op.integer("axis", 0):
        op.emit("aten.index.Tensor", self=op.tensor(), indices=(op.tensor(1),))
        return
    if index is None:
        raise Refused("its index is missing", "export the model again")
    axis, x = op.integer("axis", 0) % len(op.sizes()), Expression.of(op)
    if not index.ndim:
        op.emit("aten.select.int", self=x.name, dim=axis, index=int(index))
        return
    if axis == 0:
        raise Refused("it takes more than one element along dimension 0, the samples", "keep the samples apart")
    x.take(axis, [int(n) % x.shape[axis] for n in index.reshape(-1)]).reshape(op.result).give()


def _gather_nd(op: Operator) -> None:
    """Emit rows of a parameter by number.

    Raises:
        Refused: The index has several axes, or the tensor is computed.
    """
    index = op.constant(1, "index")
    if index is None or op.integer("batch_dims", 0) or index.shape[-1:] != (1,):
        raise Refused("it takes elements by an index of several axes", "use slices")
    if op.graph.array(op.input(0)) is None:
        raise Refused("it takes more than one element along an axis", "use slices")
    rows = op.step("aten.view.default", index.shape[:-1], self=op.tensor(1))
    op.emit("aten.index.Tensor", self=op.tensor(), indices=(rows,))


def _expand(op: Operator) -> None:
    """Emit a repeated tensor; tensors that operators do not repeat are multiplied by ones."""
    op.ignore(1)  # the shape of the result includes it
    users, result = op.graph.users(op.outputs[0]), op.result
    if op.graph.array(op.input(0)) is not None or all(user.op in _REPEATING for user in users):
        op.emit("aten.expand.default", self=op.tensor())
    else:
        x = Expression.of(op)
        (x * x.constant("ones", np.ones((1, *result[1:])))).give()


def _tile(op: Operator) -> None:
    x = Expression.of(op)
    for axis, count in enumerate(op.ints("repeats", 1) or ()):
        if axis == 0 and count != 1:
            raise Refused("it repeats dimension 0, the samples", "keep the samples of a mini-batch apart")
        x = x.join((x,) * (count - 1), axis) if count > 1 else x
    x.give()


def _pad(op: Operator) -> None:
    x, rank = Expression.of(op), len(op.sizes())
    pads, axes = op.ints("pads", 1) or (), [axis % rank for axis in op.ints("axes", 3) or range(rank)]
    if len(pads) != 2 * len(axes):
        raise Refused(f"it has {len(pads)} pads for {len(axes)} dimensions", "export the model again")
    around = {axis: (pads[n], pads[n + len(axes)]) for n, axis in enumerate(axes)}
    if any(around.pop(0, (0, 0))):
        raise Refused("it pads dimension 0, the samples", "keep the samples of a mini-batch apart")
    mode = op.text("mode", "constant")
    value = 0.0
    if mode == "constant":
        given = op.number(2) if op.input(2) else op.real("value", 0.0)
        if given is None:
            raise Refused("the number that it pads with is computed", "pad with a number")
        value = given
    else:
        op.ignore(2)  # a number that only the mode constant uses
    kind = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    for axis, pair in around.items():
        most = {"reflect": x.shape[axis] - 1, "circular": x.shape[axis]}.get(kind, max(pair))
        if kind not in ("constant", "replicate", "reflect", "circular") or max(pair) > most:
            raise Refused(f"it pads by {kind}, more than the tensor has", "pad less, or by edge, reflect or wrap")
    _padded(x, around, kind, value).give()


def _padded(
    x: Expression, around: Mapping[int, tuple[int, int]], mode: str = "constant", value: float = 0.0
) -> Expression:
    """Return a padded tensor; all axes of an image are padded at once, for a convolution after them."""
    image = 3 <= len(x.shape) <= 2 + MOST_AXES and not any(around.get(1, (0, 0)))
    pads = [around.get(axis, (0, 0)) for axis in range(2 if image else 1, len(x.shape))]
    return x.padded([before for before, _ in pads], [after for _, after in pads], mode, value)


def _center(op: Operator) -> None:
    """Crop or pad each axis in its middle.

    Raises:
        Refused: The axis is the samples.
    """
    x, rank = Expression.of(op), len(op.sizes())
    axes = [axis % rank for axis in op.ints("axes") or range(rank)]
    around: dict[int, tuple[int, int]] = {}
    for axis, size in zip(axes, op.ints("shape", 1) or (), strict=True):
        less = (x.shape[axis] - size) // 2
        if axis == 0 and size != x.shape[0]:
            raise Refused("it crops or pads dimension 0, the samples", "keep the samples of a mini-batch apart")
        if size < x.shape[axis]:
            x = x.slice(axis, less, less + size)
        else:
            before = (size - x.shape[axis]) // 2
            around[axis] = (before, size - x.shape[axis] - before)
    _padded(x, around).give()


def _depth_to_space(op: Operator) -> None:
    block = op.integer("blocksize", 1)
    if op.text("mode", "DCR") == "CRD":
        op.emit("aten.pixel_shuffle.default", self=op.tensor(), upscale_factor=block)
        return
    x = Expression.of(op)
    rows, channels, height, width = x.shape
    apart = x.reshape((rows, block, block, channels // block**2, height, width))
    apart.permute((0, 3, 4, 1, 5, 2)).reshape(op.result).give()


def _space_to_depth(op: Operator) -> None:
    block, x = op.integer("blocksize", 1), Expression.of(op)
    rows, channels, height, width = x.shape
    apart = x.reshape((rows, channels, height // block, block, width // block, block))
    apart.permute((0, 3, 5, 1, 2, 4)).reshape(op.result).give()


def _flatten(op: Operator) -> None:
    shape = op.sizes()
    axis = op.integer("axis", 1)
    if math.prod(shape[:axis]) != shape[0]:
        raise Refused(
            "it joins other dimensions with dimension 0, the samples", "keep the samples of a mini-batch apart"
        )
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
    "Tile": _tile,
    "CenterCropPad": _center,
    "SpaceToDepth": _space_to_depth,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
}
NOT_TAKEN: Mapping[str, str] = {
    "If": "take the branch that trains before it is exported",
    "Loop": "unroll the loop before it is exported",
    "Scan": "unroll the loop before it is exported",
    "GridSample": "use nn.Upsample",
    "NonMaxSuppression": "end the network before it: the operators after it are not trained",
    "RoiAlign": "end the network before it",
}

"""Arithmetic with repeated operands, reductions, shapes, parts, padding and resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mbc.interchange.to_onnx.nodes import NotExported, Operator, Rule
from mbc.ops.rearrange import WRAP
from mbc.ops.resize import EXACT
from mbc.ops.window import by

_PADS = {"reflect": "reflect", "replicate": "edge", WRAP: "wrap"}
_OPERATORS = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "prelu": "PRelu"}


def _scale(op: Operator) -> None:
    x, factor, offset = op.inputs[0], op.a.factor, op.a.offset
    if offset == 0.0:
        op.last("Mul", x, op.floats(factor))
        return
    product = x if factor == 1.0 else op.step("Mul", x, op.floats(factor))
    op.last("Add", product, op.floats(offset))


_RELATIONS = {
    "eq": ("Equal",),
    "ne": ("Equal", "Not"),
    "lt": ("Less",),
    "le": ("LessOrEqual",),
    "gt": ("Greater",),
    "ge": ("GreaterOrEqual",),
}
_FLOAT, _BOOL = 1, 9  # values of TensorProto.DataType


def _broadcast(op: Operator) -> None:
    operands = _aligned(op)
    kind: str = op.a.operator
    if kind.startswith("r"):
        kind, operands = kind[1:], operands[::-1]
    op.last(_OPERATORS[kind], *operands)


def _select(op: Operator) -> None:
    operands = _aligned(op)
    if op.a.operator in ("maximum", "minimum"):
        op.last("Max" if op.a.operator == "maximum" else "Min", *operands)
        return
    x, mask = operands[::-1] if op.a.operator.startswith("r") else operands
    taken, filled = op.step("Cast", mask, to=_BOOL), op.floats(op.a.filled)
    op.last("Where", taken, *((filled, x) if op.a.operator.endswith("fill") else (x, filled)))


def _compared(op: Operator, operator: str, *operands: str) -> None:
    first, *others = _RELATIONS[operator]
    holds = op.step(first, *operands)
    for name in others:
        holds = op.step(name, holds)
    op.last("Cast", holds, to=_FLOAT)


def _relation(op: Operator) -> None:
    _compared(op, op.a.operator, *_aligned(op))


def _indicator(op: Operator) -> None:
    _compared(op, op.a.operator, op.inputs[0], op.floats(op.a.value))


def _aligned(op: Operator) -> list[str]:
    """Return the operands with axes aligned at the last ones, as ONNX repeats them.

    Raises:
        NotExported: An operand with samples would be repeated.
    """
    rank = len(op.result)
    operands: list[str] = []
    for position, value in enumerate(op.inputs):
        shape = op.shape(position)
        aligned: tuple[int, ...] = op.a.aligned(shape, rank)
        rows = op.nodes.graph.values[value].per_sample
        if aligned == shape:
            operands.append(value)
        elif rows:
            raise NotExported(f"it repeats samples of the shape {list(shape)}", "give its operands all dimensions")
        else:
            while aligned[:1] == (1,) and len(aligned) > 1:  # ONNX repeats along leading axes without a node
                aligned = aligned[1:]
            operands.append(op.state(value, aligned))
    return operands


def _reduced(op: Operator) -> None:
    keep = int(len(op.result) == len(op.shape()))
    axes = op.whole(*op.a.axes)
    sizes: list[int] = [op.shape()[axis] for axis in op.a.axes]
    count = math.prod(sizes)
    if math.isclose(op.a.factor * count, 1.0, rel_tol=1e-6) and count > 1:
        op.last("ReduceMean", op.inputs[0], axes, keepdims=keep)
    elif op.a.factor == 1.0:
        op.last("ReduceSum", op.inputs[0], axes, keepdims=keep)
    else:
        total = op.step("ReduceSum", op.inputs[0], axes, keepdims=keep)
        op.last("Mul", total, op.floats(op.a.factor))


def _largest(op: Operator) -> None:
    keep = int(len(op.result) == len(op.shape()))
    op.last("ReduceMax", op.inputs[0], op.whole(*op.a.axes), keepdims=keep)


def _rearrange(op: Operator) -> None:
    """Append the nodes that split axes, permute them and join them; steps without effect are left out."""
    a, x = op.a, op.inputs[0]
    apart = any(len(factors) > 1 for factors in a.factors)
    joined = any(count > 1 for count in a.merged)
    order = [0, *(axis + 1 for axis in a.order)]
    if apart:
        x = op.reshaped(x, a.flat)
    if not joined:
        op.last("Transpose", x, perm=order)
    else:
        op.last("Reshape", op.step("Transpose", x, perm=order), op.whole(0, *op.result[1:]))


def _slice(op: Operator) -> None:
    """Append a slice, with zeros where it reaches over the edges.

    Raises:
        NotExported: The slice spreads its elements.
    """
    a, x = op.a, op.inputs[0]
    if any(spread != 1 for spread in a.spread):
        raise NotExported("it spreads its elements", "leave it out")
    lasts = [start + step * (count - 1) for start, step, count in zip(a.start, a.step, a.count, strict=True)]
    before = [max(-start, 0) for start in a.start]
    after = [max(last + 1 - size, 0) for last, size in zip(lasts, a.size, strict=True)]
    starts = [start + more for start, more in zip(a.start, before, strict=True)]
    ends = [last + more + 1 for last, more in zip(lasts, before, strict=True)]
    padded = [size + b + c for size, b, c in zip(a.size, before, after, strict=True)]
    cut = [n for n in range(len(padded)) if (starts[n], ends[n], a.step[n]) != (0, padded[n], 1)]
    if any(before) or any(after):
        padding = (op.whole(0, *before, 0, *after), *([op.floats(a.outside)] if a.outside else []))
        if not cut:
            op.last("Pad", x, *padding)
            return
        x = op.step("Pad", x, *padding)
    parts = ([starts[n] for n in cut], [ends[n] for n in cut], [n + 1 for n in cut], [a.step[n] for n in cut])
    op.last("Slice", x, *(op.whole(*part) for part in parts))


def _pad(op: Operator) -> None:
    if op.a.rolls:
        _roll(op)
        return
    op.last("Pad", op.inputs[0], op.whole(0, *op.a.before, 0, *op.a.after), mode=_PADS[op.a.mode])


def _roll(op: Operator) -> None:
    """Append a roll of each axis: its last elements before the first ones."""
    x = op.inputs[0]
    moved = [(axis, n, shift % n) for axis, (n, shift) in enumerate(zip(op.a.size, op.a.before, strict=True), 1)]
    moved = [(axis, n, n - shift) for axis, n, shift in moved if shift]
    if not moved:
        op.last("Identity", x)
    for number, (axis, n, at) in enumerate(moved, 1):
        where = (op.whole(axis), op.whole(1))
        parts = [op.step("Slice", x, op.whole(a), op.whole(b), *where) for a, b in ((at, n), (0, at))]
        if number == len(moved):
            op.last("Concat", *parts, axis=axis)
        else:
            x = op.step("Concat", *parts, axis=axis)


def _split(op: Operator) -> None:
    """Append a slice for each part, so that parts that nothing takes can be dropped."""
    begin = 0
    for output, size in zip(op.outputs, op.a.sizes, strict=True):
        inputs = (op.inputs[0], op.whole(begin), op.whole(begin + size), op.whole(1))
        op.nodes.append("Slice", inputs, output, f"{op.name}.{begin}", {})
        begin += size


def _channels(op: Operator) -> None:
    op.last("Slice", op.inputs[0], op.whole(op.a.start), op.whole(op.a.start + op.a.count), op.whole(1))


def _unflatten(op: Operator) -> None:
    op.last("Reshape", op.inputs[0], op.whole(0, *op.a.sample_shape))


def _upsample(op: Operator) -> None:
    scales = op.floats([float(factor) for factor in op.a.factor])
    op.last(
        "Resize", op.inputs[0], "", scales, mode="nearest", axes=list(range(2, len(op.shape()))),
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


def _resize(op: Operator) -> None:
    """Append a resampling to a size, or by factors without a whole size.

    Raises:
        NotExported: ONNX would make another size of the factors, which it rounds to float32.
    """
    a = op.a
    rounding = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if a.method == EXACT:  # the centre of a pixel falls half a pixel behind its number
        rounding |= {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    smooth = {"mode": "linear" if a.bilinear else "cubic"}
    smooth["coordinate_transformation_mode"] = "align_corners" if a.corners else "half_pixel"
    how = rounding if a.pixels == 1 else smooth
    factors = [after / before for before, after in zip(a.scale[::2], a.scale[1::2], strict=True)]
    sizes = (math.floor(np.float32(n) * np.float32(factor)) for n, factor in zip(a.size, factors, strict=False))
    if factors and tuple(sizes) != a.output_size:
        raise NotExported(
            f"its factors, rounded to float32, do not give the size {by(a.output_size)}", "resize to a size"
        )
    given = ("", op.floats(factors)) if factors else ("", "", op.whole(*a.output_size))
    op.last("Resize", op.inputs[0], *given, axes=list(range(2, len(op.shape()))), **how)


RULES: Mapping[str, Rule] = {
    "scale": _scale,
    "broadcast": _broadcast,
    "select": _select,
    "relation": _relation,
    "indicator": _indicator,
    "reduce_sum": _reduced,
    "amax": _largest,
    "rearrange": _rearrange,
    "strided_slice": _slice,
    "pad": _pad,
    "split": _split,
    "channel_slice": _channels,
    "unflatten": _unflatten,
    "upsample": _upsample,
    "resize": _resize,
}

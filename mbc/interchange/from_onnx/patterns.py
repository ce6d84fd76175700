"""Layers that exporters write as several nodes: SiLU, GELU before opset 20, linear layers with a bias, and others.

Nodes that are part of such a layer emit nothing; the last node emits the layer.
"""

from __future__ import annotations

import math

import numpy as np

from mbc.interchange.from_onnx.operator import Operator
from mbc.interchange.program import Array
from mbc.ops.window_bias import MASKED, WindowBias

# The layer x * f(x), by the operator of f.
GATED = {"Sigmoid": "silu", "HardSigmoid": "hardswish", "Tanh": "mish"}


def only_user(op: Operator, kind: str) -> Operator | None:
    """Return the operator that takes the first result of `op`, if it is the only user and of this kind."""
    users = op.graph.users(op.outputs[0])
    return users[0] if len(users) == 1 and users[0].op == kind else None


def other(op: Operator, value: str) -> str:
    """Return the operand of a binary operator that is not `value`."""
    return op.input(1) if op.input(0) == value else op.input(0)


def is_number(op: Operator, number: float) -> bool:
    """Return whether an operand of a binary operator is this number."""
    numbers = [op.number(n) for n in (0, 1)]
    return any(n is not None and math.isclose(n, number, rel_tol=1e-4) for n in numbers)


def scaled(op: Operator | None, factor: float) -> str:
    """Return the value that an operator multiplies by this factor; an empty text for any other operator."""
    if op is None:
        return ""
    if op.op == "Mul" and is_number(op, factor):
        return op.input(1) if op.number(0) is not None else op.input(0)
    if op.op == "Div" and op.number(1) is not None and is_number(op, 1.0 / factor):
        return op.input(0)
    return ""


def gated(op: Operator) -> tuple[str, str] | None:
    """Return x and the activation of a product x * f(x); None for other products."""
    for x, y in ((op.input(0), op.input(1)), (op.input(1), op.input(0))):
        activation = op.graph.maker(y)
        if activation is None or activation.op not in GATED or len(op.graph.users(y)) != 1:
            continue
        inner = activation.input(0)
        if activation.op == "HardSigmoid" and not is_hard_sigmoid(activation):
            continue
        if activation.op == "Tanh":
            below = op.graph.maker(inner)
            if below is None or below.op != "Softplus" or below.input(0) != x:
                continue
        elif inner != x:
            continue
        return x, GATED[activation.op]
    return None


def is_hard_sigmoid(op: Operator) -> bool:
    """Return whether a hard sigmoid is PyTorch's: clamp(x / 6 + 1 / 2)."""
    return math.isclose(op.real("alpha", 0.2), 1 / 6, rel_tol=1e-5) and op.real("beta", 0.5) == 0.5


def gelu_of(erf: Operator) -> tuple[str, Operator] | None:
    """Return x and the last node of the GELU that an Erf is part of; None if there is no GELU.

    The nodes compute x * (1 + erf(x / sqrt 2)) / 2, with the factors in any order.
    """
    x = scaled(erf.graph.maker(erf.input(0)), math.sqrt(0.5))
    plus = only_user(erf, "Add")
    if not x or plus is None or not is_number(plus, 1.0):
        return None
    product = only_user(plus, "Mul")
    if product is None:
        return None
    beside = other(product, plus.outputs[0])
    if scaled(product.graph.maker(beside), 0.5) == x:
        return x, product
    last = only_user(product, "Mul")
    if beside == x and last is not None and is_number(last, 0.5):
        return x, last
    return None


def ends_gelu(op: Operator) -> str:
    """Return the input of the GELU whose last node is this product; an empty text for other products."""
    for value in op.operands:
        maker = op.graph.maker(value)
        inner = maker.operands if maker is not None and maker.op == "Mul" else ()
        for node in (maker, *map(op.graph.maker, inner)):
            erf = None
            if node is not None and node.op == "Add":
                erf = next((m for m in map(op.graph.maker, node.operands) if m is not None and m.op == "Erf"), None)
            gelu = None if erf is None else gelu_of(erf)
            if gelu is not None and gelu[1] is op:
                return gelu[0]
    return ""


def bias_behind(product: Operator) -> Operator | None:
    """Return the sum that adds a held vector to a product with held numbers, if the sum is the only user."""
    add = only_user(product, "Add")
    if add is None:
        return None
    bias = add.graph.array(other(add, product.outputs[0]))
    return add if bias is not None and bias.shape == product.sizes(1)[1:] else None


def product_before(add: Operator) -> Operator | None:
    """Return the product with held numbers whose bias this sum adds; None for other sums."""
    for value in add.operands:
        product = add.graph.maker(value)
        if product is not None and product.op == "MatMul" and product.graph.array(product.input(1)) is not None:
            return product if len(product.sizes(1)) == 2 and bias_behind(product) is add else None
    return None


def group_norm_of(add: Operator) -> tuple[Operator, Operator] | None:
    """Return the instance norm and the scaling product of the group norm whose last node is this sum.

    Exporters write a group norm before opset 21 as an instance norm of reshaped groups, times a scale and plus an
    offset of each channel. Other sums give None.
    """
    for value in add.operands:
        product = add.graph.maker(value)
        if product is None or product.op != "Mul":
            continue
        for inner in product.operands:
            back = add.graph.maker(inner)
            norm = None if back is None or back.op != "Reshape" else add.graph.maker(back.input(0))
            if norm is None or norm.op != "InstanceNormalization" or not groups_of(norm):
                continue
            affine = (product.graph.array(other(product, inner)), add.graph.array(other(add, value)))
            alone = all(
                len(add.graph.users(node.outputs[0])) == 1 for node in (norm, back, product) if node is not None
            )
            channels = add.result[1]
            if alone and all(array is not None and array.size == channels for array in affine):
                return norm, product
    return None


def groups_of(norm: Operator) -> int:
    """Return the number of groups that an instance norm normalises; 0 if it is no part of a group norm.

    The tensor is reshaped to groups before and after the norm, and the norm itself does not scale the groups.
    """
    before = norm.graph.maker(norm.input(0))
    scale, offset = (norm.graph.array(norm.input(n)) for n in (1, 2))
    if before is None or before.op != "Reshape" or scale is None or offset is None:
        return 0
    if not (scale == 1.0).all() or offset.any():
        return 0
    return norm.sizes(0)[1] if before.sizes(0)[0] == norm.sizes(0)[0] else 0


def is_part_of_group_norm(norm: Operator) -> bool:
    """Return whether an instance norm and the nodes after it are a group norm."""
    back = only_user(norm, "Reshape")
    product = None if back is None else only_user(back, "Mul")
    add = None if product is None else only_user(product, "Add")
    group_norm = None if add is None else group_norm_of(add)
    return group_norm is not None and group_norm[0] is norm


def rolled(concat: Operator) -> tuple[str, int, int] | None:
    """Return the tensor that a concatenation rolls, the shift and the axis; None for other concatenations.

    A roll puts the end of a tensor before its beginning, and nothing else takes these parts.
    """
    parts = [concat.graph.maker(value) for value in concat.operands]
    if len(parts) != 2 or any(part is None or only_user(part, "Concat") is not concat for part in parts):
        return None
    end, begin = (_cut(part) for part in parts if part is not None)
    if end is None or begin is None or end[:2] != begin[:2]:
        return None
    value, axis, first, size = end
    whole = begin[2] == 0 and begin[3] == first and first + size == concat.result[axis]
    shift = size if 2 * size <= concat.result[axis] else -first
    return (value, shift, axis) if whole and axis == concat.integer("axis", 1) % len(concat.result) else None


def _cut(part: Operator) -> tuple[str, int, int, int] | None:
    """Return the tensor, the axis, the start and the length of a slice along one axis; None for other nodes."""
    if part.op != "Slice":
        return None
    names = ("starts", "ends", "axes", "steps")
    starts, stops, axes, steps = (part.ints(name, position) for position, name in enumerate(names, 1))
    if starts is None or stops is None or len(starts) != 1 or (steps or (1,)) != (1,):
        return None
    shape = part.sizes()
    axis = (axes or (0,))[0] % len(shape)
    first, stop, _ = slice(starts[0], stops[0]).indices(shape[axis])
    return part.input(0), axis, first, stop - first


def is_part_of_roll(part: Operator) -> bool:
    """Return whether the concatenation after a slice rolls a tensor."""
    concat = only_user(part, "Concat")
    return concat is not None and rolled(concat) is not None


def taken(squeeze: Operator) -> tuple[str, int, int] | None:
    """Return the tensor, the axis and the index of one element that a slice and this squeeze take.

    Other nodes give None.
    """
    part = squeeze.graph.maker(squeeze.input(0))
    cut = None if part is None or only_user(part, "Squeeze") is not squeeze else _cut(part)
    return cut[:3] if cut is not None and cut[3] == 1 and _squeezes(squeeze, cut[1]) else None


def is_part_of_selection(part: Operator) -> bool:
    """Return whether a slice takes one element whose axis the next node removes."""
    squeeze = only_user(part, "Squeeze")
    return squeeze is not None and taken(squeeze) is not None


def flattened(gather: Operator) -> str:
    """Return the tensor of which a gather takes all elements in their order; an empty text for other gathers."""
    before, index = gather.graph.maker(gather.input(0)), gather.graph.array(gather.input(1))
    if before is None or before.op != "Reshape" or index is None or only_user(before, "Gather") is not gather:
        return ""
    whole = before.result == (index.size,) and np.array_equal(index.reshape(-1), np.arange(index.size))
    return before.input(0) if whole else ""


def is_flattening(reshape: Operator) -> bool:
    """Return whether elements are gathered from a reshaped tensor, as the export of `torch.as_strided` does."""
    gather = only_user(reshape, "Gather")
    return gather is not None and bool(flattened(gather))


def is_mask(array: Array) -> bool:
    """Return whether numbers that are added to the scores of windows only hide some pairs of pixels."""
    square = array.ndim > 2 and array.shape[-1] == array.shape[-2]
    return square and bool(array.any()) and bool(((array == 0) | (array == MASKED)).all())


def is_scores(op: Operator | None) -> bool:
    """Return whether an operator is a product of two tensors of the network, perhaps times numbers."""
    while op is not None and op.op in ("Mul", "Div"):
        tensors = [position for position in (0, 1) if op.number(position) is None]
        op = op.graph.maker(op.input(tensors[0])) if len(tensors) == 1 else None
    return op is not None and op.op == "MatMul" and all(op.graph.array(value) is None for value in op.operands)


def bias_by_offset(array: Array) -> tuple[Array, Array] | None:
    """Return a relative position bias as its table and the table's row for each pair of pixels.

    Args:
        array: Numbers [1, heads, T, T] that are added to the scores of windows.

    Returns:
        A table [offsets, heads] with the bias of each offset between two pixels, and the offsets' numbers [T, T]. None
        if the numbers are no such bias.
    """
    if array.ndim != 4 or array.shape[0] != 1 or array.shape[2] != array.shape[3] or array.dtype.kind != "f":
        return None
    heads, tokens = array.shape[1:3]
    sides = sorted((h for h in range(1, tokens + 1) if tokens % h == 0), key=lambda h: abs(h - tokens // h))
    for height in sides:
        numbers = WindowBias((height, tokens // height)).numbers()
        table = np.zeros((int(numbers.max()) + 1, heads), array.dtype)
        table[numbers] = array[0].transpose(1, 2, 0)
        if np.array_equal(table[numbers], array[0].transpose(1, 2, 0)):
            return table, numbers
    return None


def unbound(split: Operator) -> list[str] | None:
    """Return the values that a split into single elements gives without the split axis; None for other splits.

    Each part must be taken only by a squeeze of that axis.
    """
    axis = split.integer("axis", 0)
    squeezes = [split.graph.users(output) for output in split.outputs]
    if split.sizes()[axis] != len(split.outputs) or not all(len(u) == 1 and _squeezes(u[0], axis) for u in squeezes):
        return None
    return [users[0].outputs[0] for users in squeezes]


def _squeezes(user: Operator, axis: int) -> bool:
    rank = len(user.sizes())
    return user.op == "Squeeze" and [a % rank for a in user.ints("axes", 1) or ()] == [axis % rank]


def is_unbound(squeeze: Operator) -> bool:
    """Return whether the split before this squeeze gives its result."""
    split = squeeze.graph.maker(squeeze.input(0))
    return split is not None and split.op == "Split" and unbound(split) is not None

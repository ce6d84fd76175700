"""Rules of normalisation: layers of the language that compute the same, else formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.from_onnx.patterns import is_part_of_group_norm


def _batch_norm(op: Operator) -> None:
    """Emit a batch norm in training mode, whatever mode the file states.

    Training continues with the running statistics of the file. The momentum of ONNX is the share of the old statistics.
    """
    op.ignore("training_mode", "spatial")
    op.emit(
        "aten.batch_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"),
        running_mean=op.held(3, "running_mean"), running_var=op.held(4, "running_var"), training=True,
        momentum=round(1.0 - op.real("momentum", 0.9), 7), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _standardized(x: Expression, axes: tuple[int, ...], eps: float) -> tuple[Expression, Expression, Expression]:
    """Return the standardised tensor, its mean over axes, and the inverse of its standard deviation."""
    mean = x.reduce("mean", axes)
    centred = x - mean
    inverse = ((centred**2).reduce("mean", axes) + eps) ** -0.5
    return centred * inverse, mean, inverse


def _from(op: Operator) -> tuple[int, ...]:
    """Return the axes from the attribute `axis` on.

    Raises:
        Refused: The axes include the samples.
    """
    rank = len(op.sizes())
    axis = op.integer("axis", -1) % rank
    if axis == 0:
        raise Refused("it normalises over dimension 0, the samples", "keep the samples of a mini-batch apart")
    return tuple(range(axis, rank))


def _layer_norm(op: Operator) -> None:
    """Emit a layer norm: the layer for channels, else a formula, which also gives the statistics."""
    shape, axes, eps = op.sizes(0), _from(op), op.real("epsilon", 1e-5)
    statistics = any(value and op.graph.users(value) for value in op.outputs[1:])
    if len(axes) == 1 and op.input(2) and not statistics and _has_channels_last(op):
        op.emit(
            "aten.layer_norm.default",
            input=op.tensor(0), normalized_shape=shape[-1:], weight=op.held(1, "weight"), bias=op.held(2, "bias"),
            eps=eps,
        )  # fmt: skip
        return
    result, mean, inverse = _standardized(Expression.of(op), axes, eps)
    result = result * Expression.of(op, 1)
    if op.input(2):
        result = result + Expression.of(op, 2)
    result.give(mean, inverse)


def _has_channels_last(op: Operator) -> bool:
    """Return whether the last axis may be the channels of pixels or positions; in an input of the network it is not."""
    return len(op.sizes()) == 2 or op.graph.maker(op.input(0)) is not None


def _rms_norm(op: Operator) -> None:
    x, axes = Expression.of(op), _from(op)
    inverse = ((x**2).reduce("mean", axes) + op.real("epsilon", 1e-5)) ** -0.5
    (x * inverse * Expression.of(op, 1)).give()


def _group_norm(op: Operator) -> None:
    if op.graph.opset < 21:
        _group_norm_of_groups(op)
        return
    op.emit(
        "aten.group_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"),
        num_groups=op.integer("num_groups", 1), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _group_norm_of_groups(op: Operator) -> None:
    """Emit a group norm before opset 21, whose scale and offset have one number for each group."""
    x, groups = Expression.of(op), op.integer("num_groups", 1)
    rows, channels, *pixels = x.shape
    grouped = x.reshape((rows, groups, channels // groups * math.prod(pixels)))
    result, _, _ = _standardized(grouped, (2,), op.real("epsilon", 1e-5))
    scale, offset = (_of_groups(op, position, groups) for position in (1, 2))
    (result * scale + offset).reshape(x.shape).give()


def _of_groups(op: Operator, position: int, groups: int) -> Expression:
    if op.graph.array(op.input(position)) is None:
        raise Refused("its scale or offset is computed", "hold both as parameters")
    return Expression.of(op, position).view((1, groups, 1))


def _instance_norm(op: Operator) -> None:
    if is_part_of_group_norm(op):
        op.part()
        return
    op.emit(
        "aten.instance_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _lrn(op: Operator) -> None:
    size = op.integer("size", 5)
    if size % 2 == 0:
        raise Refused("its window has an even size", "use an odd one")
    op.emit(
        "onnx.LRN",
        self=op.tensor(0), size=size, alpha=op.real("alpha", 1e-4), beta=op.real("beta", 0.75),
        k=op.real("bias", 1.0),
    )  # fmt: skip


RULES: Mapping[str, Rule] = {
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
}
NOT_TAKEN: Mapping[str, str] = {}

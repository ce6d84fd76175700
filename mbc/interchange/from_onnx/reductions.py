"""Reductions over any axes except the samples, and softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule

_LONGEST_PRODUCT = 64  # most factors along an axis, each of which is a slice


def _axes(op: Operator) -> tuple[int, ...] | None:
    """Return the axes of a reduction, or all axes if the node has none; None if the node then reduces nothing."""
    rank, axes = len(op.sizes()), op.ints("axes", 1)
    if not axes and op.integer("noop_with_empty_axes", 0):
        return None
    return tuple(sorted(axis % rank for axis in axes or range(rank)))


def _plain(target: str, op: Operator) -> None:
    axes, keep = _axes(op), bool(op.integer("keepdims", 1))
    if axes is None:
        op.emit("aten.alias.default", self=op.tensor())
    else:
        op.emit(target, self=op.tensor(), dim=axes, keepdim=keep)


def _composed(formula: Callable[[Expression, tuple[int, ...]], Expression], op: Operator) -> None:
    """Emit a reduction by a formula that keeps the axes with one element each.

    Raises:
        Refused: There are no axes, or the axes include the samples.
    """
    axes, keep = _axes(op), bool(op.integer("keepdims", 1))
    if axes is None:
        raise Refused("it reduces no axis", "leave noop_with_empty_axes out")
    if 0 in axes:
        raise Refused(f"it is over dimension 0 of {list(op.sizes())}, the samples", "keep the samples apart")
    result = formula(Expression.of(op), axes)
    shape = result.shape if keep else tuple(n for axis, n in enumerate(result.shape) if axis not in axes)
    result.reshape(shape).give()


def _minimum(x: Expression, axes: tuple[int, ...]) -> Expression:
    return -(-x).reduce("amax", axes)


def _absolute_sum(x: Expression, axes: tuple[int, ...]) -> Expression:
    return x.apply("abs").reduce("sum", axes)


def _sum_of_squares(x: Expression, axes: tuple[int, ...]) -> Expression:
    return (x**2).reduce("sum", axes)


def _log_sum(x: Expression, axes: tuple[int, ...]) -> Expression:
    return x.reduce("sum", axes).apply("log")


def log_sum_exp(x: Expression, axes: tuple[int, ...]) -> Expression:
    """Return the logarithm of a sum of exponentials, computed so that no exponential exceeds 1."""
    most = x.reduce("amax", axes)
    return most + (x - most).apply("exp").reduce("sum", axes).apply("log")


def _product(x: Expression, axes: tuple[int, ...]) -> Expression:
    for axis in axes:
        if x.shape[axis] > _LONGEST_PRODUCT:
            raise Refused(f"it multiplies {x.shape[axis]} elements", f"multiply at most {_LONGEST_PRODUCT}")
        parts = [x.slice(axis, n, n + 1) for n in range(x.shape[axis])]
        x = parts[0]
        for part in parts[1:]:
            x = x * part
    return x


def _softmax_operand(op: Operator) -> tuple[Expression, int]:
    """Return the operand and the axis of a softmax; before opset 13 all axes from `axis` on become one axis.

    Raises:
        Refused: The axis is the samples.
    """
    x, rank = Expression.of(op), len(op.sizes())
    axis = op.integer("axis", 1 if op.graph.opset < 13 else -1) % rank
    if axis == 0:
        raise Refused("it works along dimension 0, the samples", "keep the samples of a mini-batch apart")
    if op.graph.opset < 13 and axis != rank - 1:
        rows, before, size, behind = x.around(axis)
        return x.reshape((rows, before, size * behind) if axis > 1 else (rows, size * behind)), 2 if axis > 1 else 1
    return x, axis


def _softmax(target: str, op: Operator) -> None:
    x, axis = _softmax_operand(op)
    x.over(target, axis).reshape(op.result).give()


RULES: Mapping[str, Rule] = {
    "Softmax": partial(_softmax, "softmax"),
    "LogSoftmax": partial(_softmax, "log_softmax"),
    "ReduceMean": partial(_plain, "aten.mean.dim"),
    "ReduceSum": partial(_plain, "aten.sum.dim_IntList"),
    "ReduceMax": partial(_plain, "aten.amax.default"),
    "ReduceL2": partial(_plain, "aten.linalg_vector_norm.default"),
    "ReduceMin": partial(_composed, _minimum),
    "ReduceL1": partial(_composed, _absolute_sum),
    "ReduceSumSquare": partial(_composed, _sum_of_squares),
    "ReduceLogSum": partial(_composed, _log_sum),
    "ReduceLogSumExp": partial(_composed, log_sum_exp),
    "ReduceProd": partial(_composed, _product),
}
NOT_TAKEN: Mapping[str, str] = {
    "ArgMax": "make the operand an output of the network, and take the maximum outside",
    "ArgMin": "make the operand an output of the network, and take the minimum outside",
    "TopK": "make the operand an output of the network, and take the maxima outside",
    "CumSum": "sum over whole dimensions",
}

"""Choices between tensors: comparisons, conditions, bounds, and functions that are defined by cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule

_LARGEST = 2.0**128 - 2.0**104  # the largest number of fp32
_SMALLEST = 2.0**-126  # the smallest normal number of fp32: a norm of 0 then divides 0 by a positive number


def _clip(op: Operator) -> None:
    bounds: list[float | None] = []
    for position, name in ((1, "min"), (2, "max")):
        if op.input(position):
            bound = op.number(position)
            if bound is None:
                raise Refused(f"its {name} is computed while it runs", "clamp by numbers")
            bounds.append(bound if abs(bound) < _LARGEST else None)
        else:
            bounds.append(op.real(name, 0.0) if op.has(name) else None)
    least, most = bounds
    if least is not None and most is not None and least > most:
        raise Refused(f"it clamps to {least:g} … {most:g}, which is no interval", "clamp to an interval")
    if bounds == [None, None]:
        op.emit("aten.alias.default", self=op.tensor())
    elif bounds == [0.0, 6.0]:  # the form in which ReLU6 is exported
        op.emit("aten.hardtanh.default", self=op.tensor(), min_val=0.0, max_val=6.0)
    elif bounds == [0.0, None]:
        op.emit("aten.relu.default", self=op.tensor())
    else:
        op.emit("aten.clamp.default", self=op.tensor(), min=least, max=most)


def _extreme(kind: str, op: Operator) -> None:
    """Emit the maximum or minimum of several tensors and numbers.

    Raises:
        Refused: No operand is a tensor of the network.
    """
    result: Expression | None = None
    bounds: list[float] = []
    for position in range(len(op.operands)):
        number = op.number(position)
        if number is not None:
            bounds.append(number)
            continue
        operand = Expression.of(op, position)
        result = operand if result is None else result.combine(kind, operand)
    if result is None:
        raise Refused("none of its operands is a tensor of the network", "use it on the result of a layer")
    for number in bounds:
        result = result.apply("clamp", **{"min" if kind == "maximum" else "max": number})
    result.give()


def _compared(operator: str, op: Operator) -> None:
    """Emit a comparison with a tensor or a number; random numbers below a number are a mask of stochastic depth.

    Raises:
        Refused: Random numbers are compared with a tensor.
    """
    maker, turned = op.graph.maker(op.input(0)), {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
    if maker is not None and maker.op == "RandomUniformLike" and operator == "lt":
        keep = op.number(1)
        if keep is None:
            raise Refused("it compares random numbers with a tensor", "compare them with a number")
        op.emit("aten.bernoulli.p", self=op.tensor(0), p=keep)
        return
    left, right = op.number(0), op.number(1)
    if operator == "eq" and right is not None and math.isinf(right):  # only infinity is above the largest number
        op.emit(f"aten.{'gt' if right > 0 else 'lt'}.Scalar", self=op.tensor(0), other=math.copysign(_LARGEST, right))
        return
    if left is not None and right is None:
        op.emit(f"aten.{turned.get(operator, operator)}.Scalar", self=op.tensor(1), other=left)
    elif right is not None:
        op.emit(f"aten.{operator}.Scalar", self=op.tensor(0), other=right)
    else:
        op.emit(f"aten.{operator}.Tensor", self=op.tensor(0), other=op.tensor(1))


def _both(target: str, op: Operator) -> None:
    op.emit(target, self=op.tensor(0), other=op.tensor(1))


def _not(op: Operator) -> None:
    op.emit("aten.logical_not.default", self=op.tensor(0))


def _where(op: Operator) -> None:
    a, b = op.number(1), op.number(2)
    kind = {(True, True): "Scalar", (True, False): "ScalarSelf", (False, True): "ScalarOther"}.get(
        (a is not None, b is not None), "self"
    )
    op.emit(
        f"aten.where.{kind}",
        condition=op.tensor(0), self=op.tensor(1) if a is None else a, other=op.tensor(2) if b is None else b,
    )  # fmt: skip


def _hard_sigmoid(op: Operator) -> None:
    slope, offset, x = op.real("alpha", 0.2), op.real("beta", 0.5), Expression.of(op)
    if math.isclose(slope, 1 / 6, rel_tol=1e-5) and offset == 0.5:
        op.emit("aten.hardsigmoid.default", self=x.name)
    else:
        (x * slope + offset).apply("clamp", min=0.0, max=1.0).give()


def _thresholded_relu(op: Operator) -> None:
    op.emit("aten.threshold.default", self=op.tensor(), threshold=op.real("alpha", 1.0), value=0.0)


def _shrink(op: Operator) -> None:
    """Emit x - bias above lambd, x + bias below -lambd, and 0 between them."""
    bound, bias, x = op.real("lambd", 0.5), op.real("bias", 0.0), Expression.of(op)
    if bias in (0.0, bound) and bound > 0:
        op.emit(f"aten.{'softshrink' if bias else 'hardshrink'}.default", self=x.name, lambd=bound)
        return
    above, below = x.compare("gt", bound), x.compare("lt", -bound)
    (above.choose(x - bias, 0.0) + below.choose(x + bias, 0.0)).give()


def _lp_norm(op: Operator) -> None:
    """Emit x divided by its norm along an axis; the result is 0 if the norm is 0.

    Raises:
        Refused: The norm is neither L1 nor L2, or is along the samples.
    """
    x, power = Expression.of(op), op.integer("p", 2)
    axis = op.integer("axis", -1) % len(x.shape)
    if power not in (1, 2):
        raise Refused(f"its p is {power}", "use p=1 or p=2")
    if axis == 0:
        raise Refused("it normalises over dimension 0, the samples", "keep the samples of a mini-batch apart")
    total = (x.apply("abs") if power == 1 else x**2).reduce("sum", (axis,))
    norm = total if power == 1 else total.apply("sqrt")
    (x / norm.apply("clamp", min=_SMALLEST)).give()


RULES: Mapping[str, Rule] = {
    "Clip": _clip,
    "Max": partial(_extreme, "maximum"),
    "Min": partial(_extreme, "minimum"),
    "Less": partial(_compared, "lt"),
    "LessOrEqual": partial(_compared, "le"),
    "Greater": partial(_compared, "gt"),
    "GreaterOrEqual": partial(_compared, "ge"),
    "Equal": partial(_compared, "eq"),
    "And": partial(_both, "aten.logical_and.default"),
    "Or": partial(_both, "aten.logical_or.default"),
    "Not": _not,
    "Where": _where,
    "HardSigmoid": _hard_sigmoid,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
    "LpNormalization": _lp_norm,
}
NOT_TAKEN: Mapping[str, str] = {}

"""Sums, differences, products and quotients of tensors, which are broadcast where their shapes differ.

Shapes are aligned at their last axes, as in NumPy and PyTorch. A vector is aligned with the channels, as biases are, or
with a given axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mbc.ir.graph import Attributes, Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.activation import Scale
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.broadcast import gate_shape
from mbc.ops.device import by_operator
from mbc.ops.reduce import Reduce
from mbc.ops.shape import Unflatten

NONE = NoAttributes()
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broadcast(Attributes):
    """An operator of two operands that are broadcast. The first operand has all rows that the result has.

    Attributes:
        operator: add, sub, mul, div; rsub: the second operand minus the first; rdiv: the second divided by the first;
            prelu: the first operand where it is positive, else its product with the second; prelu_slope: 1 where the
                first operand
            is positive, else the second.
        axis: Axis of the result with which an operand of one dimension is aligned.
    """

    operator: str
    axis: int = 1

    def aligned(self, shape: Shape, rank: int) -> Shape:
        """Return the shape of an operand, with as many axes as the result has."""
        if len(shape) == 1 < rank:
            return tuple(shape[0] if axis == self.axis else 1 for axis in range(rank))
        return (*(1,) * (rank - len(shape)), *shape)


_OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rsub": lambda a, b: b - a,
    "rdiv": lambda a, b: b / a,
    "prelu": lambda a, b: np.where(a > 0, a, a * b),
    "prelu_slope": lambda a, b: np.where(a > 0, a.dtype.type(1), b),
}
_IN_C = {
    "add": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b",
    "rsub": "b - a",
    "rdiv": "b / a",
    "prelu": "a > 0.0f ? a : a * b",
    "prelu_slope": "a > 0.0f ? 1.0f : b",
}
_REVERSED = {"sub": "rsub", "div": "rdiv"}


@dataclass(frozen=True)
class Family:
    """Operators of one kind of operation.

    Attributes:
        kind: The kind.
        reversed: By operator, the operator for exchanged operands, if that is another one.
        attributes: Returns the attributes of an operator along an axis.
    """

    kind: str
    reversed: Mapping[str, str]
    attributes: Callable[[str, int], Broadcast]


ARITHMETIC = Family("broadcast", _REVERSED, Broadcast)


def broadcast_shape(a: Broadcast, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the type of the result of two operands. Each is repeated along axes in which the other is larger.

    Raises:
        ShapeError: The operands cannot be broadcast.
    """
    left, right = inputs
    rank = max(len(left.shape), len(right.shape))
    if not 1 <= a.axis < max(rank, 2):
        raise ShapeError(f"{left} and {right} have no axis {a.axis}")
    if left.dtype != right.dtype:
        raise ShapeError(f"the element types of {left} and {right} differ")
    result: list[int] = []
    for m, n in zip(a.aligned(left.shape, rank), a.aligned(right.shape, rank), strict=True):
        if m != n and 1 not in (m, n):
            raise ShapeError(f"the shapes {left} and {right} differ")
        result.append(max(m, n))
    return (TensorType(tuple(result), left.dtype),)


def aligned_operands(a: Broadcast, inputs: Sequence[Array]) -> tuple[Array, Array]:
    """Return both operands with as many axes as the result has."""
    rank = max(x.ndim for x in inputs)
    left, right = (x.reshape(a.aligned(x.shape, rank)) for x in inputs)
    return left, right


def _shape(a: Broadcast, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if a.operator not in _OPERATORS:
        raise ShapeError(f"there is no operator {a.operator}")
    return broadcast_shape(a, inputs)


def _evaluate(a: Broadcast, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (_OPERATORS[a.operator](*aligned_operands(a, inputs)),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, Broadcast)
    first = 1 if a.operator in _REVERSED.values() else 0
    gradients: list[str | None] = [None, None]
    for number, rule in ((first, _of_first), (1 - first, _of_second)):
        if g.needs(op.inputs[number]):
            gradients[number] = rule(g, op, number, dy)
    return gradients[0], gradients[1]


def _of_first(g: Gradients, op: Operation, number: int, dy: str) -> str:
    """Return the gradient of a in a + b, a - b, a * b, a / b, prelu(a, b)."""
    a, other = op.attributes, op.inputs[1 - number]
    assert isinstance(a, Broadcast)
    if a.operator == "mul":
        return summed(g, op, number, dy, other)
    if a.operator == "prelu":
        (slope,) = g.emit("broadcast", Broadcast("prelu_slope", a.axis), (op.inputs[number], other))
        return g.emit("mul", NONE, (dy, slope), op.inputs[number])[0]
    if a.operator in ("div", "rdiv"):
        (dy,) = g.emit("broadcast", Broadcast("div", a.axis), (dy, other))
    return summed(g, op, number, dy)


def _of_second(g: Gradients, op: Operation, number: int, dy: str) -> str:
    """Return the gradient of b in a + b, a - b, a * b, a / b, prelu(a, b)."""
    a = op.attributes
    assert isinstance(a, Broadcast)
    if a.operator == "mul":
        return summed(g, op, number, dy, op.inputs[1 - number])
    if a.operator in ("div", "rdiv"):
        (quotient,) = g.emit("broadcast", Broadcast("div", a.axis), (op.outputs[0], op.inputs[number]))
        return summed(g, op, number, dy, quotient, -1.0)
    if a.operator == "prelu":
        x = op.inputs[1 - number]
        (positive,) = g.emit("relu", NONE, (x,))
        (negative,) = g.emit("broadcast", Broadcast("sub", a.axis), (x, positive))
        return summed(g, op, number, dy, negative)
    return summed(g, op, number, dy, factor=1.0 if a.operator == "add" else -1.0)


def summed(g: Gradients, op: Operation, number: int, dy: str, times: str = "", factor: float = 1.0) -> str:
    """Return `factor * dy * times`, summed over all axes along which operand `number` of `op` was repeated."""
    a, operand, y = op.attributes, op.inputs[number], op.outputs[0]
    assert isinstance(a, Broadcast)
    shape, whole = g.type(operand).shape, g.type(y).shape
    aligned = a.aligned(shape, len(whole))
    axes = tuple(axis for axis, size in enumerate(aligned) if axis and size != whole[axis])
    over_rows = len(shape) < len(whole) or aligned[0] != whole[0] or (g.has_rows(y) and not g.has_rows(operand))
    if times and g.type(times).shape != whole:
        # Both operands are repeated, each along another axis.
        (dy,) = g.emit("broadcast", Broadcast("mul", a.axis), (dy, times), *(() if axes or over_rows else (operand,)))
        times = ""
    if not axes and not over_rows:
        if times:
            (dy,) = g.emit("mul", NONE, (dy, times), *((operand,) if factor == 1.0 else ()))
        return dy if factor == 1.0 else g.emit("scale", Scale(factor), (dy,), operand)[0]
    kind = f"{'row_' * over_rows}reduce_{'dot' if times else 'sum'}"
    attributes = Reduce(axes, shape if over_rows else shape[1:], factor)
    return g.emit(kind, attributes, (dy, times) if times else (dy,), operand)[0]


OPS = (
    OpKind(
        "broadcast",
        Broadcast,
        _shape,
        _evaluate,
        _gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        broadcasts=True,
        device=by_operator("a, b", _IN_C),
    ),
)


class Operands(Protocol):
    """Facts about the values that are combined."""

    def type(self, value: str) -> TensorType:
        """Return the type of a value."""
        ...

    def has_rows(self, value: str) -> bool:
        """Return whether the first dimension of this value counts samples."""
        ...


# Appends an operation whose name ends with the last argument; returns its output.
Emit = Callable[[str, Attributes, tuple[str, ...], str], str]


def combine(
    operator: str, a: str, b: str, operands: Operands, emit: Emit, axis: int = 1, family: Family = ARITHMETIC
) -> str:
    """Return the result of `a operator b` with broadcasting, which is emitted.

    An operand [N, C] is a gate for [N, C, H, W].

    Args:
        operator: An operator of `family`.
        a: The first operand.
        b: The second operand.
        operands: Types of the operands.
        emit: Appends an operation and returns its output.
        axis: Axis of the result with which an operand of one dimension is aligned; negative: counted from the last.
        family: The operators.

    Raises:
        ShapeError: The operands cannot be broadcast.
    """
    left, right = operands.type(a), operands.type(b)
    rank = max(len(left.shape), len(right.shape))
    along = axis + rank if axis < 0 else axis
    if not 1 <= along < max(rank, 2):
        raise ShapeError(f"axis is {axis}, but must be from 1 to {rank - 1}, or -1 for the last")
    alike = left.shape == right.shape and operands.has_rows(a) == operands.has_rows(b)
    if alike and operator in ("add", "mul"):
        return emit(operator, NONE, (a, b), "")
    for x, gate in ((a, b), (b, a)):
        image, shape = operands.type(x), operands.type(gate).shape
        gated = len(image.shape) > 2 and shape in (image.shape[:2], gate_shape(image))
        if gated and operands.has_rows(x) == operands.has_rows(gate):
            if shape != gate_shape(image):
                unflattened = emit("unflatten", Unflatten(gate_shape(image)[1:]), (gate,), "gate")
                a, b = (unflattened if value == gate else value for value in (a, b))
                gate = unflattened
            if operator in ("add", "mul"):
                return emit(f"broadcast_{operator}", NONE, (x, gate), "")
            break
    _check_rows(operands, a, b)
    if (operands.has_rows(b), len(right.shape)) > (operands.has_rows(a), len(left.shape)):
        a, b, operator = b, a, family.reversed.get(operator, operator)
    try:
        return emit(family.kind, family.attributes(operator, along), (a, b), "")
    except ShapeError as error:
        raise ShapeError(f"{error}, and neither is [N, C] or [N, C, 1, 1] of the other's [N, C, H, W]") from None


def _check_rows(operands: Operands, a: str, b: str) -> None:
    """Check that operands with rows are aligned at their rows, and that operands without rows are not.

    Tensors are aligned at the last axes, where the rows of a shorter tensor would be aligned with another axis.

    Raises:
        ShapeError: Otherwise.
    """
    one, other = operands.type(a), operands.type(b)
    if operands.has_rows(a) and operands.has_rows(b) and len(one.shape) != len(other.shape):
        raise ShapeError(
            f"{one} and {other} both have samples, but different numbers of axes; keep=true leaves an axis of one "
            "element, and reshape adds one"
        )
    for x, other in ((a, b), (b, a)):
        if operands.has_rows(x) and not operands.has_rows(other):
            rank, shape = len(operands.type(x).shape), operands.type(other).shape
            if len(shape) > rank or (len(shape) == rank and shape[0] != 1) or (rank == 1 and not shape):
                raise ShapeError(
                    f"{operands.type(other)} has no samples, but would be aligned with the {operands.type(x).shape[0]} "
                    f"samples of {operands.type(x)}; its first axis must have one element, or be left out"
                )


def chain(name: str, text: str, most: int | None, family: Family = ARITHMETIC) -> Layer:
    """Return a layer that combines two or more tensors from left to right; at most `most` if that is given."""

    def build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
        total = inputs[0]
        for number, other in enumerate(inputs[1:]):
            prefix = str(number) if len(inputs) > 2 else ""

            def emit(kind: str, attributes: Attributes, values: tuple[str, ...], suffix: str, of: str = prefix) -> str:
                return builder.emit(kind, attributes, values, of + suffix)[0]

            total = combine(name, total, other, builder, emit, settings["axis"], family)
        return total

    return Layer(name, (Parameter("axis", "int", 1),), build, (2, most), text, broadcasts=True)


def _build_prelu(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    (x,) = inputs
    shape = builder.type(x).shape
    if len(shape) < 2:
        raise ShapeError(f"prelu needs a tensor with rows and channels, but got {builder.type(x)}")
    weight = builder.state("weight", shape[1:2] if settings["channels"] else (1,), Initializer("constant", 0.25))
    slope = builder.emit("state", NONE, (weight,), "slope")[0]
    return builder.emit("broadcast", Broadcast("prelu"), (x, slope))[0]


LAYERS = (
    Layer(
        "prelu",
        (Parameter("channels", "bool", False),),
        _build_prelu,
        help="x where positive, else times a trained slope: one, or one for each channel.",
    ),
    chain(
        "add",
        "Sum of tensors, broadcast where shapes differ: aligned at the last axes; [N, C] is added to each pixel of "
        "[N, C, H, W], and a vector lies along `axis`.",
        None,
    ),
    chain("sub", "The first tensor less the second, broadcast as `add` does.", 2),
    chain(
        "mul",
        "Product of tensors, element by element, broadcast as `add` does: [N, C] or [N, C, 1, 1] multiplies each pixel "
        "of [N, C, H, W].",
        None,
    ),
    chain("div", "The first tensor by the second, element by element, broadcast as `add` does.", 2),
)

"""Sums, differences, products and quotients of tensors, which are broadcast where their shapes differ.

Shapes are aligned at their last axes, as NumPy's and PyTorch's are; a vector lies along the channels, as biases do,
or along a given axis.
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
from mbc.ops.reduce import Reduce
from mbc.ops.shape import Unflatten

NONE = NoAttributes()
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broadcast(Attributes):
    """`operator`: add | sub | mul | div, or rsub | rdiv: the second operand less the first, or by it; prelu: the first
    where positive, else times the second; prelu_slope: 1 where the first is positive, else the second. The first
    operand has all rows that the result has. `axis` of the result along which an operand of one dimension lies."""

    operator: str
    axis: int = 1

    def aligned(self, shape: Shape, rank: int) -> Shape:
        """The shape of an operand with as many axes as the result has."""
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
_REVERSED = {"sub": "rsub", "div": "rdiv"}


@dataclass(frozen=True)
class Family:
    """Operators that one kind has: `reversed`, what the operands are combined by where they are exchanged, if that is
    another one; `attributes` of an operator along an axis."""

    kind: str
    reversed: Mapping[str, str]
    attributes: Callable[[str, int], Broadcast]


ARITHMETIC = Family("broadcast", _REVERSED, Broadcast)


def broadcast_shape(a: Broadcast, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the type of the result of two operands that are repeated along each other's axes."""
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


def _gradient(g: Gradients, op: Operation, dys: tuple[str | None, ...]) -> tuple[str | None, ...]:
    (dy,) = dys
    a = op.attributes
    assert isinstance(a, Broadcast)
    if dy is None:
        return None, None
    first = 1 if a.operator in _REVERSED.values() else 0
    found: list[str | None] = [None, None]
    for number, rule in ((first, _of_first), (1 - first, _of_second)):
        if g.needs(op.inputs[number]):
            found[number] = rule(g, op, number, dy)
    return found[0], found[1]


def _of_first(g: Gradients, op: Operation, number: int, dy: str) -> str:
    """Of a in a + b, a - b, a * b, a / b, prelu(a, b)."""
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
    """Of b."""
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
    """`factor * dy * times`, added up over all that the operand of this number was repeated along."""
    a, operand, y = op.attributes, op.inputs[number], op.outputs[0]
    assert isinstance(a, Broadcast)
    shape, whole = g.type(operand).shape, g.type(y).shape
    aligned = a.aligned(shape, len(whole))
    axes = tuple(axis for axis, size in enumerate(aligned) if axis and size != whole[axis])
    over_rows = len(shape) < len(whole) or aligned[0] != whole[0] or (g.has_rows(y) and not g.has_rows(operand))
    if times and g.type(times).shape != whole:
        # Both are repeated, each along another axis.
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
    ),
)


class Operands(Protocol):
    """What is known of values that are combined."""

    def type(self, value: str) -> TensorType: ...

    def has_rows(self, value: str) -> bool: ...


# Appends an operation whose name ends with the last argument; returns its output.
Emit = Callable[[str, Attributes, tuple[str, ...], str], str]


def combine(
    operator: str, a: str, b: str, known: Operands, emit: Emit, axis: int = 1, family: Family = ARITHMETIC
) -> str:
    """`a operator b`, broadcast. [N, C] is a gate for the other's [N, C, H, W]."""
    left, right = known.type(a), known.type(b)
    rank = max(len(left.shape), len(right.shape))
    along = axis + rank if axis < 0 else axis
    if not 1 <= along < max(rank, 2):
        raise ShapeError(f"axis is {axis}, but must be from 1 to {rank - 1}, or -1 for the last")
    alike = left.shape == right.shape and known.has_rows(a) == known.has_rows(b)
    if alike and operator in ("add", "mul"):
        return emit(operator, NONE, (a, b), "")
    for x, gate in ((a, b), (b, a)):
        image, shape = known.type(x), known.type(gate).shape
        gated = len(image.shape) > 2 and shape in (image.shape[:2], gate_shape(image))
        if gated and known.has_rows(x) == known.has_rows(gate):
            if shape != gate_shape(image):
                unflattened = emit("unflatten", Unflatten(gate_shape(image)[1:]), (gate,), "gate")
                a, b = (unflattened if value == gate else value for value in (a, b))
                gate = unflattened
            if operator in ("add", "mul"):
                return emit(f"broadcast_{operator}", NONE, (x, gate), "")
            break
    _check_rows(known, a, b)
    if (known.has_rows(b), len(right.shape)) > (known.has_rows(a), len(left.shape)):
        a, b, operator = b, a, family.reversed.get(operator, operator)
    try:
        return emit(family.kind, family.attributes(operator, along), (a, b), "")
    except ShapeError as error:
        raise ShapeError(f"{error}, and neither is [N, C] or [N, C, 1, 1] of the other's [N, C, H, W]") from None


def _check_rows(known: Operands, a: str, b: str) -> None:
    """What has no rows cannot lie along those of what has, and rows lie along rows only: tensors are aligned at the
    last axes, where the rows of the shorter one would stand for something else."""
    one, other = known.type(a), known.type(b)
    if known.has_rows(a) and known.has_rows(b) and len(one.shape) != len(other.shape):
        raise ShapeError(
            f"{one} and {other} both have samples, and not equally many axes; keep=true leaves an axis of one element, "
            "and reshape gives one"
        )
    for x, other in ((a, b), (b, a)):
        if known.has_rows(x) and not known.has_rows(other):
            rank, shape = len(known.type(x).shape), known.type(other).shape
            if len(shape) > rank or (len(shape) == rank and shape[0] != 1) or (rank == 1 and not shape):
                raise ShapeError(
                    f"{known.type(other)} is no batch, but would lie along the {known.type(x).shape[0]} samples of "
                    f"{known.type(x)}; its first axis must have one element, or be left out"
                )


def chain(name: str, text: str, most: int | None, family: Family = ARITHMETIC) -> Layer:
    """A layer of two or more tensors, taken from left to right."""

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

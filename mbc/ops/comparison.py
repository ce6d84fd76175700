"""Operators that compare or choose, element by element and broadcast: maximum, minimum, masks, comparisons.

A mask is a tensor like any other: true where it is not 0. Comparisons return 1 and 0, and no gradient flows through
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.arithmetic import Broadcast, Emit, Family, aligned_operands, broadcast_shape, chain, combine, summed
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.device import by_operator


@dataclass(frozen=True, slots=True)
class Select(Broadcast):
    """An operator that chooses between operands or fills in a value.

    Attributes:
        operator: maximum, minimum; fill: the first operand, but the value where the second is not 0; keep: the first
            operand, but the value where the second is 0; rfill and rkeep: fill and keep of exchanged operands.
        value: The value, if it is finite.
        infinite: 1 or -1 if the value is infinite, with its sign.
    """

    value: float = 0.0
    infinite: int = 0

    @property
    def filled(self) -> float:
        """The value that is filled in."""
        return self.infinite * math.inf if self.infinite else self.value


@dataclass(frozen=True, slots=True)
class Relation(Broadcast):
    """A comparison: 1 where it holds of the operands, else 0.

    Attributes:
        operator: eq, ne, lt, le, gt, ge; max_share: the share of a maximum's gradient for the first operand, 1 where it
            is larger and 1/2 where both are equal; rmax_share: the share for the second operand.
    """


def _share(a: Array, b: Array) -> Array:
    """Return the share of a maximum's gradient for `a`; a NaN gets all of it, as in PyTorch."""
    return np.where(a == b, 0.5, np.where(a < b, 0.0, 1.0))


RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
IN_C = MappingProxyType({"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})
_SHARES: dict[str, Callable[[Array, Array], Array]] = {"max_share": _share, "rmax_share": lambda a, b: _share(b, a)}
_SELECTIONS: dict[str, Callable[[Array, Array, float], Array]] = {
    "maximum": lambda a, b, value: np.maximum(a, b),
    "minimum": lambda a, b, value: np.minimum(a, b),
    "fill": lambda a, b, value: np.where(b != 0, a.dtype.type(value), a),
    "keep": lambda a, b, value: np.where(b != 0, a, a.dtype.type(value)),
    "rfill": lambda a, b, value: np.where(a != 0, a.dtype.type(value), b),
    "rkeep": lambda a, b, value: np.where(a != 0, b, a.dtype.type(value)),
}
_SELECTIONS_IN_C = {
    "maximum": "a > b || a != a ? a : b",
    "minimum": "a < b || a != a ? a : b",
    "fill": "b != 0.0f ? filled : a",
    "keep": "b != 0.0f ? a : filled",
    "rfill": "a != 0.0f ? filled : b",
    "rkeep": "a != 0.0f ? b : filled",
}
_RELATIONS_IN_C = {
    **{operator: f"a {sign} b ? 1.0f : 0.0f" for operator, sign in IN_C.items()},
    "max_share": "a == b ? 0.5f : a < b ? 0.0f : 1.0f",
    "rmax_share": "a == b ? 0.5f : b < a ? 0.0f : 1.0f",
}
# The operator for exchanged operands.
_EXCHANGED = MappingProxyType(
    {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "max_share": "rmax_share", "rmax_share": "max_share"}
)
SELECTION = Family("select", MappingProxyType({"fill": "rfill", "keep": "rkeep"}), Select)
RELATION = Family("relation", _EXCHANGED, Relation)


def _select_shape(a: Select, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if a.operator not in _SELECTIONS or a.infinite not in (-1, 0, 1) or not math.isfinite(a.value):
        raise ShapeError(f"there is no selection {a.operator} with the value {a.filled}")
    return broadcast_shape(a, inputs)


def _relation_shape(a: Relation, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if a.operator not in RELATIONS and a.operator not in _SHARES:
        raise ShapeError(f"there is no comparison {a.operator}")
    return broadcast_shape(a, inputs)


def _select(a: Select, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (_SELECTIONS[a.operator](*aligned_operands(a, inputs), a.filled),)


def _relation(a: Relation, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    rule = RELATIONS.get(a.operator) or _SHARES[a.operator]
    return (rule(*aligned_operands(a, inputs)).astype(inputs[0].dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, Select)
    gradients: list[str | None] = [None, None]
    if a.operator in ("maximum", "minimum"):
        shares = ("max_share", "rmax_share") if a.operator == "maximum" else ("rmax_share", "max_share")
        for number, share in enumerate(shares):
            if g.needs(op.inputs[number]):
                (times,) = g.emit("relation", Relation(share, a.axis), op.inputs)
                gradients[number] = summed(g, op, number, dy, times)
        return gradients[0], gradients[1]
    number = int(a.operator.startswith("r"))
    if g.needs(op.inputs[number]):
        masked = Select(a.operator.removeprefix("r"), a.axis)
        (kept,) = g.emit("select", masked, (dy, op.inputs[1 - number]))
        gradients[number] = summed(g, op, number, kept)
    return gradients[0], gradients[1]


OPS = (
    OpKind(
        "select",
        Select,
        _select_shape,
        _select,
        _gradient,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        broadcasts=True,
        device=by_operator("a, b", _SELECTIONS_IN_C, "filled"),
    ),
    OpKind(
        "relation",
        Relation,
        _relation_shape,
        _relation,
        divisible=True,
        in_place=((0, 0), (0, 1)),
        broadcasts=True,
        device=by_operator("a, b", _RELATIONS_IN_C),
    ),
)

AXIS = Parameter("axis", "int", 1)


def masked(value: float) -> Callable[[str, int], Select]:
    """Return a function that makes the attributes of a selection that fills in `value`."""
    if math.isinf(value):
        return partial(Select, infinite=1 if value > 0 else -1)
    return partial(Select, value=value)


def _filled(value: float) -> Family:
    return Family(SELECTION.kind, SELECTION.reversed, masked(value))


def _emitter(builder: LayerBuilder, prefix: str = "") -> Emit:
    def emit(kind: str, attributes: Attributes, values: tuple[str, ...], suffix: str) -> str:
        return builder.emit(kind, attributes, values, ".".join(part for part in (prefix, suffix) if part))[0]

    return emit


def _build_filled(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, mask = inputs
    return combine("fill", x, mask, builder, _emitter(builder), settings["axis"], _filled(settings["value"]))


def _build_where(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    """Return the sum of each operand where it is chosen and 0 elsewhere; the sum is exact."""
    mask, *values = inputs
    whole = max(len(builder.type(value).shape) for value in inputs)
    axis = settings["axis"] - (
        whole if 1 <= settings["axis"] < whole else 0
    )  # counted from the last axis, because the operands may have any rank
    parts: list[str] = []
    for operator, value in zip(("keep", "fill"), values, strict=True):
        ranks = [len(builder.type(operand).shape) for operand in (value, mask)]
        along = axis if min(ranks) == 1 < max(ranks) else 1
        parts.append(combine(operator, value, mask, builder, _emitter(builder, operator), along, SELECTION))
    return combine("add", parts[0], parts[1], builder, _emitter(builder), axis)


def _build_comparison(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    a, b = inputs
    return combine(settings["operator"], a, b, builder, _emitter(builder), settings["axis"], RELATION)


LAYERS = (
    chain("maximum", "Larger of tensors, broadcast as `add` does; equal ones share the gradient.", None, SELECTION),
    chain("minimum", "Smaller of tensors, broadcast as `add` does; equal ones share the gradient.", None, SELECTION),
    Layer(
        "where",
        (AXIS,),
        _build_where,
        (3, 3),
        "(mask, a, b) |> where: a where the mask is not 0, else b, broadcast as `add` does.",
        broadcasts=True,
    ),
    Layer(
        "masked_fill",
        (Parameter("value", "real"), AXIS),
        _build_filled,
        (2, 2),
        "(x, mask) |> masked_fill(0): x, but the value where the mask is not 0, broadcast as `add` does.",
        broadcasts=True,
    ),
    Layer(
        "compare",
        (Parameter("operator", "word", words=tuple(RELATIONS)), AXIS),
        _build_comparison,
        (2, 2),
        "(a, b) |> compare(gt): 1 where a > b and else 0, broadcast as `add` does. No gradient flows through it.",
        broadcasts=True,
    ),
)

"""Collectives: operations whose result depends on the operands of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, NoAttributes, OpKind, ShapeError, master


@dataclass(frozen=True, slots=True)
class AllReduce(Attributes):
    """Settings of an all-reduce: the number of operands that are summed."""

    ranks: int


@dataclass(frozen=True, slots=True)
class AllGather(Attributes):
    """Settings of an all-gather: the number of ranks whose operands are gathered."""

    ranks: int


WORD_BYTES = 4  # unit in which tensors of any type are gathered


def in_words(operands: Sequence[TensorType]) -> bool:
    """Return whether all operands are a whole number of words, and so can be gathered."""
    return all(operand.size_bytes % WORD_BYTES == 0 for operand in operands)


def check_ranks(ranks: int, operands: Sequence[TensorType], master_only: bool = True) -> None:
    """Raise ShapeError for operands that a collective does not take.

    Args:
        ranks: Number of ranks.
        operands: Types of the operands.
        master_only: Whether operands must have the master type.

    Raises:
        ShapeError: There are too few ranks, or an operand has another type.
    """
    for operand in operands:
        if master_only and operand.dtype is not master(operand.dtype):
            raise ShapeError(f"collectives are in the master type, but the operand is {operand}")
    if ranks < 2:
        raise ShapeError(f"a collective of {ranks} ranks")


def _sum_shape(a: AllReduce, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (summand,) = inputs
    check_ranks(a.ranks, inputs)
    return (summand,)


def _sum(a: AllReduce, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (call.collectives.sum_on_host(inputs[0]),)


def _gather_shape(a: AllGather, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    check_ranks(a.ranks, inputs)
    if len({(operand.shape, operand.dtype) for operand in inputs}) != 1:
        raise ShapeError(f"operands of one collective differ: {', '.join(map(str, inputs))}")
    return tuple(TensorType((a.ranks, *operand.shape), operand.dtype) for operand in inputs)


def _gather(a: AllGather, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return tuple(call.collectives.gather_on_host(operand) for operand in inputs)


def _rows_shape(a: AllGather, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    # Gathering adds nothing, so any type is allowed.
    check_ranks(a.ranks, inputs, master_only=False)
    for operand in inputs:
        if not operand.shape or operand.shape[0] != inputs[0].shape[0]:
            raise ShapeError(f"these do not have the same rows: {', '.join(map(str, inputs))}")
    return tuple(TensorType((a.ranks * operand.shape[0], *operand.shape[1:]), operand.dtype) for operand in inputs)


def _rows(a: AllGather, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return tuple(call.collectives.gather_on_host(operand).reshape(-1, *operand.shape[1:]) for operand in inputs)


def _sum_gathered_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    for operand in inputs:
        if len(operand.shape) < 2 or operand != inputs[0]:
            raise ShapeError(f"these are not gathered from the same ranks: {', '.join(map(str, inputs))}")
    return tuple(TensorType(operand.shape[1:], operand.dtype) for operand in inputs)


def _sum_gathered(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return tuple(operand.sum(axis=0, dtype=np.float64).astype(operand.dtype) for operand in inputs)


def over_all_ranks(e: Expansion, kind: str, attributes: Attributes, inputs: Sequence[str], name: str) -> str:
    """Return the output of an operation that sums over rows, summed over all ranks if there are several.

    Args:
        e: The graph in which the operations are emitted.
        kind: Kind of the operation.
        attributes: Its attributes.
        inputs: Its inputs.
        name: Name of the result.
    """
    if e.ranks is None:
        return e.emit(kind, attributes, inputs, (name,), name)[0]
    own = e.emit(kind, attributes, inputs, (f"{name}.own",), name)
    gathered = e.emit("all_gather", AllGather(e.ranks.size), own, (f"{name}.ranks",), f"{name}.all_gather")
    return e.emit("sum_gathered", NoAttributes(), gathered, (name,), f"{name}.sum")[0]


OPS = (
    OpKind("all_reduce", AllReduce, _sum_shape, _sum, in_place=((0, 0),), reduces=True),
    OpKind("all_gather", AllGather, _gather_shape, _gather, reduces=True),
    # The rows of all ranks, one rank after another. Each rank has equally many.
    OpKind("gather_rows", AllGather, _rows_shape, _rows, reduces=True),
    OpKind("sum_gathered", NoAttributes, _sum_gathered_shape, _sum_gathered, reduces=True),
)

LAYERS: tuple[Any, ...] = ()

"""Collectives: operations whose result depends on the operands of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mbc.ir.graph import Attributes
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, OpKind, ShapeError, master


@dataclass(frozen=True, slots=True)
class AllReduce(Attributes):
    """`ranks`: how many operands are summed."""

    ranks: int


def _shape(a: AllReduce, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (summand,) = inputs
    if summand.dtype is not master(summand.dtype):
        raise ShapeError(f"sums over ranks are in the master type, but the operand is {summand}")
    if a.ranks < 2:
        raise ShapeError(f"a sum over {a.ranks} ranks")
    return (summand,)


def _evaluate(a: AllReduce, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return (call.sum_over_ranks(inputs[0]),)


OPS = (OpKind("all_reduce", AllReduce, _shape, _evaluate, in_place=((0, 0),), reduces=True),)

LAYERS: tuple[Any, ...] = ()

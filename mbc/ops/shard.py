"""A sharded optimizer: each rank has the optimizer's states of its part of a parameter, and updates only that part.

ZeRO stage 1: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020. A part
is whole rows, along the first axis, so that it is contiguous in every layout: of K rows and N ranks, rank r has the
c = ceil(K / N) rows from r * c on. If N does not divide K, the last ranks have fewer rows or none; the rest of their
parts is padding, which is zero. The control block holds the number of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation, TrainingGraph
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, NoAttributes, OpKind, ShapeError
from mbc.ops.collective import AllGather, check_ranks
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.update import AdamW, Sgd, updated_by_adamw, updated_by_sgd

UPDATES_OF_PARTS = ("sgd_update_part", "adamw_update_part")


@dataclass(frozen=True, slots=True)
class ReduceScatter(Attributes):
    """Settings of a reduce-scatter: the number of operands that are summed, and of parts of the sum."""

    ranks: int


def part_of(whole: TensorType, ranks: int) -> TensorType:
    """Return the type of a part, padding included."""
    return whole.with_rows(-(-whole.shape[0] // ranks))


def parameters_of_sharded_states(operations: Iterable[Operation]) -> Mapping[str, str]:
    """Return the parameter of each sharded state, by the state's name; the whole state has the parameter's shape."""
    return {state: op.inputs[0] for op in operations if op.kind in UPDATES_OF_PARTS for state in op.inputs[3:]}


def is_sharded(graph: TrainingGraph) -> bool:
    """Return whether each rank has only parts of the optimizer's states."""
    return bool(parameters_of_sharded_states(graph.train))


def own_rows(whole_rows: int, part_rows: int, rank: int) -> slice:
    """Return the rows of a tensor that are in the part of a rank."""
    first = min(rank * part_rows, whole_rows)
    return slice(first, min(first + part_rows, whole_rows))


def part_from(whole: Array, part_rows: int, rank: int) -> Array:
    """Return the part of a rank, padded with zeros."""
    own = whole[own_rows(len(whole), part_rows, rank)]
    return np.concatenate([own, np.zeros((part_rows - len(own), *whole.shape[1:]), whole.dtype)])


def whole_from(parts: Array, rows: int) -> Array:
    """Return the tensor of `rows` rows from the parts of all ranks, [ranks, ...]."""
    return parts.reshape(-1, *parts.shape[2:])[:rows]


def _scatter_shape(a: ReduceScatter, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (summand,) = inputs
    check_ranks(a.ranks, inputs)
    if not summand.shape or summand.shape[0] < 2:
        raise ShapeError(f"{summand} has no rows to cut into {a.ranks} parts")
    return (part_of(summand, a.ranks),)


def _scatter(a: ReduceScatter, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    total = call.collectives.sum_on_host(inputs[0])
    return (part_from(total, call.outputs[0].shape[0], call.collectives.rank),)


def _gather_shape(a: AllGather, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    part, old = inputs
    check_ranks(a.ranks, inputs)
    if not old.shape or part != part_of(old, a.ranks):
        raise ShapeError(f"{part} is not a part of {old} for one of {a.ranks} ranks")
    return (old,)


def _gather(a: AllGather, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    part, old = inputs
    return (whole_from(call.collectives.gather_on_host(part), len(old)),)


def _update_shape(parameter: TensorType, gradient: TensorType, control: TensorType, *states: TensorType) -> None:
    control_shape(control)
    if not states or any(state != states[0] for state in states):
        raise ShapeError(f"these are not parts of an optimizer's states: {', '.join(map(str, states))}")
    part = states[0]
    if part.shape[1:] != parameter.shape[1:] or part.dtype != parameter.dtype or part.shape[0] >= parameter.shape[0]:
        raise ShapeError(f"{part} is not a part of parameter {parameter}")
    if gradient not in (part, parameter):
        raise ShapeError(f"gradient {gradient} fits neither parameter {parameter} nor its part {part}")


def _sgd_shape(a: Sgd, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if len(inputs) != 4 or not a.momentum:
        raise ShapeError("sgd without momentum has no states to shard")
    _update_shape(*inputs)
    return (inputs[3], inputs[3])


def _adamw_shape(a: AdamW, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if len(inputs) != 5:
        raise ShapeError(f"adamw has two states, but got {len(inputs)} operands")
    _update_shape(*inputs)
    return (inputs[3],) * 3


def _reads(_: Attributes, inputs: tuple[TensorType, ...]) -> tuple[float, ...]:
    """Return the share of each input that is read: of whole tensors, this rank's part."""
    part = inputs[3]
    return tuple(min(1.0, part.elements / operand.elements) for operand in inputs)


def _updated(
    whole: Callable[..., tuple[Array, ...]], a: Attributes, inputs: Sequence[Array], call: Call
) -> tuple[Array, ...]:
    """Return this rank's part of the update of whole operands.

    In the padding, states stay unchanged and the part is zero.
    """
    parameter, gradient, control, *states = inputs
    rank, rows = int(control_record(control)["rank"]), len(states[0])
    own = own_rows(len(parameter), rows, rank)
    if len(gradient) == len(parameter):
        gradient = gradient[own]
    count = own.stop - own.start
    results = whole(a, [parameter[own], gradient[:count], control, *(state[:count] for state in states)], call)
    before = [np.zeros_like(states[0]), *states]
    return tuple(np.concatenate([new, old[count:]]) for new, old in zip(results, before, strict=True))


def _sgd(a: Sgd, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _updated(updated_by_sgd, a, inputs, call)


def _adamw(a: AdamW, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return _updated(updated_by_adamw, a, inputs, call)


def _norm_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    check_ranks(2, inputs)
    return (TensorType((1,), inputs[0].dtype),)


def _norm(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in inputs)
    return (np.array([math.sqrt(squares)], inputs[0].dtype),)


OPS = (
    # The sum over all ranks; each rank keeps its part.
    OpKind("reduce_scatter", ReduceScatter, _scatter_shape, _scatter, reduces=True),
    # Updates of this rank's part, otherwise as in `mbc.ops.update`: states and the new parameter are parts, the
    # parameter is whole, the gradient is either.
    OpKind("sgd_update_part", Sgd, _sgd_shape, _sgd, in_place=((0, 1),), updates=((1, 3),), reduces=True, reads=_reads),
    OpKind(
        "adamw_update_part",
        AdamW,
        _adamw_shape,
        _adamw,
        in_place=((0, 1),),
        updates=((1, 3), (2, 4)),
        reduces=True,
        reads=_reads,
    ),
    # The parts of all ranks overwrite the old parameter.
    OpKind("gather_parts", AllGather, _gather_shape, _gather, updates=((0, 1),), reduces=True),
    # The L2 norm of all operands together. The norm of all ranks' norms is the norm of all gradients.
    OpKind("norm", NoAttributes, _norm_shape, _norm, reduces=True),
)

LAYERS: tuple[Any, ...] = ()

"""The optimizer's states sharded over ranks: each rank has those of its part of a parameter (`mbc.ops.shard`).

The all-reduce of a gradient becomes a reduce-scatter, the update becomes that of this rank's part, and the new
parameter is gathered from all ranks: a link carries the same bytes as before. A gradient of gathered rows, which every
rank already has as a whole, is read at this rank's part. If `guard` reads gradients, it reads the norms of all ranks'
parts instead, because the norm of the norms is the norm of all gradients, and is finite if all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.errors import MbcError
from mbc.ir.graph import Operation, Optimizer, Ranks, Role, Value
from mbc.ir.types import TensorType
from mbc.ops.activation import Scale
from mbc.ops.base import NoAttributes
from mbc.ops.collective import AllGather, AllReduce
from mbc.ops.shard import ReduceScatter, part_of

# Smaller parameters, such as those of batch normalisation and biases, are summed and updated as a whole. They are a few
# thousandths of a network, and each would take a call of NCCL.
LEAST_BYTES = 16 << 10
PARTS = {"sgd_update": "sgd_update_part", "adamw_update": "adamw_update_part"}
COPY = Scale(1.0)
NORM, NORMS = "norm.parts", "norms.parts"


def shard_optimizer(operations: Sequence[Operation], values: dict[str, Value], ranks: Ranks | None) -> list[Operation]:
    """Return the operations with the states of large parameters sharded, if all ranks run one plan.

    Args:
        operations: The operations of a step.
        values: Gets `part.<gradient>` and `part.<new parameter>`; the types of the states become those of parts.
        ranks: The ranks; None for one GPU.
    """
    if not can_shard(ranks):
        return [*operations]
    assert ranks is not None
    updates = {op.name: op for op in operations if _is_worth_it(op, values, ranks)}
    gradients = {op.inputs[1] for op in updates.values()}
    scattered: dict[str, str] = {}  # by the sum over ranks: this rank's part
    written: list[Operation] = []
    gathers: list[Operation] = []
    # All-reduces overwrite copies of sums over mini-batches; a reduce-scatter reads the sums themselves.
    summed = {op.inputs[0] for op in operations if isinstance(op.attributes, AllReduce) and op.outputs[0] in gradients}
    sums = {output for op in operations if op.kind == "accumulate" for output in op.outputs}
    copied = {
        op.outputs[0]: op.inputs[0]
        for op in operations
        if op.attributes == COPY and op.outputs[0] in summed and op.inputs[0] in sums
    }
    for op in operations:
        if op.attributes == COPY and op.outputs[0] in copied:
            continue
        if isinstance(op.attributes, AllReduce) and op.outputs[0] in gradients:
            op = replace(op, inputs=tuple(copied.get(name, name) for name in op.inputs))
            written.append(_scatter(op, values, ranks))
            scattered[op.outputs[0]] = written[-1].outputs[0]
        elif op.name in updates:
            update, gather = _update(op, scattered, values, ranks)
            written.append(update)
            gathers.append(gather)
        elif op.kind == "guard" and not scattered.keys().isdisjoint(op.inputs):
            written += _guard(op, scattered, values, ranks)
        else:
            written.append(op)
    # The gathers follow all updates, which one launch may run, and precede the readers of the new parameters.
    gathered = {name for op in gathers for name in op.outputs}
    behind = next((at for at, op in enumerate(written) if not gathered.isdisjoint(op.inputs)), len(written))
    return [*written[:behind], *gathers, *written[behind:]]


def can_shard(ranks: Ranks | None) -> bool:
    """Return whether there are ranks and all run one plan; parts of another plan could be in another order."""
    return ranks is not None and len(ranks.members) == ranks.size


def check_can_shard(wanted: bool, ranks: Ranks | None, optimizer: Optimizer) -> None:
    """Check that the optimizer's states can be sharded, if this is `wanted`.

    Raises:
        MbcError: MBC100 if several ranks do not run one plan; MBC101 if the optimizer's states cannot be sharded, or if
            whole gradients are needed.
    """
    if wanted and f"{optimizer.kind}_update" not in PARTS:
        raise MbcError(
            "MBC101",
            f"states of {optimizer.kind} cannot be sharded: its steps depend on norms of whole parameters",
            "choose sgd or adamw, or remove shard_optimizer",
        )
    if wanted and optimizer.noise_scale:
        raise MbcError(
            "MBC101",
            "the optimizer's states cannot be sharded: noise_scale needs norms of whole gradients",
            "remove shard_optimizer or noise_scale",
        )
    if wanted and ranks is not None and not can_shard(ranks):
        raise MbcError(
            "MBC100",
            f"the optimizer's states cannot be sharded over {ranks.size} GPUs that do not run one plan, with "
            f"{', '.join(map(str, ranks.rows))} rows",
            "choose a batch that the GPUs share evenly and GPUs of one kind, or remove shard_optimizer",
        )


def _is_worth_it(op: Operation, values: dict[str, Value], ranks: Ranks) -> bool:
    if op.kind not in PARTS or len(op.inputs) < 4:  # sgd without momentum has no states
        return False
    parameter = values[op.inputs[0]].type
    return parameter.size_bytes >= LEAST_BYTES and bool(parameter.shape) and parameter.shape[0] >= 2


def _scatter(total: Operation, values: dict[str, Value], ranks: Ranks) -> Operation:
    own = total.inputs[0]
    part = _declare(f"part.{own}", part_of(values[own].type, ranks.size), total, values)
    return Operation(
        f"{own}.reduce_scatter", "reduce_scatter", total.inputs, (part,), ReduceScatter(ranks.size), total.span
    )


def _update(
    op: Operation, scattered: dict[str, str], values: dict[str, Value], ranks: Ranks
) -> tuple[Operation, Operation]:
    """Return the update of a part, and the operation that gathers the new parameter."""
    parameter, gradient, control, *states = op.inputs
    after, *next_states = op.outputs
    kind = part_of(values[parameter].type, ranks.size)
    for name in (*states, *next_states):
        values[name] = replace(values[name], type=kind)
    part = _declare(f"part.{after}", kind, op, values)
    update = replace(
        op,
        kind=PARTS[op.kind],
        inputs=(parameter, scattered.get(gradient, gradient), control, *states),
        outputs=(part, *next_states),
    )
    gather = Operation(
        f"{parameter}.gather_parts", "gather_parts", (part, parameter), (after,), AllGather(ranks.size), op.span
    )
    return update, gather


def _guard(op: Operation, scattered: dict[str, str], values: dict[str, Value], ranks: Ranks) -> list[Operation]:
    """Return the guard that reads the norms of all ranks' parts, and the operations that compute these norms."""
    kind = TensorType((1,), values[op.inputs[1]].type.dtype)
    norm = _declare(NORM, kind, op, values)
    norms = _declare(NORMS, TensorType((ranks.size, 1), kind.dtype), op, values)
    parts = tuple(scattered[name] for name in op.inputs if name in scattered)
    whole = tuple(name for name in op.inputs if name not in scattered)
    return [
        Operation(NORM, "norm", parts, (norm,), NoAttributes(), op.span),
        Operation(f"{NORM}.all_gather", "all_gather", (norm,), (norms,), AllGather(ranks.size), op.span),
        replace(op, inputs=(*whole, norms)),
    ]


def _declare(name: str, kind: TensorType, by: Operation, values: dict[str, Value]) -> str:
    while name in values:
        name += "_"
    values[name] = Value(name, kind, Role.INTERMEDIATE, span=by.span)
    return name

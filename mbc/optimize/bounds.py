"""What no plan can beat."""

from __future__ import annotations

from mbc.ir.graph import Operation, Role
from mbc.ops import KINDS
from mbc.optimize.candidates import CandidateTable, least_workspace_bytes
from mbc.optimize.lifetimes import aligned


def floor_bytes(table: CandidateTable, host_bytes: int = 0) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    No program does better: whatever is recomputed or sent away, each operation needs its operands together. Of the
    optimizer's states as much as `host_bytes` may be in host memory when no operation needs them.
    """
    graph = table.graph
    sizes = {state.value: aligned(graph.values[state.value].type.size_bytes) for state in graph.states}
    movable = {name for name in sizes if graph.values[name].role is Role.OPTIMIZER}
    away = min(host_bytes, sum(sizes[name] for name in movable))
    states = sum(sizes.values()) - away
    worst = -1
    where = graph.train[0]
    for operation in (*graph.train, *graph.infer):
        if KINDS[operation.kind].view:
            continue
        shared = {output for output, _ in (*KINDS[operation.kind].updates, *KINDS[operation.kind].in_place)}
        names = dict.fromkeys(operation.inputs)
        names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
        taken = sum(
            aligned(graph.values[name].type.size_bytes) for name in names if not graph.values[name].role.persistent
        )
        # Of the movable states those that it needs are in the arena while it runs, and those that find no other place.
        needed = sum(sizes[name] for name in names if name in movable)
        taken += max(0, needed - (sum(sizes[name] for name in movable) - away))
        taken += least_workspace_bytes(table.menus(operation))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where

"""Lower bound of the arena's bytes, for all plans: states and the operands of the most demanding operation."""

from __future__ import annotations

import itertools

from mbc.ir.graph import Operation, Role
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.select_groups import all_groups, possible_groups
from mbc.plan.model import aligned


def floor_bytes(
    table: CandidateTable, host_bytes: int = 0, split: bool = False, workspaces: bool = True
) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    A lower bound of all plans: whatever is recomputed or offloaded, each operation needs its operands together, or
    those of the least demanding launch that covers it. Of the optimizer's states as much as `host_bytes` may be in host
    memory when no operation needs them. `split`: operations may run row by row, and need one row of their operands
    only. Without `workspaces` the bound depends on shapes alone, and holds for any profile.
    """
    graph = table.graph
    sizes, movable = _states(table)
    movable_bytes = sum(sizes[name] for name in movable)
    offloaded = min(host_bytes, movable_bytes)
    states = sum(sizes.values()) - offloaded
    fused: dict[str, int] = {}
    for group in all_groups(table) if workspaces else itertools.chain(*possible_groups(table)):
        for launch in group.launches:
            if table.offered(launch):
                taken = operands_bytes(table, launch, split, workspaces)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    worst = -1
    where = graph.train[0]
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = operands_bytes(table, operation, split, workspaces)
        taken = min(taken, fused.get(operation.name, taken))
        # Of the movable states those that it needs are in the arena while it runs, and those for which host memory does
        # not suffice.
        needed = sum(sizes[name] for name in set(operation.inputs) & movable)
        taken += max(0, needed - (movable_bytes - offloaded))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where


def start_bytes(table: CandidateTable, host_bytes: int = 0) -> int:
    """States + inputs: what is in the arena when a step starts, as `floor_bytes` counts states."""
    values = table.graph.values
    sizes, movable = _states(table)
    offloaded = min(host_bytes, sum(sizes[name] for name in movable))
    return sum(sizes.values()) - offloaded + sum(aligned(values[name].type.size_bytes) for name in table.graph.inputs)


def _states(table: CandidateTable) -> tuple[dict[str, int], set[str]]:
    """Bytes of the states by name, and those of the optimizer, which may be in host memory."""
    values = table.graph.values
    sizes = {state.value: aligned(values[state.value].type.size_bytes) for state in table.graph.states}
    return sizes, {name for name in sizes if values[name].role is Role.OPTIMIZER}


def operands_bytes(table: CandidateTable, operation: Operation, split: bool, workspace: bool = True) -> int:
    """The bytes that an operation needs besides the states: its operands and its smallest `workspace`. `split`: of one
    row, where it works row by row."""
    graph = table.graph
    kind = kind_of(operation)
    shared = {output for output, _ in (*kind.updates, *kind.in_place)}
    names = dict.fromkeys(operation.inputs)
    names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
    by_rows = split and kind.divisible
    taken = 0
    for name in names:
        value = graph.values[name]
        if value.role.persistent:
            continue
        rows = graph.batch if by_rows and value.per_sample else 1
        taken += aligned(value.type.size_bytes // rows)
    return taken + (0 if by_rows or not workspace else least_workspace_bytes(table.fronts(operation)))

"""What no plan can beat."""

from __future__ import annotations

from mbc.ir.graph import Operation, Role
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates import CandidateTable, least_workspace_bytes
from mbc.optimize.fuse import all_groups
from mbc.optimize.lifetimes import aligned


def floor_bytes(table: CandidateTable, host_bytes: int = 0, split: bool = False) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    No program does better: whatever is recomputed or sent away, each operation needs its operands together, or those
    of the least demanding launch that covers it. Of the optimizer's states as much as `host_bytes` may be in host
    memory when no operation needs them. `split`: operations may run row by row, and need one row of their operands
    only.
    """
    graph = table.graph
    sizes = {state.value: aligned(graph.values[state.value].type.size_bytes) for state in graph.states}
    movable = {name for name in sizes if graph.values[name].role is Role.OPTIMIZER}
    movable_bytes = sum(sizes[name] for name in movable)
    away = min(host_bytes, movable_bytes)
    states = sum(sizes.values()) - away
    fused: dict[str, int] = {}
    for group in all_groups(table):
        for launch in group.launches:
            if table.offered(launch):
                taken = operands_bytes(table, launch, split)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    worst = -1
    where = graph.train[0]
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = operands_bytes(table, operation, split)
        taken = min(taken, fused.get(operation.name, taken))
        # Of the movable states those that it needs are in the arena while it runs, and those that find no other place.
        needed = sum(sizes[name] for name in set(operation.inputs) & movable)
        taken += max(0, needed - (movable_bytes - away))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where


def operands_bytes(table: CandidateTable, operation: Operation, split: bool) -> int:
    """What an operation cannot do without beside the states: its operands and its smallest workspace. `split`: where it
    works row by row, of one row."""
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
    return taken + (0 if by_rows else least_workspace_bytes(table.menus(operation)))

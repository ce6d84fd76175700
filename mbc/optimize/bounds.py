"""What no plan can beat."""

from __future__ import annotations

from mbc.ir.graph import Operation
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates import CandidateTable, least_workspace_bytes
from mbc.optimize.fuse import all_groups
from mbc.optimize.lifetimes import aligned


def floor_bytes(table: CandidateTable) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    No program does better: whatever is recomputed or sent away, each operation needs its operands together, or those
    of the least demanding launch that covers it.
    """
    graph = table.graph
    states = sum(aligned(graph.values[state.value].type.size_bytes) for state in graph.states)
    fused: dict[str, int] = {}
    for group in all_groups(graph):
        for launch in group.launches:
            if table.offered(launch):
                taken = _taken_bytes(table, launch)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    worst = -1
    where = graph.train[0]
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = _taken_bytes(table, operation)
        taken = min(taken, fused.get(operation.name, taken))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where


def _taken_bytes(table: CandidateTable, operation: Operation) -> int:
    """Of operands that are no states, and of workspace."""
    kind, values = kind_of(operation), table.graph.values
    shared = {output for output, _ in (*kind.updates, *kind.in_place)}
    names = dict.fromkeys(operation.inputs)
    names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
    taken = sum(aligned(values[name].type.size_bytes) for name in names if not values[name].role.persistent)
    return taken + least_workspace_bytes(table.menus(operation))

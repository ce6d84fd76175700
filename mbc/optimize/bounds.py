"""What no plan can beat."""

from __future__ import annotations

from mbc.ir.graph import Operation
from mbc.ops import KINDS
from mbc.optimize.candidates import CandidateTable, least_workspace_bytes
from mbc.optimize.lifetimes import aligned


def floor_bytes(table: CandidateTable) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    No program does better: whatever is recomputed or sent away, each operation needs its operands together.
    """
    graph = table.graph
    states = sum(aligned(graph.values[state.value].type.size_bytes) for state in graph.states)
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
        taken += least_workspace_bytes(table.menus(operation))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where

"""What no plan can beat."""

from __future__ import annotations

from mbc.ir.graph import Operation
from mbc.ops import KINDS
from mbc.optimize.candidates import CandidateTable
from mbc.optimize.lifetimes import aligned
from mbc.plan.model import Rows


def floor_bytes(table: CandidateTable) -> tuple[int, Operation]:
    """States + inputs, outputs and smallest workspace of the most demanding operation, and that operation.

    No program does better: whatever is recomputed or sent away, each operation needs its operands together.
    """
    graph = table.graph
    whole = Rows(0, graph.batch)
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
        taken += min(c.workspace_bytes for c in table.all(operation, whole))
        if taken > worst:
            worst, where = taken, operation
    return states + worst, where


def fastest_us(table: CandidateTable) -> float:
    """The training step with every operation at its fastest known candidate, whatever workspace it takes."""
    whole = Rows(0, table.graph.batch)
    return sum(
        min(c.time_us for c in table.all(operation, whole))
        for operation in table.graph.train
        if not KINDS[operation.kind].view
    )

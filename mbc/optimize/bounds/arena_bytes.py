"""Lower bound of the arena's bytes, for all plans: states and the operands of the most demanding operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mbc.ir.graph import Operation, Role
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.select_groups import all_groups, possible_groups
from mbc.plan.model import aligned


@dataclass(frozen=True, slots=True)
class LeastArena:
    """The lower bound of the arena's bytes, for all plans.

    `operand_bytes`: states + inputs, outputs and smallest workspace of the most demanding operation, which is
    `operation`. `start_bytes`: states + inputs, which are there when a step starts.
    """

    operand_bytes: int
    operation: Operation
    start_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that no plan's arena is below."""
        return max(self.operand_bytes, self.start_bytes)


def least_arena(
    variants: Sequence[CandidateTable], host_bytes: int = 0, split: bool = False, workspaces: bool = True
) -> LeastArena:
    """Return the lower bound of the arena over all plans of a step, which may be of any of its `variants`.

    The bound that refuses a budget and the one that a plan prints are both from here. Whatever is recomputed or
    offloaded, each operation needs its operands together, or those of the least demanding launch that covers it, in
    the variant where that takes least. Of the optimizer's states as much as `host_bytes` may be in host memory when no
    operation needs them. `split`: operations may run row by row, and need one row of their operands only. Without
    `workspaces` the bound depends on shapes alone, and holds for any profile.
    """
    first, *others = variants
    needs = _needs_bytes(first, host_bytes, split, workspaces)
    for other in others:
        theirs = _needs_bytes(other, host_bytes, split, workspaces)
        needs = {name: min(taken, theirs.get(name, taken)) for name, taken in needs.items()}
    worst = max(needs, key=lambda name: needs[name])
    sizes, movable = _states(first)
    offloaded = min(host_bytes, sum(sizes[name] for name in movable))
    states_bytes = sum(sizes.values()) - offloaded
    inputs_bytes = sum(aligned(first.graph.values[name].type.size_bytes) for name in first.graph.inputs)
    operation = next(op for op in (*first.graph.train, *first.graph.infer) if op.name == worst)
    return LeastArena(states_bytes + needs[worst], operation, states_bytes + inputs_bytes)


def floor_bytes(table: CandidateTable, host_bytes: int = 0, split: bool = False) -> tuple[int, Operation]:
    """Return the operands' bound of one variant of a step, and the operation that sets it."""
    least = least_arena((table,), host_bytes, split)
    return least.operand_bytes, least.operation


def _needs_bytes(table: CandidateTable, host_bytes: int, split: bool, workspaces: bool) -> dict[str, int]:
    """Return the bytes beside the states that each operation needs, by name, in the order of the graph."""
    graph = table.graph
    sizes, movable = _states(table)
    movable_bytes = sum(sizes[name] for name in movable)
    offloaded = min(host_bytes, movable_bytes)
    fused: dict[str, int] = {}
    for group in all_groups(table) if workspaces else itertools.chain(*possible_groups(table)):
        for launch in group.launches:
            if table.offered(launch):
                taken = operands_bytes(table, launch, split, workspaces)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    needs: dict[str, int] = {}
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = operands_bytes(table, operation, split, workspaces)
        taken = min(taken, fused.get(operation.name, taken))
        # Of the movable states those that it needs are in the arena while it runs, and those for which host memory does
        # not suffice.
        needed = sum(sizes[name] for name in set(operation.inputs) & movable)
        needs[operation.name] = taken + max(0, needed - (movable_bytes - offloaded))
    return needs


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

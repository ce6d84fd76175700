"""Lower bound of the arena's bytes, for all plans: states and the operands of the most demanding operation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import aligned
from mbc.ir.graph import Operation, Role, TrainingGraph
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.select_groups import Fusion


@dataclass(frozen=True, slots=True)
class LeastArena:
    """The lower bound of the arena's bytes, for all plans.

    Attributes:
        operand_bytes: Bytes of the states, plus inputs, outputs and smallest workspace of the most demanding operation.
        operation: That operation.
        start_bytes: Bytes of the states and of the inputs, which are in memory when a step starts.
    """

    operand_bytes: int
    operation: Operation
    start_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that the arena of every plan takes at least."""
        return max(self.operand_bytes, self.start_bytes)


def least_arena(
    variants: Sequence[Fusion], host_bytes: int = 0, split: bool = False, workspaces: bool = True
) -> LeastArena:
    """Return the lower bound of the arena over all plans of a step, which may use any of its `variants`.

    The error that refuses a budget and the bound that a plan prints both use this function. Recomputation and
    offloading do not help here, because each operation needs all its operands at once. If a fused launch can replace
    the operation, the operands of the least demanding launch count instead. Each operation counts in the variant that
    needs least.

    Args:
        variants: Fusion groups of the step, for instance with and without bitwise rematerialization.
        host_bytes: Bytes of the optimizer's states that may be in host memory while no operation needs them.
        split: Whether operations may run row by row, so that they need one row of their operands only.
        workspaces: Whether workspaces count. Without them the bound depends on shapes alone, and holds for any profile.
    """
    first, *others = variants
    needs = _needs_bytes(first, host_bytes, split, workspaces)
    for other in others:
        theirs = _needs_bytes(other, host_bytes, split, workspaces)
        needs = {name: min(taken, theirs.get(name, taken)) for name, taken in needs.items()}
    worst = max(needs, key=lambda name: needs[name])
    graph = first.table.graph
    states_bytes = bytes_of_states(graph) - min(host_bytes, bytes_of_states(graph, of_optimizer=True))
    inputs_bytes = sum(aligned(graph.values[name].type.size_bytes) for name in graph.inputs)
    operation = next(op for op in (*graph.train, *graph.infer) if op.name == worst)
    return LeastArena(states_bytes + needs[worst], operation, states_bytes + inputs_bytes)


def bytes_of_states(graph: TrainingGraph, of_optimizer: bool = False) -> int:
    """Return the bytes of all states in the arena; `of_optimizer`: only those of the optimizer."""
    values = (graph.values[state.value] for state in graph.states)
    return sum(aligned(v.type.size_bytes) for v in values if not of_optimizer or v.role is Role.OPTIMIZER)


def floor_bytes(fusion: Fusion, host_bytes: int = 0, split: bool = False) -> tuple[int, Operation]:
    """Return the lower bound in bytes of one variant of a step, and the operation that sets it."""
    least = least_arena((fusion,), host_bytes, split)
    return least.operand_bytes, least.operation


def _needs_bytes(fusion: Fusion, host_bytes: int, split: bool, workspaces: bool) -> dict[str, int]:
    """Return the bytes beside the states that each operation needs, by name, in the order of the graph."""
    table, graph = fusion.table, fusion.table.graph
    sizes, movable = _states(table)
    homes = _homes(graph)
    movable_bytes = sum(sizes[name] for name in movable)
    offloaded = min(host_bytes, movable_bytes)
    fused: dict[str, int] = {}
    for group in fusion.all_groups if workspaces else itertools.chain(*fusion.possible):
        for launch in group.launches:
            if table.offered(launch):
                taken = _operands_bytes(table, launch, homes, split, workspaces)
                fused |= {name: min(taken, fused.get(name, taken)) for name in names_of(launch)}
    needs: dict[str, int] = {}
    for operation in (*graph.train, *graph.infer):
        if kind_of(operation).view:
            continue
        taken = _operands_bytes(table, operation, homes, split, workspaces)
        taken = min(taken, fused.get(operation.name, taken))
        # Movable states that do not fit in host memory always count, with the other states. So only the bytes by which
        # the operation's movable states exceed those count here.
        needed = sum(sizes[name] for name in {homes.get(name, name) for name in operation.inputs} & movable)
        needs[operation.name] = taken + max(0, needed - (movable_bytes - offloaded))
    return needs


def _states(table: CandidateTable) -> tuple[dict[str, int], set[str]]:
    """Return the bytes of each state by name, and the names of the optimizer's states, which may be in host memory."""
    values = table.graph.values
    sizes = {state.value: aligned(values[state.value].type.size_bytes) for state in table.graph.states}
    return sizes, {name for name in sizes if values[name].role is Role.OPTIMIZER}


def _homes(graph: TrainingGraph) -> dict[str, str]:
    """Return the state in whose memory each updated value is, by the value's name.

    A step updates its states in place: the new value of a parameter, or of a sum of gradients, takes no memory of its
    own.
    """
    homes = {new: old for old, new in graph.updates}
    for operation in graph.train:
        for new, old in kind_of(operation).updates:
            if new < len(operation.outputs) and old < len(operation.inputs):
                source = operation.inputs[old]
                if source in homes or graph.values[source].role.persistent:
                    homes[operation.outputs[new]] = homes.get(source, source)
    return homes


def _operands_bytes(
    table: CandidateTable, operation: Operation, homes: Mapping[str, str], split: bool, workspace: bool
) -> int:
    """Return the bytes that an operation needs besides the states: its operands and its smallest workspace.

    Args:
        table: The candidates of the step that the operation is of.
        operation: An operation of the graph, or a fused one.
        homes: The state in whose memory each updated value is (`_homes`).
        split: Count one row of the operands where the operation works row by row.
        workspace: Count the workspace.
    """
    graph = table.graph
    kind = kind_of(operation)
    shared = {output for output, _ in (*kind.updates, *kind.in_place)}
    names = dict.fromkeys(operation.inputs)
    names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
    by_rows = split and kind.divisible
    taken = 0
    for name in names:
        value = graph.values[homes.get(name, name)]
        if value.role.persistent:
            continue
        rows = graph.batch if by_rows and value.per_sample else 1
        taken += aligned(value.type.size_bytes // rows)
    return taken + (0 if by_rows or not workspace else least_workspace_bytes(table.fronts(operation)))

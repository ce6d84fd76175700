"""A lower bound on the time of a step within a budget, from values that do not fit in beside one operation.

The operations run in the order in which they are written. A value that is needed both before and after an operation,
and is none of its operands, is kept meanwhile, recomputed later, or offloaded before. Only the bytes that the operands
leave can be kept; the rest costs at least the optimum of a fractional knapsack. Bytes that the link can copy until then
are free. Others take the time of the operation that computes them (and of operations that only it reads), or the time
of their copy, whichever is less. The operation with the highest cost bounds the step. The bound is in the spirit of the
cut-based bounds of "MONeT" (Shah et al., 2021) and "Checkmate" (Jain et al., 2020), without a solver.

Where operations may be fused, an operation takes no less than its share of the cheapest group. Values that a group does
not store, or computes later, count as no bytes. So the result bounds steps with fusion and without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbc.hardware.streams import STREAM_TO, aligned
from mbc.ir.graph import Operation, Role
from mbc.ops import KINDS
from mbc.optimize import effort
from mbc.optimize.bounds.fused_remat_costs import fused_remat_costs
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.horizontal import fuses_horizontally
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.schedule.emit_launches import updates_early


@dataclass(frozen=True, slots=True)
class _Item:
    """Bytes that may be absent although they are needed later, and the time to restore them.

    The time is infinite for a value that cannot be recomputed.
    """

    size_bytes: int
    time_us: float


def budget_bound_us(fusion: Fusion, techniques: AllowedTechniques, available_bytes: int, fastest_us: float) -> float:
    """Return a lower bound in microseconds of a step in an arena of `available_bytes`.

    Args:
        fusion: Fusion groups of the step.
        techniques: Which of recomputation, offloading and depth-first execution are allowed.
        available_bytes: Bytes of the arena that the step may use.
        fastest_us: Time of a step without a limit.
    """
    step = _Step(fusion, techniques.split)
    # Where operations may be executed depth first, only one that needs all rows is sure to need whole operands. An
    # operation within a fusion group may not need some of its operands.
    possible = [
        i
        for i, op in enumerate(step.operations)
        if not (techniques.split and KINDS[op.kind].divisible)
        and op.name not in step.grouped
        and not fuses_horizontally(op)
    ]
    count = effort.BUDGET_BOUND_POSITIONS
    positions = sorted({possible[i * len(possible) // count] for i in range(count) if possible})
    best_us = fastest_us
    for position in positions:
        kept, needed_bytes = step.at(position)
        excess = needed_bytes + sum(item.size_bytes for item in kept) - available_bytes
        if excess <= 0:
            continue
        before_us = fastest_us - sum(step.times_us[position:])
        best_us = max(best_us, fastest_us + _least_us(fusion.table, techniques, kept, excess, max(0.0, before_us)))
    return best_us if math.isfinite(best_us) else fastest_us


def _least_us(
    table: CandidateTable, techniques: AllowedTechniques, kept: list[_Item], excess: int, before_us: float
) -> float:
    """Return the least time to restore `excess` bytes of `kept`, where copies have `before_us` until then."""
    copied_us = math.inf  # time of each byte that the links cannot copy until then
    if techniques.offload > 0:
        rates = {space: table.device.links.gb_s(STREAM_TO[space]) * 1e3 for space in techniques.room_bytes}
        excess -= sum(min(int(before_us / (1 / rates[s])), room) for s, room in techniques.room_bytes.items())
        copied_us = 1 / sum(rates.values())  # time per byte of all links together
    total_us = 0.0
    prices = sorted((item.time_us / item.size_bytes, item.size_bytes) for item in kept)
    for price, size_bytes in prices if techniques.recompute else ():
        if excess <= 0 or price >= copied_us:
            break
        total_us += price * min(size_bytes, excess)
        excess -= size_bytes
    return total_us + (copied_us * excess if excess > 0 else 0.0)


class _Step:
    """The step as operations over values, views resolved to the values that they view."""

    def __init__(self, fusion: Fusion, split: bool) -> None:
        table = self._table = fusion.table
        self._split = split
        graph = table.graph
        self._roots: dict[str, str] = {}
        for operation in graph.train:
            if KINDS[operation.kind].view:
                self._roots[operation.outputs[0]] = self._root(operation.inputs[0])
        self.operations = [op for op in updates_early(graph.train) if not KINDS[op.kind].view]
        alone_us = [min(front[-1].time_us for front in table.fronts(op).values()) for op in self.operations]
        names = {op.name for op in self.operations}
        groups = [g for g in fusion.all_groups if g.replaces <= names]
        self.grouped = frozenset(name for group in groups for name in group.replaces)
        self._unstored = frozenset(value for group in groups for value in group.unstored)
        self._launch_us: dict[str, float] = {}  # by value: time of the fastest launch of a group that computes it
        self._latest_position: dict[str, int] = {}  # by operation: the latest position at which a group may run it
        self._alone_us = alone_us
        self.times_us = self._shared(groups, alone_us)
        launches = (launch for group in groups for launch in group.launches)
        self._fused_remat_us = fused_remat_costs(fusion, (*self.operations, *launches))
        self._known_us: dict[int, float] = {}
        self._defined_at: dict[str, int] = dict.fromkeys(graph.inputs, -1)
        self._reads: dict[str, list[int]] = {}
        for i, operation in enumerate(self.operations):
            self._defined_at |= dict.fromkeys(operation.outputs, i)
            for name in dict.fromkeys(map(self._root, operation.inputs)):
                self._reads.setdefault(name, []).append(i)
        values = graph.values
        # States and their next versions take the same bytes at any time. States of the optimizer can be offloaded.
        self._states = {name for name, value in values.items() if value.role.persistent}
        self._states |= {new for _, new in graph.updates}
        self._fixed_bytes = sum(
            aligned(values[state.value].type.size_bytes)
            for state in graph.states
            if values[state.value].role is not Role.OPTIMIZER
        )
        self._last_reads = self._sure_reads(groups)

    def _shared(self, groups: Sequence[Group], alone_us: Sequence[float]) -> list[float]:
        """Return the least time of each operation, alone or its share of a group; 0 if it may be fused horizontally."""
        positions = {op.name: i for i, op in enumerate(self.operations)}
        least_us = [
            0.0 if fuses_horizontally(op) else time_us for op, time_us in zip(self.operations, alone_us, strict=True)
        ]
        for group in groups:
            launches_us = [min((c.time_us for c in self._table.offered(o)), default=math.inf) for o in group.launches]
            for launch, time_us in zip(group.launches, launches_us, strict=True):
                for name in launch.outputs:
                    self._launch_us[name] = min(self._launch_us.get(name, math.inf), time_us)
            members = [positions[name] for name in group.replaces]
            part = sum(launches_us) / max(1e-9, sum(alone_us[i] for i in members))
            for i in members:
                least_us[i] = min(least_us[i], alone_us[i] * part)
                name = self.operations[i].name
                self._latest_position[name] = max(self._latest_position.get(name, 0), *members)
        return least_us

    def _sure_reads(self, groups: Sequence[Group]) -> Mapping[str, int]:
        """Return the last position at which each value is certainly read, by name.

        A group may recompute an operand of one of its operations instead of reading it, so such a read is not certain.
        """
        unsure: set[tuple[str, str]] = set()
        members = {op.name: op for op in self.operations if op.name in self.grouped}
        for group in groups:
            reads = set(map(self._root, group.reads))
            for name in group.replaces:
                unsure.update((name, value) for value in map(self._root, members[name].inputs) if value not in reads)
        last_reads: dict[str, int] = {}
        for value, positions in self._reads.items():
            sure = [position for position in positions if (self.operations[position].name, value) not in unsure]
            if sure:
                last_reads[value] = sure[-1]
        return last_reads

    def at(self, position: int) -> tuple[list[_Item], int]:
        """Return values needed before and after an operation, except operands, and the bytes that it needs itself."""
        operation = self.operations[position]
        operands = set(map(self._root, (*operation.inputs, *operation.outputs)))
        sizes: dict[int, int] = {}
        for name, last in self._last_reads.items():
            source = self._defined_at.get(name, position)
            sure = source < 0 or (
                self._latest_position.get(self.operations[source].name, 0) < position and name not in self._unstored
            )
            if source < position < last and sure and name not in operands and name not in self._states:
                sizes[source] = sizes.get(source, 0) + self._size(name)
        items = [_Item(size, self._recompute_us(source)) for source, size in sizes.items()]
        return items, self._fixed_bytes + self._operand_bytes(operation, position)

    def _operand_bytes(self, operation: Operation, position: int) -> int:
        kind = KINDS[operation.kind]
        shared = {output for output, _ in (*kind.updates, *kind.in_place)}
        names = dict.fromkeys(map(self._root, operation.inputs))
        names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
        taken = sum(self._size(name) for name in names if name not in self._states)
        return taken + least_workspace_bytes(self._table.fronts(operation))

    def _recompute_us(self, position: int) -> float:
        """Return the least time to recompute the outputs of the operation at `position`."""
        values = self.operations[position].outputs if position >= 0 else ()
        return min((self._own_launch_us(position), *(self._fused_remat_us.get(value, math.inf) for value in values)))

    def _own_launch_us(self, position: int) -> float:
        """Return the least time to recompute the outputs of the operation at `position` by launches of their own.

        The time includes that of earlier operations whose outputs only this operation reads, because keeping these
        outputs would take no less memory.
        """
        cached_us = self._known_us.get(position)
        if cached_us is not None:
            return cached_us
        operation = self.operations[position] if position >= 0 else None
        if operation is None or KINDS[operation.kind].updates:
            return math.inf
        size_bytes = sum(map(self._size, operation.outputs))
        least_us = 0.0 if fuses_horizontally(operation) else self._alone_us[position]
        for name in dict.fromkeys(map(self._root, operation.inputs)):
            source = self._defined_at.get(name, -1)
            serves = self._reads[name] == [position] and len(self.operations[source].outputs) == 1
            if source >= 0 and serves and name not in self._states and self._size(name) >= size_bytes:
                least_us += self._recompute_us(source)
        least_us = min(least_us, *(self._launch_us.get(name, math.inf) for name in operation.outputs))
        self._known_us[position] = least_us
        return least_us

    def _size(self, name: str) -> int:
        return aligned(self._table.graph.values[name].type.size_bytes)

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

"""A lower bound on the time of a step within a budget: what cannot be kept at one operation has to be recomputed or
fetched.

The operations run in the order in which they are written. Whatever is needed both before and after one of them, and is
none of its operands, is kept there, recomputed later, or offloaded before. Only what the operands leave of the
available bytes can be kept; the rest costs at least a fractional knapsack: bytes that the link can carry until then are
free, others take the time of their operation (and of what only serves it) or of their copy, whichever is less. The
operation that costs most bounds the step. In the spirit of the cut-based bounds of "MONeT" (Shah et al., 2021) and
"Checkmate" (Jain et al., 2020), without a solver.

Where operations may run as groups, an operation takes no less than its share of the cheapest group, and values that a
group does not store, or makes later, count as no bytes: the result bounds steps with groups and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mbc.ir.graph import Operation, Role
from mbc.ops import KINDS
from mbc.optimize import effort
from mbc.optimize.bounds.fused_remat_terms import JointRemat, fused_remat_costs
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.horizontal import fuses_horizontally
from mbc.optimize.fusion.select_groups import Group, all_groups
from mbc.optimize.remat.state import Means
from mbc.optimize.schedule.emit_launches import updates_early
from mbc.plan.model import Stream, aligned


@dataclass(frozen=True, slots=True)
class _Item:
    """A value that is needed later: bytes that may be absent, and the time to restore them (infinite: they cannot be
    recomputed)."""

    size_bytes: int
    time_us: float


def budget_bound_us(table: CandidateTable, means: Means, available_bytes: int, fastest_us: float) -> float:
    """Lower bound in microseconds of a step in an arena of `available_bytes`; `fastest_us` is that of a step without a
    limit."""
    step = _Step(table, means.split)
    # Where operations may be executed together row by row, what one needs is sure to be there as a whole only where
    # all rows are needed; and an operation within a group may do without some of its operands.
    possible = [
        i
        for i, op in enumerate(step.operations)
        if not (means.split and KINDS[op.kind].divisible) and op.name not in step.grouped and not fuses_horizontally(op)
    ]
    count = effort.BUDGET_BOUND_POSITIONS
    places = sorted({possible[i * len(possible) // count] for i in range(count) if possible})
    best_us = fastest_us
    for place in places:
        kept, needed_bytes = step.at(place)
        excess = needed_bytes + sum(item.size_bytes for item in kept) - available_bytes
        if excess <= 0:
            continue
        before_us = fastest_us - sum(step.times_us[place:])
        best_us = max(best_us, fastest_us + _least_us(table, means, kept, excess, max(0.0, before_us)))
    return best_us if math.isfinite(best_us) else fastest_us


def _least_us(table: CandidateTable, means: Means, kept: list[_Item], excess: int, before_us: float) -> float:
    link = table.device.host_link
    copied_us = math.inf  # a byte that the link has no time for
    if means.offload > 0:
        copied_us = 1 / (link.gb_s(Stream.TO_HOST) * 1e3)
        excess -= min(int(before_us / copied_us), means.host_bytes)
    total_us = 0.0
    prices = sorted((item.time_us / item.size_bytes, item.size_bytes) for item in kept)
    for price, size_bytes in prices if means.recompute else ():
        if excess <= 0 or price >= copied_us:
            break
        total_us += price * min(size_bytes, excess)
        excess -= size_bytes
    return total_us + (copied_us * excess if excess > 0 else 0.0)


def _hull(alternatives: Iterable[tuple[int, float]]) -> list[_Item]:
    """Bytes that may be absent at a given time, as several alternatives: the lower convex hull of these, as items."""
    found: list[_Item] = []
    left: list[tuple[int, float]] = list(alternatives)
    all_bytes, all_us = 0, 0.0
    while left:
        size_bytes, time_us = min(left, key=lambda way: ((way[1] - all_us) / (way[0] - all_bytes), -way[0]))
        found.append(_Item(size_bytes - all_bytes, time_us - all_us))
        all_bytes, all_us = size_bytes, time_us
        left = [way for way in left if way[0] > all_bytes]
    return found


class _Step:
    """The step as operations over values: views are what they view."""

    def __init__(self, table: CandidateTable, split: bool) -> None:
        self._table = table
        self._split = split
        graph = table.graph
        self._roots: dict[str, str] = {}
        for operation in graph.train:
            if KINDS[operation.kind].view:
                self._roots[operation.outputs[0]] = self._root(operation.inputs[0])
        self.operations = [op for op in updates_early(graph.train) if not KINDS[op.kind].view]
        alone_us = [min(front[-1].time_us for front in table.menus(op).values()) for op in self.operations]
        names = {op.name for op in self.operations}
        groups = [g for g in all_groups(table) if g.replaces <= names]
        self.grouped = frozenset(name for group in groups for name in group.replaces)
        self._unmade = frozenset(value for group in groups for value in group.unmade)
        self._launch_us: dict[str, float] = {}  # of a value: the cheapest launch of a group
        self._stands: dict[str, int] = {}  # where the last launch of a group that an operation may be in stands at most
        self._alone_us = alone_us
        self.times_us = self._shared(groups, alone_us)
        launches = (launch for group in groups for launch in group.launches)
        self._extras = fused_remat_costs(table, (*self.operations, *launches))
        self._pairs = self._extras.pairs
        self._known_us: dict[int, float] = {}
        self._made: dict[str, int] = dict.fromkeys(graph.inputs, -1)
        self._reads: dict[str, list[int]] = {}
        for i, operation in enumerate(self.operations):
            self._made |= dict.fromkeys(operation.outputs, i)
            for name in dict.fromkeys(map(self._root, operation.inputs)):
                self._reads.setdefault(name, []).append(i)
        values = graph.values
        # States, and what is written over them, take the same bytes at any time; the optimizer's can be elsewhere.
        self._states = {name for name, value in values.items() if value.role.persistent}
        self._states |= {new for _, new in graph.updates}
        self._fixed_bytes = sum(
            aligned(values[state.value].type.size_bytes)
            for state in graph.states
            if values[state.value].role is not Role.OPTIMIZER
        )
        self._last_reads = self._sure_reads(groups)

    def _shared(self, groups: Sequence[Group], alone_us: Sequence[float]) -> list[float]:
        """What each operation takes at least: alone, or its share of a group; nothing where many may run at once."""
        places = {op.name: i for i, op in enumerate(self.operations)}
        found = [
            0.0 if fuses_horizontally(op) else time_us for op, time_us in zip(self.operations, alone_us, strict=True)
        ]
        for group in groups:
            launches_us = [min((c.time_us for c in self._table.offered(o)), default=math.inf) for o in group.launches]
            for launch, time_us in zip(group.launches, launches_us, strict=True):
                for name in launch.outputs:
                    self._launch_us[name] = min(self._launch_us.get(name, math.inf), time_us)
            members = [places[name] for name in group.replaces]
            part = sum(launches_us) / max(1e-9, sum(alone_us[i] for i in members))
            for i in members:
                found[i] = min(found[i], alone_us[i] * part)
                name = self.operations[i].name
                self._stands[name] = max(self._stands.get(name, 0), *members)
        return found

    def _sure_reads(self, groups: Sequence[Group]) -> Mapping[str, int]:
        """The last operation that reads a value in any case: a group may compute again what one of its operations
        would have read."""
        unsure: set[tuple[str, str]] = set()
        members = {op.name: op for op in self.operations if op.name in self.grouped}
        for group in groups:
            reads = set(map(self._root, group.reads))
            for name in group.replaces:
                unsure.update((name, value) for value in map(self._root, members[name].inputs) if value not in reads)
        found: dict[str, int] = {}
        for value, places in self._reads.items():
            sure = [place for place in places if (self.operations[place].name, value) not in unsure]
            if sure:
                found[value] = sure[-1]
        return found

    def at(self, place: int) -> tuple[list[_Item], int]:
        """What is needed before and after an operation and is none of its operands, and bytes that it cannot do
        without."""
        operation = self.operations[place]
        operands = set(map(self._root, (*operation.inputs, *operation.outputs)))
        sizes: dict[int, int] = {}
        for name, last in self._last_reads.items():
            made = self._made.get(name, place)
            sure = made < 0 or (self._stands.get(self.operations[made].name, 0) < place and name not in self._unmade)
            if made < place < last and sure and name not in operands and name not in self._states:
                sizes[made] = sizes.get(made, 0) + self._size(name)
        items: list[_Item] = []
        for both in self._pairs:
            first, last = self._made[both.first], self._made[both.last]
            if first in sizes and last in sizes:
                items += self._pair(both, sizes.pop(first), sizes.pop(last))
        items += [_Item(size, self._again_us(made)) for made, size in sizes.items()]
        return items, self._fixed_bytes + self._operand_bytes(operation, place)

    def _pair(self, both: JointRemat, first_bytes: int, last_bytes: int) -> list[_Item]:
        """Two values of which either may be absent by itself."""
        apart_us = (self._apart_us(self._made[value]) for value in (both.first, both.last))
        first_us, last_us, both_us = self._extras.pair_us(both, *apart_us)
        return _hull(((first_bytes, first_us), (last_bytes, last_us), (first_bytes + last_bytes, both_us)))

    def _operand_bytes(self, operation: Operation, place: int) -> int:
        kind = KINDS[operation.kind]
        shared = {output for output, _ in (*kind.updates, *kind.in_place)}
        names = dict.fromkeys(map(self._root, operation.inputs))
        names |= dict.fromkeys(name for i, name in enumerate(operation.outputs) if i not in shared)
        taken = sum(self._size(name) for name in names if name not in self._states)
        return taken + least_workspace_bytes(self._table.menus(operation))

    def _again_us(self, made: int) -> float:
        """The least time to recompute the output of an operation."""
        values = self.operations[made].outputs if made >= 0 else ()
        return self._extras.again_us(values, self._apart_us(made))

    def _apart_us(self, made: int) -> float:
        """The same by launches of its own: repeating an operation, with those before it that only serve it. To keep
        their outputs instead would take no less memory."""
        known = self._known_us.get(made)
        if known is not None:
            return known
        operation = self.operations[made] if made >= 0 else None
        if operation is None or KINDS[operation.kind].updates:
            return math.inf
        size_bytes = sum(map(self._size, operation.outputs))
        found = 0.0 if fuses_horizontally(operation) else self._alone_us[made]
        for name in dict.fromkeys(map(self._root, operation.inputs)):
            source = self._made.get(name, -1)
            serves = self._reads[name] == [made] and len(self.operations[source].outputs) == 1
            if source >= 0 and serves and name not in self._states and self._size(name) >= size_bytes:
                found += self._again_us(source)
        found = min(found, *(self._launch_us.get(name, math.inf) for name in operation.outputs))
        self._known_us[made] = found
        return found

    def _size(self, name: str) -> int:
        return aligned(self._table.graph.values[name].type.size_bytes)

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

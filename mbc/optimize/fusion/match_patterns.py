"""Fusion groups by patterns: every match of a pattern in a program that could run as the pattern's launches.

A match is a group if
* no other operation reads a value that the launches do not store, and nothing does after the end of the program,
* each value that they store is read by another operation or launch, or after the end,
* each launch comes before the readers of its results, and
* no state is updated between an operation and the launch that replaces it.
A match of a late pattern may break the first condition if other groups run those operations without reading the value.
Which groups save time is decided in `select_groups`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops import KINDS
from mbc.ops.fused import join
from mbc.optimize.fusion.catalogue import PATTERNS
from mbc.optimize.fusion.data_flow import spared_reads
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.pattern import Binding, Pattern, find


def live_out(graph: TrainingGraph, program: Sequence[Operation]) -> frozenset[str]:
    """Return the live-out values of a program of the graph: those that are read after its end."""
    if program is graph.infer:
        return frozenset(graph.infer_outputs)
    return frozenset((*graph.outputs, graph.loss, *graph.metrics, *(after for _, after in graph.updates)))


def pattern_groups(program: Sequence[Operation], live_out_values: Collection[str]) -> tuple[Group, ...]:
    """Return the groups of all matches of patterns in a program whose `live_out_values` are read after its end."""
    producers = {output: operation for operation in program for output in operation.outputs}
    positions = {operation.name: position for position, operation in enumerate(program)}
    reading: dict[str, list[Operation]] = {}
    for operation in program:
        for name in operation.inputs:
            reading.setdefault(name, []).append(operation)
    readers = {value: [operation.name for operation in operations] for value, operations in reading.items()}
    updates = [position for position, operation in enumerate(program) if KINDS[operation.kind].updates]
    index = _ProgramIndex(updates, positions, readers, frozenset(live_out_values))
    matches: list[Group] = []
    postponed: list[tuple[Pattern, Binding]] = []
    last_kinds: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        last_kinds.setdefault(pattern.statements[-1].kind, []).append(pattern)
    for operation in program:
        for pattern in last_kinds.get(operation.kind, ()):
            for binding in find(pattern, operation, producers, reading):
                group = index.group(pattern, binding)
                if group is not None:
                    matches.append(group)
                elif pattern.late:
                    postponed.append((pattern, binding))
    if postponed:
        spared = spared_reads(program, matches)
        left = {value: [name for name in names if (name, value) not in spared] for value, names in readers.items()}
        index = replace(index, readers=left)
        late = [group for pattern, binding in postponed if (group := index.group(pattern, binding)) is not None]
        matches += [replace(group, late=True) for group in late]
    return tuple(matches)


@dataclass(frozen=True)
class _ProgramIndex:
    """Positions and readers in a program.

    Attributes:
        updates: Positions of the operations that update a state, in order.
        positions: Position of each operation, by name.
        readers: Names of the operations that read each value.
        live_out: Values that are read after the end of the program.
    """

    updates: Sequence[int]
    positions: dict[str, int]
    readers: dict[str, list[str]]
    live_out: frozenset[str]

    def group(self, pattern: Pattern, binding: Binding) -> Group | None:
        """Return the group of a match, or None if the match breaks a condition of this module."""
        replaced = frozenset(binding.operations[number].name for number in pattern.replaces)
        stored = {binding.values[name] for part in pattern.launches for name in part.writes}
        outputs = {value for number in pattern.replaces for value in binding.operations[number].outputs}
        unstored = outputs - stored
        if any(self._is_read_outside(value, replaced) for value in unstored):
            return None
        launches: list[Operation] = []
        positions: list[int] = []
        for part in pattern.launches:
            operations = [binding.operations[number] for number in part.statements]
            launch = join(operations, [binding.values[name] for name in part.writes])
            position = max(self.positions[binding.operations[n].name] for n in part.statements if n in pattern.replaces)
            if not self._precedes_readers(launch, position, replaced):
                return None
            launches.append(launch)
            positions.append(position)
        first = min(self.positions[name] for name in replaced)
        # No state may be updated between the old position of an operation and that of its launch.
        if bisect_left(self.updates, first) < bisect_left(self.updates, max(positions)):
            return None
        # A launch may read what another one writes.
        wanted = {value for launch in launches for value in launch.inputs}
        if not all(value in wanted or self._is_read_outside(value, replaced) for value in stored):
            return None
        return Group(tuple(launches), tuple(positions), replaced, frozenset(unstored), measured=pattern.measured)

    def _is_read_outside(self, value: str, replaced: frozenset[str]) -> bool:
        """Return whether the value is live-out, or an operation that is not replaced reads it."""
        return value in self.live_out or not replaced.issuperset(self.readers.get(value, ()))

    def _precedes_readers(self, launch: Operation, position: int, replaced: frozenset[str]) -> bool:
        """Return whether a launch at this position comes before all other operations that read its results."""
        readers = (name for value in launch.outputs for name in self.readers.get(value, ()))
        return all(self.positions[name] > position for name in readers if name not in replaced)

"""Matches of patterns: the groups of operations that could be one launch, before times decide which are.

A match is a group if no other operation reads what its launches do not store, and no launch is later than a reader of
its results.
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


def kept(graph: TrainingGraph, program: Sequence[Operation]) -> frozenset[str]:
    """Return the values that are read after the end of a program of the graph."""
    if program is graph.infer:
        return frozenset(graph.infer_outputs)
    return frozenset((*graph.outputs, graph.loss, *graph.metrics, *(after for _, after in graph.updates)))


def groups(program: Sequence[Operation], results: Collection[str]) -> tuple[Group, ...]:
    """Return all matches of patterns in one program, whose `results` are read after its end."""
    producers = {output: operation for operation in program for output in operation.outputs}
    positions = {operation.name: position for position, operation in enumerate(program)}
    reading: dict[str, list[Operation]] = {}
    for operation in program:
        for name in operation.inputs:
            reading.setdefault(name, []).append(operation)
    readers = {value: [operation.name for operation in matches] for value, matches in reading.items()}
    updates = [position for position, operation in enumerate(program) if KINDS[operation.kind].updates]
    at = _Positions(updates, positions, readers, frozenset(results))
    matches: list[Group] = []
    unfit: list[tuple[Pattern, Binding]] = []
    last_kinds: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        last_kinds.setdefault(pattern.statements[-1].kind, []).append(pattern)
    for operation in program:
        for pattern in last_kinds.get(operation.kind, ()):
            for binding in find(pattern, operation, producers, reading):
                group = at.group(pattern, binding)
                if group is not None:
                    matches.append(group)
                elif pattern.late:
                    unfit.append((pattern, binding))
    if unfit:
        spared = spared_reads(program, matches)
        left = {value: [name for name in names if (name, value) not in spared] for value, names in readers.items()}
        at = replace(at, readers=left)
        late = [group for pattern, binding in unfit if (group := at.group(pattern, binding)) is not None]
        matches += [replace(group, late=True) for group in late]
    return tuple(matches)


@dataclass(frozen=True)
class _Positions:
    updates: Sequence[int]  # of the operations that update a state
    positions: dict[str, int]
    readers: dict[str, list[str]]
    results: frozenset[str]

    def group(self, pattern: Pattern, binding: Binding) -> Group | None:
        """Return the group of a match, or None if it cannot run.

        It cannot run if another operation reads a value that it does not store, if no operation reads a value that it
        stores, or if a launch comes after a reader.
        """
        replaced = frozenset(binding.operations[number].name for number in pattern.replaces)
        given = {binding.values[name] for part in pattern.launches for name in part.writes}
        outputs = {value for number in pattern.replaces for value in binding.operations[number].outputs}
        unstored = outputs - given
        if any(self._wanted(value, replaced) for value in unstored):
            return None
        launches: list[Operation] = []
        positions: list[int] = []
        for part in pattern.launches:
            launch = join(
                [binding.operations[number] for number in part.statements],
                [binding.values[name] for name in part.writes],
            )
            position = max(self.positions[binding.operations[n].name] for n in part.statements if n in pattern.replaces)
            if not self._in_time(launch, position, replaced):
                return None
            launches.append(launch)
            positions.append(position)
        first = min(self.positions[name] for name in replaced)
        # No state may be updated between the old position of an operation and that of its launch.
        if bisect_left(self.updates, first) < bisect_left(self.updates, max(positions)):
            return None
        # A launch may read what another one writes.
        wanted = {value for launch in launches for value in launch.inputs}
        if not all(value in wanted or self._wanted(value, replaced) for value in given):
            return None
        return Group(tuple(launches), tuple(positions), replaced, frozenset(unstored), measured=pattern.measured)

    def _wanted(self, value: str, replaced: frozenset[str]) -> bool:
        """Return whether an operation that is not replaced reads the value."""
        return value in self.results or not replaced.issuperset(self.readers.get(value, ()))

    def _in_time(self, launch: Operation, position: int, replaced: frozenset[str]) -> bool:
        readers = (name for value in launch.outputs for name in self.readers.get(value, ()))
        return all(self.positions[name] > position for name in readers if name not in replaced)

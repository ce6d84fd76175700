"""Selects fusion groups: those whose launches take less time than their operations one by one.

A group stands in the program as an operation of its own (`mbc.ops.fused`), with candidates, layouts and workspace like
any other. Groups that overlap exclude one another, and those that save most are taken first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops import KINDS
from mbc.ops.fused import has_product, join, names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.catalogue import PATTERNS
from mbc.optimize.fusion.pattern import Binding, Pattern, find


@dataclass(frozen=True, slots=True)
class Group:
    """A pattern at one place of a program. `launches` and where each stands (it takes the place of an operation with
    this number); `replaces`: operations by name; `unmade`: values that then exist nowhere. `late`: others may read
    these, so that it may be taken only where other groups run them that do not. `measured`: no estimate tells its
    time."""

    launches: tuple[Operation, ...]
    places: tuple[int, ...]
    replaces: frozenset[str]
    unmade: frozenset[str]
    late: bool = False
    measured: bool = False

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(name for launch in self.launches for name in launch.inputs)

    @property
    def repeats(self) -> Mapping[str, tuple[Operation, ...]]:
        """Convolutions, by name, that are computed elsewhere and recomputed by these launches."""
        found: dict[str, tuple[Operation, ...]] = {}
        for launch in self.launches:
            product = names_of(launch)[0]
            if has_product(launch.attributes) and product not in self.replaces:
                found[product] = (*found.get(product, ()), launch)
        return found


@dataclass(frozen=True, slots=True)
class Programs:
    """What the two programs run, views included."""

    train: tuple[Operation, ...]
    infer: tuple[Operation, ...]


def plain(graph: TrainingGraph) -> Programs:
    """Every operation by itself."""
    return Programs(graph.train, graph.infer)


def fuse(table: CandidateTable, limit_bytes: int | None = None) -> Programs:
    """Both programs with the groups that save time and need no more than `limit_bytes` of workspace."""
    graph, (train, infer) = table.graph, groups_of(table)
    return Programs(_fused(table, graph.train, train, limit_bytes), _fused(table, graph.infer, infer, limit_bytes))


def all_groups(table: CandidateTable) -> tuple[Group, ...]:
    """`groups_of` both programs."""
    train, infer = groups_of(table)
    return (*train, *infer)


def groups_of(table: CandidateTable) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Every place where a pattern fits that some kernel can run, of the training step and of inference; found once.
    Where it has to be measured, it was; what it recomputes has the same bits."""
    if "train" not in table.groups:
        for name, found in zip(("train", "infer"), possible_groups(table), strict=True):
            table.groups[name] = tuple(
                group for group in found if is_measured(table, group) and table.repeated.keys() >= group.repeats.keys()
            )
    return table.groups["train"], table.groups["infer"]


def is_measured(table: CandidateTable, group: Group) -> bool:
    """Whether it is known how long it takes."""
    return not group.measured or all(map(table.timed, group.launches))


def possible_groups(table: CandidateTable) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """The same, whether it may be taken or has to be measured before."""
    if "possible" not in table.groups:
        graph = table.graph
        train, infer = (groups(program, kept(graph, program)) for program in (graph.train, graph.infer))
        table.groups["possible"] = _offered(table, train), _offered(table, infer)
    return table.groups["possible"]


def _offered(table: CandidateTable, found: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(group for group in found if all(map(table.offered, group.launches)))


def kept(graph: TrainingGraph, program: Sequence[Operation]) -> frozenset[str]:
    """Values that are read after the end of a program of the graph."""
    if program is graph.infer:
        return frozenset(graph.infer_outputs)
    return frozenset((*graph.outputs, graph.loss, *graph.metrics, *(after for _, after in graph.updates)))


def groups(program: Sequence[Operation], results: Collection[str]) -> tuple[Group, ...]:
    """Every place of one program where a pattern fits."""
    makers = {output: operation for operation in program for output in operation.outputs}
    places = {operation.name: place for place, operation in enumerate(program)}
    readers: dict[str, list[str]] = {}
    for operation in program:
        for name in operation.inputs:
            readers.setdefault(name, []).append(operation.name)
    at = _Places(program, places, readers, frozenset(results))
    found: list[Group] = []
    unfit: list[tuple[Pattern, Binding]] = []
    last_kinds: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        last_kinds.setdefault(pattern.statements[-1].kind, []).append(pattern)
    for operation in program:
        for pattern in last_kinds.get(operation.kind, ()):
            for binding in find(pattern, operation, makers):
                group = at.group(pattern, binding)
                if group is not None:
                    found.append(group)
                elif pattern.late:
                    unfit.append((pattern, binding))
    if unfit:
        spared = _spared(program, found)
        left = {value: [name for name in names if (name, value) not in spared] for value, names in readers.items()}
        at = replace(at, readers=left)
        late = [group for pattern, binding in unfit if (group := at.group(pattern, binding)) is not None]
        found += [replace(group, late=True) for group in late]
    return tuple(found)


def _spared(program: Sequence[Operation], found: Sequence[Group]) -> set[tuple[str, str]]:
    """Operations by name, and values that some group runs them without reading."""
    by_name = {operation.name: operation for operation in program}
    return {
        (name, value)
        for group in found
        for name in group.replaces
        for value in by_name[name].inputs
        if value not in group.reads
    }


@dataclass(frozen=True)
class _Places:
    program: Sequence[Operation]
    places: dict[str, int]
    readers: dict[str, list[str]]
    results: frozenset[str]

    def group(self, pattern: Pattern, binding: Binding) -> Group | None:
        """The group, if nobody misses what it does not write, somebody reads all that it does, and its launches come in
        time for all who read."""
        replaced = frozenset(binding.operations[number].name for number in pattern.replaces)
        given = {binding.values[name] for part in pattern.launches for name in part.gives}
        made = {value for number in pattern.replaces for value in binding.operations[number].outputs}
        unmade = made - given
        if any(self._wanted(value, replaced) for value in unmade):
            return None
        launches: list[Operation] = []
        harnesses: list[int] = []
        for part in pattern.launches:
            launch = join(
                [binding.operations[number] for number in part.runs], [binding.values[name] for name in part.gives]
            )
            place = max(self.places[binding.operations[n].name] for n in part.runs if n in pattern.replaces)
            if not self._in_time(launch, place, replaced):
                return None
            launches.append(launch)
            harnesses.append(place)
        first = min(self.places[name] for name in replaced)
        # A state must not change between where an operation stood and where it now runs.
        if any(KINDS[operation.kind].updates for operation in self.program[first : max(harnesses)]):
            return None
        # What one launch writes another one may read.
        wanted = {value for launch in launches for value in launch.inputs}
        if not all(value in wanted or self._wanted(value, replaced) for value in given):
            return None
        return Group(tuple(launches), tuple(harnesses), replaced, frozenset(unmade), measured=pattern.measured)

    def _wanted(self, value: str, replaced: frozenset[str]) -> bool:
        """Whether anybody else reads it."""
        return value in self.results or not replaced.issuperset(self.readers.get(value, ()))

    def _in_time(self, launch: Operation, place: int, replaced: frozenset[str]) -> bool:
        readers = (name for value in launch.outputs for name in self.readers.get(value, ()))
        return all(self.places[name] > place for name in readers if name not in replaced)


def _fused(
    table: CandidateTable, program: tuple[Operation, ...], groups_: tuple[Group, ...], limit_bytes: int | None
) -> tuple[Operation, ...]:
    by_name = {operation.name: operation for operation in program}
    saving: list[tuple[float, int, Group]] = []
    for number, group in enumerate(groups_):
        if group.late:
            continue
        saved_us = _saved_us(table, group, by_name, limit_bytes)
        if saved_us > 0:
            saving.append((-saved_us, number, group))
    taken: list[Group] = []
    replaced: set[str] = set()
    read: set[str] = set()
    unmade: set[str] = set()
    for _, _, group in sorted(saving, key=lambda entry: entry[:2]):
        reads = group.reads
        if replaced.isdisjoint(group.replaces) and unmade.isdisjoint(reads) and read.isdisjoint(group.unmade):
            taken.append(group)
            replaced |= group.replaces
            read |= reads
            unmade |= group.unmade
    for group in groups_:
        if group.late:
            taken = _with_late(table, program, taken, group, limit_bytes)
    return _rewritten(program, taken)


def _with_late(
    table: CandidateTable, program: tuple[Operation, ...], taken: list[Group], group: Group, limit_bytes: int | None
) -> list[Group]:
    """`taken` with `group` in the place of those that it contains, if nobody else then reads what it leaves unmade, and
    it takes less time than what it replaces."""
    others = [other for other in taken if not other.replaces <= group.replaces]
    inside = [other for other in taken if other.replaces <= group.replaces]
    gone = group.replaces.union(*(other.replaces for other in others))
    read = {value for operation in program if operation.name not in gone for value in operation.inputs}
    read = read.union(kept(table.graph, program), *(other.reads for other in others))
    fits = all(other.replaces.isdisjoint(group.replaces) and other.unmade.isdisjoint(group.reads) for other in others)
    if not fits or not read.isdisjoint(group.unmade):
        return taken
    covered = frozenset(name for other in inside for name in other.replaces)
    alone = [operation for operation in program if operation.name in group.replaces - covered]
    before = [*alone, *(launch for other in inside for launch in other.launches)]
    return [*others, group] if _gained_us(table, before, group, limit_bytes) > 0 else taken


def _saved_us(table: CandidateTable, group: Group, by_name: dict[str, Operation], limit_bytes: int | None) -> float:
    """What the operations take one by one, each in its best layout, less what the group takes; below zero where it
    cannot be run, or a profile has times of only one of the two: a fact and an estimate are not held side by side."""
    return _gained_us(table, [by_name[name] for name in group.replaces], group, limit_bytes)


def _gained_us(table: CandidateTable, one_by_one: Sequence[Operation], group: Group, limit_bytes: int | None) -> float:
    """The same of other launches in the place of its operations."""
    fused = [
        [c for c in table.offered(launch) if limit_bytes is None or c.workspace_bytes <= limit_bytes]
        for launch in group.launches
    ]
    if not all(fused):
        return -1.0
    singles = [table.candidates(operation, table.whole) for operation in one_by_one]
    if len({table.timed(operation) for operation in (*one_by_one, *group.launches)}) > 1:
        return -1.0
    return sum(min(c.time_us for c in found) for found in singles) - sum(
        min(c.time_us for c in found) for found in fused
    )


def _rewritten(program: tuple[Operation, ...], taken: Iterable[Group]) -> tuple[Operation, ...]:
    replaced: set[str] = set()
    launches: dict[int, list[Operation]] = {}
    for group in taken:
        replaced |= group.replaces
        for place, launch in zip(group.places, group.launches, strict=True):
            launches.setdefault(place, []).append(launch)
    found: list[Operation] = []
    for place, operation in enumerate(program):
        found += launches.get(place, ())
        if operation.name not in replaced:
            found.append(operation)
    return tuple(found)

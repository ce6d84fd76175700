"""Selection of fusion groups: those whose launches take less time than their operations one by one.

A group is an operation of the program (`mbc.ops.fused`), with candidates, layouts and workspace like any other. Groups
that overlap exclude one another, and those that save most are selected first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.ops.fused import has_product
from mbc.optimize import effort
from mbc.optimize.candidates.estimates import RematKernels
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.data_flow import Flow, data_flow_groups
from mbc.optimize.fusion.fused_remat_match import FusedRemat, all_fused_remats
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.match_patterns import live_out, pattern_groups
from mbc.options import UNLIMITED_BYTES

_OfPrograms = tuple[tuple[Group, ...], tuple[Group, ...]]  # of the training step and of inference


@dataclass(frozen=True, slots=True)
class Programs:
    """The operations of both programs, views included."""

    train: tuple[Operation, ...]
    infer: tuple[Operation, ...]


def plain(graph: TrainingGraph) -> Programs:
    """Return the programs without fusion."""
    return Programs(graph.train, graph.infer)


@dataclass(frozen=True, eq=False)
class Fusion:
    """The fusion groups and fused rematerializations of one table, each searched once.

    Attributes:
        table: Candidates of the graph.
        matches: All matches of patterns in the training step and in inference. They depend on the graph alone.
    """

    table: CandidateTable
    matches: _OfPrograms

    @staticmethod
    def of(table: CandidateTable) -> Fusion:
        """Return the fusion groups of a table."""
        graph = table.graph
        return Fusion(table, (_all_matches(graph, graph.train), _all_matches(graph, graph.infer)))

    def with_recomputed(self, recomputed: Mapping[str, RematKernels]) -> Fusion:
        """Return the fusion groups of the table with other recomputed convolutions."""
        table = self.table.with_recomputed(recomputed)
        return self if table is self.table else Fusion(table, self.matches)

    def programs(
        self, limit_bytes: int = UNLIMITED_BYTES, layout: Layout | None = None, left_out: Collection[int] = ()
    ) -> Programs:
        """Return both programs with the fusion groups that save time.

        Args:
            limit_bytes: Workspace that a launch may need.
            layout: Layout of all images; None lets each launch have its best one.
            left_out: Numbers of groups of the training step that are not used, as `long` returns them.
        """
        graph, (train, infer), constraints = self.table.graph, self.groups, _Constraints(limit_bytes, layout)
        train = tuple(group for number, group in enumerate(train) if number not in left_out)
        return Programs(
            _fused(self.table, graph.train, train, constraints), _fused(self.table, graph.infer, infer, constraints)
        )

    def long(self, held_bytes: int) -> frozenset[int]:
        """Return the numbers of those groups of the training step that keep more than `held_bytes` live for long."""
        return frozenset() if held_bytes >= UNLIMITED_BYTES else _long(self.table.graph, self.groups[0], held_bytes)

    @cached_property
    def groups(self) -> _OfPrograms:
        """Groups of both programs that some kernel can run.

        Groups that must be measured have been measured, and recompute values with equal bits.
        """
        train, infer = (tuple(filter(self._is_usable, matches)) for matches in self.possible)
        return train, infer

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The groups of both programs."""
        return (*self.groups[0], *self.groups[1])

    @cached_property
    def possible(self) -> _OfPrograms:
        """All matches that some kernel can run, also those that have to be measured before selection."""
        train, infer = (_offered(self.table, matches) for matches in self.matches)
        return train, infer

    @cached_property
    def fused_remats(self) -> tuple[FusedRemat, ...]:
        """Every fused rematerialization of the training step that some kernel can run.

        Those with a convolution have been measured; a convolution that is not stored gives the same bits.
        """
        table = self.table
        return tuple(
            fused_remat
            for fused_remat in all_fused_remats(table)
            if table.recomputed.keys() >= fused_remat.inlined
            and (
                not has_product(fused_remat.operation.attributes)
                or (table.timed(fused_remat.operation) and not table.compares_estimate(fused_remat.operation))
            )
        )

    def _is_usable(self, group: Group) -> bool:
        return is_measured(self.table, group) and self.table.recomputed.keys() >= group.recomputes.keys()


def _long(graph: TrainingGraph, groups_: Sequence[Group], held_bytes: int) -> frozenset[int]:
    """Return the numbers of the groups of the training step that keep more than `held_bytes` live for long.

    An operation of a group would by itself read its operands earlier than the group does, and may free more bytes than
    it writes: the slice of a concatenation's gradient does.
    """
    by_name = {operation.name: (position, operation) for position, operation in enumerate(graph.train)}
    read_at: dict[str, dict[str, int]] = {}
    for name, (position, operation) in by_name.items():
        for value in operation.inputs:
            read_at.setdefault(value, {})[name] = position

    def is_long(group: Group) -> bool:
        last = max(group.positions)
        for position, operation in (by_name[name] for name in group.replaces):
            if position + effort.HELD_NEAR < last:
                read = (value for value in dict.fromkeys(operation.inputs) if value in group.reads)
                freed = (v for v in read if all(at < last for n, at in read_at[v].items() if n not in group.replaces))
                size_bytes = sum(graph.values[value].type.size_bytes for value in freed)
                if size_bytes - sum(graph.values[value].type.size_bytes for value in operation.outputs) > held_bytes:
                    return True
        return False

    return frozenset(number for number, group in enumerate(groups_) if is_long(group))


def is_measured(table: CandidateTable, group: Group) -> bool:
    """Return whether the time of a group is in a profile, if no estimate predicts it."""
    return _is_predicted(table, group) or all(map(table.has_profiled_time, group.launches))


def _is_predicted(table: CandidateTable, group: Group) -> bool:
    """Return whether estimates predict the time of a group.

    On a GPU without a profile they also predict groups whose products are of kernels calibrated in posing.
    """
    products = [launch for launch in group.launches if has_product(launch.attributes)]
    return not group.measured or (bool(products) and all(map(table.has_calibrated_estimate, products)))


def _all_matches(graph: TrainingGraph, program: Sequence[Operation]) -> tuple[Group, ...]:
    results = live_out(graph, program)
    matches = pattern_groups(program, results)
    return (*matches, *data_flow_groups(Flow.of(graph, program, results), matches))


def _offered(table: CandidateTable, matches: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(group for group in matches if all(map(table.offered, group.launches)))


@dataclass(frozen=True, slots=True)
class _Constraints:
    """Limits for candidates: bytes of workspace, and one layout of images."""

    workspace_bytes: int
    layout: Layout | None

    def within(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if c.workspace_bytes <= self.workspace_bytes]

    def in_layout(
        self, table: CandidateTable, operation: Operation, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        if self.layout is None:
            return candidates
        values, names = table.graph.values, (*operation.inputs, *operation.outputs)
        images = [i for i, name in enumerate(names) if name in table.values_with_layout and values[name].per_sample]
        return [c for c in candidates if all(c.layouts[i] is self.layout for i in images if i < len(c.layouts))]


def _fused(
    table: CandidateTable, program: tuple[Operation, ...], groups_: tuple[Group, ...], constraints: _Constraints
) -> tuple[Operation, ...]:
    by_name = {operation.name: operation for operation in program}
    saving: list[tuple[float, int, Group]] = []
    for number, group in enumerate(groups_):
        if group.late:
            continue
        saved_us = _saved_us(table, group, by_name, constraints)
        if saved_us > 0:
            spared_us = group.spares_bytes / (table.device.copy_gb_s * 1e3)
            saving.append((-saved_us - spared_us, number, group))
    selected = _Selected({name: position for position, name in enumerate(by_name)})
    for _, _, group in sorted(saving, key=lambda entry: entry[:2]):
        if not selected.excluding(group):
            selected.add(group)
    readers = {value: {""} for value in live_out(table.graph, program)}  # "" reads what is needed after the end
    for operation in program:
        for value in operation.inputs:
            readers.setdefault(value, set()).add(operation.name)
    for group in groups_:
        # No other operation may read a value that the group does not store.
        if group.late and all(
            readers.get(v, set()) - group.replaces <= selected.replacing.keys() for v in group.unstored
        ):
            _select_late(table, by_name, selected, group, constraints)
    return _rewritten(program, selected.groups.values())


@dataclass
class _Selected:
    """The groups that are selected so far, and where they exclude other groups.

    Attributes:
        positions: The position of each operation in the program.
        groups: The groups by number, in the order of their selection.
        replacing: For each operation that a group replaces, the group.
        reading: For each value that launches of groups read, the groups.
        unstoring: For each value that groups do not store, the groups.
    """

    positions: Mapping[str, int]
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    replacing: dict[str, int] = field(default_factory=dict[str, int])
    reading: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    unstoring: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def excluding(self, group: Group) -> set[int]:
        """Return the selected groups that exclude a group (`Group.excludes`)."""
        numbers = {self.replacing[name] for name in group.replaces if name in self.replacing}
        numbers.update(*(self.reading.get(value, ()) for value in group.unstored))
        return numbers.union(*(self.unstoring.get(value, ()) for value in group.reads))

    def add(self, group: Group) -> None:
        number = next(reversed(self.groups), -1) + 1
        self.groups[number] = group
        self.replacing |= dict.fromkeys(group.replaces, number)
        for values, numbers in ((group.reads, self.reading), (group.unstored, self.unstoring)):
            for value in values:
                numbers.setdefault(value, set()).add(number)

    def remove(self, number: int) -> None:
        group = self.groups.pop(number)
        for name in group.replaces:
            del self.replacing[name]
        for values, numbers in ((group.reads, self.reading), (group.unstored, self.unstoring)):
            for value in values:
                numbers[value].remove(number)


def _select_late(
    table: CandidateTable,
    by_name: Mapping[str, Operation],
    selected: _Selected,
    group: Group,
    constraints: _Constraints,
) -> None:
    """Select a late group in the place of the groups that it contains, if that is possible and faster."""
    excluding = selected.excluding(group)
    inside = sorted(number for number in excluding if selected.groups[number].replaces <= group.replaces)
    if len(inside) < len(excluding):
        return
    covered = {name for number in inside for name in selected.groups[number].replaces}
    before = [by_name[name] for name in sorted(group.replaces - covered, key=selected.positions.__getitem__)]
    before += [launch for number in inside for launch in selected.groups[number].launches]
    if _gained_us(table, before, group, constraints) > 0:
        for number in inside:
            selected.remove(number)
        selected.add(group)


def _saved_us(table: CandidateTable, group: Group, by_name: dict[str, Operation], constraints: _Constraints) -> float:
    """Return the time that the group saves over its operations one by one, each in its best layout.

    The result is below zero if the group cannot run.
    """
    # Names are sorted, since a sum of the same times in another order may differ in its last bit, and so decide between
    # equal groups.
    return _gained_us(table, [by_name[name] for name in sorted(group.replaces)], group, constraints)


def _gained_us(
    table: CandidateTable, one_by_one: Sequence[Operation], group: Group, constraints: _Constraints
) -> float:
    """Return the time that the group saves over the launches `one_by_one`; below zero if the group cannot run."""
    if not all(constraints.within(table.offered(launch)) for launch in group.launches):
        return -1.0
    candidates = comparable(table, group, (*one_by_one, *group.launches))
    if candidates is None:
        return -1.0
    singles = [constraints.in_layout(table, operation, candidates(operation)) for operation in one_by_one]
    fused = [constraints.within(constraints.in_layout(table, launch, candidates(launch))) for launch in group.launches]
    if not (all(singles) and all(fused)):
        return -1.0
    return sum(min(c.time_us for c in times) for times in singles) - sum(
        min(c.time_us for c in times) for times in fused
    )


def comparable(
    table: CandidateTable, group: Group, launches: Sequence[Operation]
) -> Callable[[Operation], Sequence[Candidate]] | None:
    """Return a function that gives the candidates of a launch, with times that may be compared; None if there is none.

    The function gives the table's candidates if `CandidateTable.timed` is true for all launches. Otherwise it gives
    candidates whose times are the model's.

    Returns:
        The function. None if the model is needed, but does not predict the group, or measuring a launch of it failed.
    """
    if all(map(table.timed, launches)):
        return lambda operation: table.candidates(operation, table.whole)
    return table.modelled if _is_predicted(table, group) and not any(map(table.failed, group.launches)) else None


def _rewritten(program: tuple[Operation, ...], taken: Iterable[Group]) -> tuple[Operation, ...]:
    replaced: set[str] = set()
    launches: dict[int, list[Operation]] = {}
    for group in taken:
        replaced |= group.replaces
        for position, launch in zip(group.positions, group.launches, strict=True):
            launches.setdefault(position, []).append(launch)
    rewritten: list[Operation] = []
    for position, operation in enumerate(program):
        rewritten += launches.get(position, ())
        if operation.name not in replaced:
            rewritten.append(operation)
    return tuple(rewritten)

"""Depth-first execution in micro-batches, across layers: consecutive operations run together, one micro-batch after
another, so that a value between two of them exists for one micro-batch only.

The training program is cut where no large value is live. A stretch with large values between its runs, all of which
work row by row or reduce over rows, becomes a depth-first group. A large value of the forward pass that only its group
reads there is not kept for the backward pass: the groups that need it recompute its micro-batch first, by the same
kernels on the same rows. A reduction over rows, such as a batch norm's statistics, is complete only after its group, so
groups end there. Related work: TSPLIT (Nie et al., "TSPLIT: fine-grained GPU memory management", 2022), which splits
single tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import SEPARATOR, kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft, renumbered
from mbc.optimize.schedule.regions import Run, runs_of
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Program, Rows


@dataclass(frozen=True, slots=True)
class Division:
    """Values of more than `large_bytes` exist in micro-batches of `rows` rows only. One that takes longer than
    `again_us` per byte to recompute is kept as a whole for the backward pass."""

    large_bytes: int
    rows: int
    again_us: float = math.inf

    def parts(self, batch: int) -> tuple[Rows, ...]:
        return tuple(Rows(start, min(start + self.rows, batch)) for start in range(0, batch, self.rows))


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs [start, stop) that execute depth-first: those of `first` are launched before the group, those of `last`
    after it. `again`: runs of the forward pass whose micro-batches are recomputed."""

    start: int
    stop: int
    first: tuple[int, ...]
    rows: tuple[int, ...]
    last: tuple[int, ...]
    again: tuple[int, ...] = ()


def divided_operations(
    table: CandidateTable, draft: Draft, operations: Sequence[Operation], division: Division
) -> Mapping[str, int]:
    """Rows of a micro-batch by operation or group, of all that would be in depth-first groups. `draft` is one without
    any; `operations`: what it launches."""
    names: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        found = _Cutter(table, draft, program, operations, division, settled=False)
        for group in found.groups():
            for run in (*group.again, *group.rows):
                launched = program.launches[found.runs[run].start].operations
                if launched:  # a conversion is none
                    names[SEPARATOR.join(launched)] = division.rows
    return names


def depth_first(table: CandidateTable, draft: Draft, operations: Sequence[Operation], division: Division) -> Draft:
    """The draft executed depth-first, `draft` having those of `operations` that `divided_operations` names divided
    so."""
    buffers = list(draft.buffers)

    def of(program: Program) -> Program:
        cutter = _Cutter(table, draft, program, operations, division, settled=True)
        groups = cutter.groups()
        return _Writer(table.graph, program, buffers, cutter.runs, division, cutter.given_up).write(groups)

    train, infer = of(draft.train), of(draft.infer)
    # A buffer may take over the bytes of one with a lower number only: numbers follow the launches.
    numbers = dict.fromkeys((*draft.persistent, *train.entry, *infer.entry))
    launches = (*train.launches, *infer.launches)
    numbers |= dict.fromkeys(access.buffer for launch in launches for access in launch.accesses)
    return renumbered(replace(draft, buffers=tuple(buffers), train=train, infer=infer), tuple(numbers))


class _Cutter:
    """Finds the depth-first groups of a program. `settled`: only runs that are divided already can be in one."""

    def __init__(
        self,
        table: CandidateTable,
        draft: Draft,
        program: Program,
        operations: Sequence[Operation],
        division: Division,
        settled: bool,
    ) -> None:
        graph = table.graph
        self._table, self._draft, self._program, self._division = table, draft, program, division
        self._parts = division.parts(graph.batch)
        self._operations = {names_of(operation): operation for operation in operations}
        self.runs = runs_of(graph, draft, program)
        self._made: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        self._updated: dict[int, int] = {}  # states: the run that writes their next version
        for i, run in enumerate(self.runs):
            for buffer in run.reads:
                self._reads.setdefault(buffer, []).append(i)
            for buffer in run.writes:
                self._made[buffer] = i
                alias = draft.buffers[buffer].alias
                if alias is not None:
                    self._updated[alias] = i
        self._whole = frozenset((*program.entry, *program.exit))
        losses = (i for b, i in self._made.items() if draft.buffers[b].value == graph.loss)
        self._middle = max(losses, default=len(self.runs))  # where the forward pass ends
        self._batched = [any(map(self._per_sample, (*run.reads, *run.writes))) for run in self.runs]
        self._by_rows = [self._is_by_rows(run, settled) for run in self.runs]
        self.given_up: frozenset[int] = frozenset()  # values that backward groups recompute

    def groups(self) -> tuple[_Group, ...]:
        stretches = self._stretches()
        inside = {i: number for number, stretch in enumerate(stretches) for i in range(stretch.start, stretch.stop)}
        dividing = {inside[self._made[b]] for b in self._large() if self._handed_on_inside(b, inside)}
        given_up = {b for b in self._large() if self._can_give_up(b, inside, dividing)}
        given_up -= {b for b in given_up if self._is_dear(b, given_up)}
        # One that a group cannot recompute from live values is kept after all.
        while True:
            wanted = [self._wanted(stretch, given_up) for stretch in stretches]
            kept = {
                b
                for stretch, found in zip(stretches, wanted, strict=True)
                for b in found
                if self._chain((b,), given_up, stretch) is None
            }
            if not kept:
                break
            given_up -= kept
        self.given_up = frozenset(given_up)
        groups: list[_Group] = []
        for number, stretch in enumerate(stretches):
            again = self._chain(wanted[number], given_up, stretch)
            assert again is not None, "each value can be made again, and so can all"
            if again or number in dividing:
                groups.append(replace(stretch, again=again))
        return tuple(groups)

    def _wanted(self, stretch: _Group, given_up: Collection[int]) -> list[int]:
        """The given-up values of other groups that this one reads."""
        return [
            b
            for i in stretch.rows
            for b in self.runs[i].reads
            if b in given_up and not stretch.start <= self._made[b] < stretch.stop
        ]

    def _per_sample(self, buffer: int) -> bool:
        return self._table.graph.values[self._draft.buffers[buffer].value or ""].per_sample

    def _is_by_rows(self, run: Run, settled: bool) -> bool:
        launches = self._program.launches[run.start : run.stop]
        if isinstance(launches[0].work, Copy):
            return False
        if not launches[0].operations:
            return self._per_sample(run.writes[0])
        operation = self._operations[launches[0].operations]
        kind = kind_of(operation)
        # What is no reduction over rows, and not per sample, needs all rows together.
        if not kind.divisible or not (kind.accumulates or all(map(self._per_sample, run.writes))):
            return False
        if not any(map(self._per_sample, (*run.reads, *run.writes))):
            return False
        if not settled:
            return bool(self._table.menus_in(operation, self._division.rows))
        if len(launches) != len(self._parts):
            return False
        return all(
            access.rows == part
            for launch, part in zip(launches, self._parts, strict=True)
            for access in launch.accesses
            if self._draft.buffers[access.buffer].value is not None and self._per_sample(access.buffer)
        )

    def _large(self) -> list[int]:
        return [
            b
            for b in self._made
            if self._draft.buffers[b].size_bytes > self._division.large_bytes
            and b not in self._whole
            and self._per_sample(b)
        ]

    def _last_near(self, buffer: int) -> int:
        """The last run that reads a value in the pass, forward or backward, that makes it."""
        made = self._made[buffer]
        reads = self._reads.get(buffer, ())
        return max((i for i in reads if made >= self._middle or i < self._middle), default=made)

    def _stretches(self) -> list[_Group]:
        """Maximal stretches of runs that could be depth-first groups, in order."""
        joined = [False] * (len(self.runs) + 1)  # with the run before
        for buffer in self._large():
            for i in range(self._made[buffer] + 1, self._last_near(buffer) + 1):
                joined[i] = True
        found: list[_Group] = []
        start = 0
        while start < len(self.runs):
            stop = start + 1
            while stop < len(self.runs) and joined[stop]:
                stop += 1
            found += self._parted(start, stop)
            start = stop
        return found

    def _parted(self, start: int, stop: int) -> list[_Group]:
        """Stretches without what needs all rows together."""
        found: list[_Group] = []
        while start < stop:
            if self._batched[start] and not self._by_rows[start]:
                start += 1
                continue
            end = start + 1
            while end < stop and (stretch := self._stretch(start, end + 1)) is not None:
                end += 1
            stretch = self._stretch(start, end)
            assert stretch is not None
            if stretch.rows:
                found.append(stretch)
            start = end
        return found

    def _stretch(self, start: int, stop: int) -> _Group | None:
        """Runs [start, stop) as a depth-first group; None where they cannot be one."""
        rows = [i for i in range(start, stop) if self._batched[i]]
        if not all(self._by_rows[i] for i in rows):
            return None
        summed = {b for i in rows for b in self.runs[i].writes if not self._per_sample(b)}
        if any(b in summed for i in rows for b in self.runs[i].reads):
            return None
        first: list[int] = []
        last: list[int] = []
        late = set(summed)
        for i in range(start, stop):
            if self._batched[i]:
                continue
            if late.isdisjoint(self.runs[i].reads) and not self._overwrites(i, rows):
                first.append(i)
            else:
                last.append(i)
                late.update(self.runs[i].writes)
        if any(b in late for i in (*rows, *first) for b in self.runs[i].reads):
            return None
        return _Group(start, stop, tuple(first), tuple(rows), tuple(last))

    def _overwrites(self, run: int, rows: Sequence[int]) -> bool:
        """Whether a run updates a state that runs of the group still need as it was."""
        old = {self._draft.buffers[b].alias for b in self.runs[run].writes} - {None}
        return any(not old.isdisjoint(self.runs[i].reads) for i in rows)

    def _handed_on_inside(self, buffer: int, inside: Mapping[int, int]) -> bool:
        made, last = self._made[buffer], self._last_near(buffer)
        return last > made and made in inside and inside.get(last) == inside[made]

    def _can_give_up(self, buffer: int, inside: Mapping[int, int], dividing: set[int]) -> bool:
        """Whether a large value of the forward pass need not be kept: whoever reads it later works by rows."""
        made = self._made[buffer]
        if made >= self._middle or inside.get(made) not in dividing or not self._handed_on_inside(buffer, inside):
            return False
        later = [i for i in self._reads.get(buffer, ()) if inside.get(i) != inside[made]]
        return all(i in inside and self._by_rows[i] for i in later) and self.runs[made].again

    def _is_dear(self, buffer: int, given_up: Collection[int]) -> bool:
        """Whether recomputing a value takes longer than its bytes are worth, what else is needed later not counted."""
        total_us = 0.0
        pending = [buffer] if self._reads[buffer][-1] >= self._middle else []
        while pending:
            run = self.runs[self._made[pending.pop()]]
            total_us += run.time_us
            pending += [b for b in run.reads if b in given_up and self._reads[b][-1] < self._middle]
        return total_us > self._division.again_us * self._draft.buffers[buffer].size_bytes

    def _chain(self, wanted: Sequence[int], given_up: Collection[int], stretch: _Group) -> tuple[int, ...] | None:
        """The runs that recompute given-up values in a group from kept ones, in order; None where one of their states
        is updated before."""
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            run = self._made[pending.pop()]
            if run in found:
                continue
            found.add(run)
            for source in self.runs[run].reads:
                updated = self._updated.get(source, stretch.stop)
                if updated < stretch.stop and updated not in stretch.last:
                    return None
                if source in given_up:
                    pending.append(source)
        return tuple(sorted(found))


@dataclass
class _Writer:
    """Writes a program with its depth-first groups. New buffers are added to `buffers`."""

    graph: TrainingGraph
    program: Program
    buffers: list[Buffer]
    runs: Sequence[Run]
    division: Division
    given_up: frozenset[int]
    launches: list[Launch] = field(default_factory=list[Launch])
    _readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def write(self, groups: Sequence[_Group]) -> Program:
        for i, run in enumerate(self.runs):
            for buffer in run.reads:
                self._readers.setdefault(buffer, []).append(i)
        starts = {group.start: group for group in groups}
        cloned = frozenset(b for group in groups for i in group.again for b in self.runs[i].reads)
        i = 0
        while i < len(self.runs):
            group = starts.get(i)
            if group is None:
                self._run(i)
                i += 1
                continue
            for run in group.first:
                self._run(run)
            self._write_group(group, cloned)
            for run in group.last:
                self._run(run)
            i = group.stop
        return replace(self.program, launches=tuple(self.launches))

    def _run(self, run: int) -> None:
        self.launches += self.program.launches[self.runs[run].start : self.runs[run].stop]

    def _write_group(self, group: _Group, cloned: frozenset[int]) -> None:
        """`cloned`: what repeated runs read."""
        members = {*group.rows, *group.again}
        here = {b for i in members for b in self.runs[i].writes if self._per_sample(b)}
        elsewhere = {b for b in here if any(i not in members for i in self._readers.get(b, ()))}
        elsewhere |= cloned | set(self.program.exit)
        again = {b for i in group.again for b in self.runs[i].writes}
        inner = {b for b in here if b in again or b in self.given_up or b not in elsewhere}
        for number, part in enumerate(self.division.parts(self.graph.batch)):
            moved: dict[int, int] = {}
            for b in sorted(inner):
                old = self.buffers[b]
                size_bytes = old.size_bytes // old.rows.count * part.count
                moved[b] = self._new(replace(old, rows=part, size_bytes=size_bytes))
            for i in group.again:
                self._part(self.runs[i], number, part, moved, again=True)
            for i in group.rows:
                self._part(self.runs[i], number, part, moved, again=False)

    def _part(self, run: Run, number: int, part: Rows, moved: Mapping[int, int], again: bool) -> None:
        launch = self.program.launches[run.start + (number if run.stop - run.start > 1 else 0)]
        work = launch.work
        if not launch.operations and isinstance(work, Kernel):
            work = replace(work, time_us=work.time_us * part.count / self.graph.batch)
        accesses: list[Access] = []
        for access in launch.accesses:
            buffer, rows = access.buffer, access.rows
            if self.buffers[buffer].value is None:
                buffer = self._new(self.buffers[buffer]) if again else buffer
            elif self._per_sample(buffer):
                buffer, rows = moved.get(buffer, buffer), part
            else:
                assert not (again and access.mode is not Mode.READ), "sums are not made again"
            accesses.append(replace(access, buffer=buffer, rows=rows))
        self.launches.append(replace(launch, work=work, accesses=tuple(accesses)))

    def _per_sample(self, buffer: int) -> bool:
        return self.graph.values[self.buffers[buffer].value or ""].per_sample

    def _new(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

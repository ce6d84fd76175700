"""Fused rematerialization: a value is recomputed by a launch that reads most of its operands anyway, nearly for
nothing.

Within a budget relu's output is often recomputed, for the gradient of the next convolution's filter. The reductions of
batch norm's backward pass, a little later, read nearly all of its operands: if they write it, too
(`mbc.optimize.fusion.catalogue.FUSED_REMAT`), that takes as long as writing it, where a launch of its own would read
everything once more. For that the gradient of the filter has to come after the reductions, which is allowed: only an
update waits for it.

So is the output of a convolution with more output than input channels, which the reductions themselves read: it is
recomputed in their prologue. Another kernel would round it differently, and change the reductions, so that it has to be
the same one (`bitwise_equal_to`).

Both are recomputed by one launch where that was measured, else the convolution's output before the reductions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Operation
from mbc.kernels.cuda import bitwise_equal_to
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops import KINDS
from mbc.ops.fused import has_product, join, kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.catalogue import FUSED_REMAT
from mbc.optimize.fusion.pattern import find
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Run
from mbc.optimize.selection.select import Choices
from mbc.plan.model import Access, Kernel, Launch, Mode, Stream


@dataclass(frozen=True, slots=True)
class FusedRemat:
    """A fused rematerialization: the launch of `operation` recomputes `values` and computes the reductions `sums` as
    well. `makes`: of each value the operations that compute it. `inside`: a convolution that the launch recomputes and
    does not store."""

    values: tuple[str, ...]
    makes: tuple[frozenset[str], ...]
    sums: frozenset[str]
    operation: Operation
    inside: frozenset[str] = frozenset()

    def stands_for(self, operation: Operation) -> bool:
        """Whether an operation or group computes the reductions, possibly with the value inside, and nothing else that
        is read."""
        names = frozenset(names_of(operation))
        known = self.sums.union(self.inside, *self.makes)
        return self.sums <= names <= known and set(operation.outputs) <= set(self.operation.outputs)


@dataclass(frozen=True, slots=True)
class FusedRematRun:
    """How run `sums` of a draft recomputes a value, whose buffer is the first of `targets`: by `launch` in the place of
    its own, with a workspace of so many bytes as its last operand (0: none), in `more_us` more. `rivals`: repetitions
    with which the value needs a launch of its own, since they read it before, or replace the reductions themselves.
    `joint`: the launch that then recomputes it and the value of one of them, in `more_us` more than that one takes.
    `unread`: buffers that a launch of its own would read, and this one does not."""

    sums: int
    targets: tuple[int, ...]
    launch: Launch
    workspace_bytes: int
    more_us: float
    rivals: frozenset[tuple[int, int]] = frozenset()
    joint: FusedRematRun | None = None
    unread: frozenset[int] = frozenset()

    @property
    def spared(self) -> frozenset[int]:
        """Of `unread` the buffers that need not be live with any repetition."""
        return frozenset() if self.rivals else self.unread

    @property
    def matters(self) -> frozenset[tuple[int, int]]:
        """The repetitions that change how the value is recomputed."""
        return self.rivals | self.joint.rivals if self.joint else self.rivals

    def beside(self, *repeated: Container[tuple[int, int]]) -> FusedRematRun | None:
        """How the value is recomputed given other repetitions; None: by a launch of its own."""
        if not any(rival in keys for rival in self.rivals for keys in repeated):
            return self
        return self.joint.beside(*repeated) if self.joint else None


# By the run that computes the value, and the position before which it is recomputed.
FusedRematRuns = Mapping[tuple[int, int], FusedRematRun]


def fused_remats_of(table: CandidateTable) -> tuple[FusedRemat, ...]:
    """Every fused rematerialization of the training step that some kernel can run; found once. Those with a convolution
    have to be measured; one that is not stored has to give the same bits."""
    if "along" not in table.groups:
        found = (fused_remat for fused_remat in all_fused_remats(table) if table.repeated.keys() >= fused_remat.inside)
        table.groups["along"] = tuple(
            fused_remat
            for fused_remat in found
            if not has_product(fused_remat.operation.attributes) or table.timed(fused_remat.operation)
        )
    return table.groups["along"]


def all_fused_remats(table: CandidateTable) -> tuple[FusedRemat, ...]:
    """The same, also those that have to be measured before they may be taken."""
    return tuple(_fused_remats(table))


def _fused_remats(table: CandidateTable) -> Iterator[FusedRemat]:
    program = table.graph.train
    makers = {output: operation for operation in program for output in operation.outputs}
    for pattern in FUSED_REMAT:
        (part,) = pattern.launches
        for operation in program:
            if operation.kind != pattern.statements[-1].kind:
                continue
            for binding in find(pattern, operation, makers):
                members = [binding.operations[number] for number in part.runs]
                joined = join(members, [binding.values[name] for name in part.gives])
                if not table.offered(joined):
                    continue
                sums = frozenset(binding.operations[number].name for number in pattern.replaces)
                again = [member for member in members if member.name not in sums]
                made = {name for member in again for name in member.outputs}
                values = tuple(name for name in joined.outputs if name in made)
                # Of two the first one is a convolution's output; so is what is not stored.
                product, others = frozenset(member.name for member in again[:1]), again[1:]
                behind = frozenset(member.name for member in others)
                if len(values) > 1:
                    yield FusedRemat(values, (product, behind), sums, joined)
                elif KINDS[again[0].kind].flops is not None and others:
                    yield FusedRemat(values, (behind,), sums, joined, product)
                else:
                    yield FusedRemat(values, (product | behind,), sums, joined)


def defer_readers(table: CandidateTable, choices: Choices) -> Choices:
    """The same choices with every operation moved behind the reductions that could recompute its operand, if its own
    results are needed only later."""
    program = choices.train
    last = _last_places(program, fused_remats_of(table))
    if not last:
        return choices
    readers: dict[str, list[int]] = {}
    for place, operation in enumerate(program):
        for name in operation.inputs:
            readers.setdefault(name, []).append(place)
    places = [float(place) for place in range(len(program))]
    for value, sums in last.items():
        for place in readers.get(value, ()):
            needed = [reader for name in program[place].outputs for reader in readers.get(name, ())]
            if place < sums and not kind_of(program[place]).view and min(needed, default=sums + 1) > sums:
                places[place] = max(places[place], sums + 0.5)
    order = sorted(range(len(program)), key=lambda place: (places[place], place))
    if order == list(range(len(program))):
        return choices
    train = tuple(program[place] for place in order)
    return replace(choices, train=train)


def _last_places(program: Sequence[Operation], fused_remats: Sequence[FusedRemat]) -> dict[str, int]:
    """Values that could be recomputed by the launch of an operation of the program, and its place."""
    by_name = {names_of(operation)[-1]: (place, operation) for place, operation in enumerate(program)}
    found: dict[str, int] = {}
    for fused_remat in fused_remats:
        standing = by_name.get(names_of(fused_remat.operation)[-1])
        if standing is not None and fused_remat.stands_for(standing[1]):
            found |= dict.fromkeys(fused_remat.values, standing[0])
    return found


def fused_remat_runs(
    table: CandidateTable, draft: Draft, runs: Sequence[Run], program: Sequence[Operation]
) -> FusedRematRuns:
    """The fused rematerializations of a draft's training program: where kernels are known in the layouts of the draft,
    both or none of them measured, and take less than a launch more. `program`: the operations of the runs."""
    launches = draft.train.launches
    single = {
        launches[run.start].operations: i
        for i, run in enumerate(runs)
        if run.stop == run.start + 1 and launches[run.start].operations
    }
    operations = {names_of(operation): operation for operation in program}
    makers = {_without_statistics(operations.get(names), names): i for names, i in single.items()}
    last = {names[-1]: (operations[names], i) for names, i in single.items() if names in operations}
    reads: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        for buffer in run.reads:
            reads.setdefault(buffer, []).append(i)
    converted: dict[int, list[int]] = {}
    for run in runs:
        launch = launches[run.start]
        if isinstance(launch.work, Kernel) and not launch.operations and run.stop == run.start + 1:
            for source in run.reads:
                converted.setdefault(source, []).extend(run.writes)
    places: list[tuple[FusedRemat, list[int], int]] = []  # each, its makers, its reductions
    for fused_remat in fused_remats_of(table):
        made_by = [makers[names] for names in fused_remat.makes if names in makers]
        standing = last.get(names_of(fused_remat.operation)[-1])
        if len(made_by) < len(fused_remat.makes) or standing is None:
            continue
        operation, sums = standing
        if (
            fused_remat.stands_for(operation)
            and max(made_by) < sums
            and table.timed(fused_remat.operation) == table.timed(operation)
        ):
            places.append((fused_remat, made_by, sums))

    def fused_remat_run(
        fused_remat: FusedRemat, made_by: Sequence[int], sums: int, least_us: float
    ) -> FusedRematRun | None:
        """None where the first value by itself is as cheap."""
        run = _fused_remat_run(
            table, draft, fused_remat, [runs[maker] for maker in made_by], sums, runs[sums], least_us
        )
        return run if run is not None and run.more_us < runs[made_by[0]].again_us else None

    found: dict[tuple[int, int], FusedRematRun] = {}
    for fused_remat, made_by, sums in places:
        run = fused_remat_run(fused_remat, made_by, sums, runs[sums].time_us) if len(made_by) == 1 else None
        if run is None:
            continue
        # A reader in another layout converts it after the reductions.
        target = run.targets[0]
        wanted = [i for i in reads.get(target, ()) if i >= sums]
        wanted += [i for other in converted.get(target, ()) for i in reads.get(other, ()) if i > sums]
        position = min(wanted, default=len(runs))
        if position <= sums + effort.FUSED_REMAT_NEAR_RUNS:
            found[made_by[0], position] = run
    found = {key: replace(run, rivals=frozenset(_rivals(key, found, reads))) for key, run in found.items()}
    by_sums = {(key[0], run.sums): key for key, run in found.items()}
    for fused_remat, made_by, sums in places:
        keys = [by_sums[maker, sums] for maker in made_by if (maker, sums) in by_sums]
        if len(keys) == 2:
            first, second = keys
            joint = fused_remat_run(fused_remat, made_by, sums, runs[sums].time_us + found[second].more_us)
            if joint is not None:
                rivals = (found[first].rivals | found[second].rivals) - {second}
                found[first] = replace(found[first], joint=replace(joint, rivals=rivals))
    return found


def _without_statistics(operation: Operation | None, names: Sequence[str]) -> frozenset[str]:
    """The members of a launch that compute its large value: batch statistics of it are small, and kept."""
    return frozenset(names[:-1] if operation is not None and operation.kind == WITH_STATISTICS else names)


def _rivals(
    key: tuple[int, int], fused_remats: FusedRematRuns, reads: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Of several values that the same reductions could recompute the one that was computed last is, as the others may
    be its operands."""
    fused_remat = fused_remats[key]
    for other, beside in fused_remats.items():
        if beside.sums == fused_remat.sums and other[0] > key[0]:
            yield other
    if key[1] == fused_remat.sums:
        for reader in reads.get(fused_remat.targets[0], ()):
            if reader < fused_remat.sums:
                yield reader, fused_remat.sums


def _fused_remat_run(
    table: CandidateTable,
    draft: Draft,
    fused_remat: FusedRemat,
    makers: Sequence[Run],
    number: int,
    sums: Run,
    least_us: float,
) -> FusedRematRun | None:
    """`makers`: runs that compute the values. `least_us`: the time of a launch that recomputes fewer of them, which is
    a bound."""
    launches = [draft.train.launches[run.start] for run in (*makers, sums)]
    touched = [access for launch in launches for access in launch.accesses]
    buffers: dict[str, int] = {}
    for access in touched:
        name = draft.buffers[access.buffer].value
        if name is not None and buffers.setdefault(name, access.buffer) != access.buffer:
            return None  # one value in two layouts
    operation = fused_remat.operation
    names = (*operation.inputs, *operation.outputs)
    if any(name not in buffers for name in names):
        return None
    operands = [buffers[name] for name in names]
    menu = table.menus(operation).get(tuple(draft.buffers[b].layout for b in operands))
    if not menu:
        return None
    piece, *more = menu[-1].slices
    if more:
        return None
    candidate = piece.candidate
    work = launches[0].work
    if not isinstance(work, Kernel) or (not fused_remat.inside and not bitwise_equal_to(candidate.name, work.name)):
        return None
    rows = {access.buffer: access.rows for access in touched}
    count = len(operation.inputs)
    accesses = tuple(Access(b, rows[b], Mode.READ if i < count else Mode.WRITE) for i, b in enumerate(operands))
    time_us = max(candidate.time_us, least_us)
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, time_us, candidate.measured)
    launch = Launch(kernel, names_of(operation), Stream.COMPUTE, accesses)
    targets = tuple(buffers[value] for value in fused_remat.values)
    unread = frozenset(makers[-1].reads).difference(operands) if fused_remat.inside else frozenset[int]()
    return FusedRematRun(number, targets, launch, candidate.workspace_bytes, time_us - least_us, unread=unread)

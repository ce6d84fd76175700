"""Fused rematerialization: a launch that reads most of a value's operands anyway recomputes it at little cost.

Within a budget ReLU's output is often recomputed, for the filter gradient of the next convolution. The reductions of
batch norm's backward pass, a little later, read nearly all of its operands. If they store the output as well
(`mbc.optimize.fusion.catalogue.FUSED_REMAT`), that takes only as long as the store, whereas a launch of its own would
read everything once more. For this the filter gradient has to come after the reductions, which is allowed: only an
update waits for it.

The output of a convolution with more output than input channels, which the reductions themselves read, can be
recomputed in their prologue. Another kernel would round it differently, and change the reductions, so the result has to
be bitwise the same (`bitwise_equal_to`).

Where both are recomputed, the reductions recompute ReLU's output, and the convolution's output is recomputed before.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation
from mbc.kernels.cuda import bitwise_equal_to
from mbc.kernels.statistics import STATISTICS_GROUPS
from mbc.ops.fused import kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.fused_remat_match import FusedRemat
from mbc.optimize.fusion.select_groups import Fusion
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region
from mbc.optimize.selection.select import Choices
from mbc.plan.model import Access, Kernel, Launch, Mode


@dataclass(frozen=True, slots=True)
class FusedRematLaunch:
    """A launch that replaces the launch of a draft's region, and also recomputes a value.

    Attributes:
        reductions: The region.
        target: Buffer of the recomputed value.
        launch: The launch.
        workspace_bytes: Workspace, the launch's last operand; 0: none.
        more_us: Additional time.
        conflicts: Recomputations with which the value needs a launch of its own, since they read it before, or replace
            the reductions themselves.
        unread: Buffers that a separate launch would read, but this launch does not.
    """

    reductions: int
    target: int
    launch: Launch
    workspace_bytes: int
    more_us: float
    conflicts: frozenset[tuple[int, int]] = frozenset()
    unread: frozenset[int] = frozenset()

    @property
    def never_read(self) -> frozenset[int]:
        """Buffers of `unread` that need not be live, whatever else is recomputed."""
        return frozenset() if self.conflicts else self.unread

    def is_possible(self, *recomputed: Container[tuple[int, int]]) -> bool:
        """Return whether the launch recomputes the value given other recomputations; if not, it has its own launch."""
        return not any(rival in keys for rival in self.conflicts for keys in recomputed)


# By (region that defines the value, position before which the value is recomputed).
FusedRematLaunches = Mapping[tuple[int, int], FusedRematLaunch]


def defer_readers(fusion: Fusion, choices: Choices, available_bytes: int) -> Choices:
    """Return the choices with operations moved after the reductions that could recompute their operand.

    An operation is moved if its own results are needed only later. The operands of the reductions and of the operation
    are then live together, so it is not moved if they are a large share of the bytes beside the states.
    """
    program, graph = choices.train, fusion.table.graph
    room_bytes = available_bytes - sum(graph.values[state.value].type.size_bytes for state in graph.states)
    last = _last_positions(program, fusion.fused_remats)
    if not last:
        return choices
    readers: dict[str, list[int]] = {}
    for position, operation in enumerate(program):
        for name in operation.inputs:
            readers.setdefault(name, []).append(position)
    positions = [float(position) for position in range(len(program))]
    for value, reductions in last.items():
        for position in readers.get(value, ()):
            both = (program[position], program[reductions])
            touched = {name for operation in both for name in (*operation.inputs, *operation.outputs)}
            if sum(graph.values[name].type.size_bytes for name in touched) > effort.DEFERRED_SHARE * room_bytes:
                continue
            needed = [reader for name in program[position].outputs for reader in readers.get(name, ())]
            if (
                position < reductions
                and not kind_of(program[position]).view
                and min(needed, default=reductions + 1) > reductions
            ):
                positions[position] = max(positions[position], reductions + 0.5)
    order = sorted(range(len(program)), key=lambda position: (positions[position], position))
    if order == list(range(len(program))):
        return choices
    train = tuple(program[position] for position in order)
    return replace(choices, train=train)


def _last_positions(program: Sequence[Operation], fused_remats: Sequence[FusedRemat]) -> dict[str, int]:
    """Return the values that the launch of an operation of the program could recompute, and its position."""
    by_name = {names_of(operation)[-1]: (position, operation) for position, operation in enumerate(program)}
    positions: dict[str, int] = {}
    for fused_remat in fused_remats:
        replaced = by_name.get(names_of(fused_remat.operation)[-1])
        if replaced is not None and fused_remat.can_replace(replaced[1]):
            positions[fused_remat.value] = replaced[0]
    return positions


def fused_remat_launches(
    fusion: Fusion, draft: Draft, regions: Sequence[Region], program: Sequence[Operation]
) -> FusedRematLaunches:
    """Return the fused rematerializations of a draft's training program that take less than a launch more.

    The kernels must exist in the layouts of the draft, and both or none of the two launches must be measured.

    Args:
        fusion: Fused rematerializations of the graph.
        draft: Launches and buffers.
        regions: Regions of the training program.
        program: Operations of the regions.
    """
    table, launches = fusion.table, draft.train.launches
    single = {
        launches[region.start].operations: i
        for i, region in enumerate(regions)
        if region.stop == region.start + 1 and launches[region.start].operations
    }
    operations = {names_of(operation): operation for operation in program}
    producers = {_without_statistics(operations.get(names), names): i for names, i in single.items()}
    last = {names[-1]: (operations[names], i) for names, i in single.items() if names in operations}
    reads: dict[int, list[int]] = {}
    for i, region in enumerate(regions):
        for buffer in region.reads:
            reads.setdefault(buffer, []).append(i)
    converted: dict[int, list[int]] = {}
    for region in regions:
        launch = launches[region.start]
        if isinstance(launch.work, Kernel) and not launch.operations and region.stop == region.start + 1:
            for source in region.reads:
                converted.setdefault(source, []).extend(region.writes)
    by_key: dict[tuple[int, int], FusedRematLaunch] = {}
    for fused_remat in fusion.fused_remats:
        defined_at = producers.get(fused_remat.producers)
        operation, reductions = last.get(names_of(fused_remat.operation)[-1], (None, -1))
        if (
            defined_at is None
            or operation is None
            or not fused_remat.can_replace(operation)
            or defined_at >= reductions
            or table.timed(fused_remat.operation) != table.timed(operation)
        ):
            continue
        launch = _fused_remat_launch(table, draft, fused_remat, regions, (defined_at, reductions))
        if launch is None or launch.more_us >= regions[defined_at].recompute_us:
            continue
        # A reader in another layout reads a conversion of the value, launched after the reductions.
        wanted = [i for i in reads.get(launch.target, ()) if i >= reductions]
        wanted += [i for other in converted.get(launch.target, ()) for i in reads.get(other, ()) if i > reductions]
        position = min(wanted, default=len(regions))
        if position <= reductions + effort.FUSED_REMAT_NEAR_REGIONS:
            by_key[defined_at, position] = launch
    sharing: dict[int, list[tuple[int, int]]] = {}  # by reductions: the fused rematerializations
    for key, launch in by_key.items():
        sharing.setdefault(launch.reductions, []).append(key)
    return {
        key: replace(launch, conflicts=frozenset(_rivals(key, launch, sharing[launch.reductions], reads)))
        for key, launch in by_key.items()
    }


def _without_statistics(operation: Operation | None, names: Sequence[str]) -> frozenset[str]:
    """Return the members of a launch that compute its large value: statistics of it are small, and kept."""
    return frozenset(names[:-1] if operation is not None and operation.kind in STATISTICS_GROUPS else names)


def _rivals(
    key: tuple[int, int],
    fused_remat: FusedRematLaunch,
    sharing: Sequence[tuple[int, int]],
    reads: Mapping[int, Sequence[int]],
) -> Iterator[tuple[int, int]]:
    """Yield the recomputations that prevent a fused rematerialization from recomputing its value.

    If the same reductions could recompute several values, they recompute the value that is defined last, because the
    others may be its operands. A reader before the reductions that is recomputed there needs the value earlier.
    `sharing`: all fused rematerializations of these reductions.
    """
    yield from (other for other in sharing if other[0] > key[0])
    if key[1] == fused_remat.reductions:
        for reader in reads.get(fused_remat.target, ()):
            if reader < fused_remat.reductions:
                yield reader, fused_remat.reductions


def _fused_remat_launch(
    table: CandidateTable, draft: Draft, fused_remat: FusedRemat, regions: Sequence[Region], at: tuple[int, int]
) -> FusedRematLaunch | None:
    """Return the launch of a fused rematerialization in the layouts of a draft; None if no kernel can run it.

    Args:
        table: Candidates of the graph.
        draft: Launches and buffers.
        fused_remat: The fused rematerialization.
        regions: Regions of the training program.
        at: Indices of the region that computes the value and of the region of the reductions.
    """
    producer, reductions = (regions[i] for i in at)
    launches = [draft.train.launches[region.start] for region in (producer, reductions)]
    touched = [access for launch in launches for access in launch.accesses]
    buffers: dict[str, int] = {}
    for access in touched:
        name = draft.buffers[access.buffer].value
        if name is not None and buffers.setdefault(name, access.buffer) != access.buffer:
            return None  # the launches use one value in two layouts
    operation = fused_remat.operation
    names = (*operation.inputs, *operation.outputs)
    if any(name not in buffers for name in names):
        return None
    operands = [buffers[name] for name in names]
    front = table.fronts(operation).get(tuple(draft.buffers[b].layout for b in operands))
    if not front:
        return None
    micro_batch, *more = front[-1].micro_batches
    if more:
        return None
    candidate = micro_batch.candidate
    work = launches[0].work
    if not isinstance(work, Kernel) or (not fused_remat.inlined and not bitwise_equal_to(candidate.name, work.name)):
        return None
    rows = {access.buffer: access.rows for access in touched}
    count = len(operation.inputs)
    accesses = tuple(Access(b, rows[b], Mode.READ if i < count else Mode.WRITE) for i, b in enumerate(operands))
    time_us = max(candidate.time_us, reductions.time_us)
    kernel = Kernel(candidate.provider, candidate.name, candidate.settings, time_us, candidate.measured)
    launch = Launch(kernel, names_of(operation), Stream.COMPUTE, accesses)
    target, more_us = buffers[fused_remat.value], time_us - reductions.time_us
    unread = frozenset(producer.reads).difference(operands) if fused_remat.inlined else frozenset[int]()
    return FusedRematLaunch(at[1], target, launch, candidate.workspace_bytes, more_us, unread=unread)

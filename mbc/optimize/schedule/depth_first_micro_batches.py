"""Depth-first execution in micro-batches, across layers: consecutive operations run one micro-batch after another.

So a value between two of them exists for one micro-batch at a time. `depth_first_groups` finds the operations that can
run so, and the values that the backward pass recomputes; it does so by the same kernels on the same rows. A reduction
over rows, such as a batch norm's statistics, is complete only after its group, so groups end there. Related work:
TSPLIT (Nie et al., "TSPLIT: fine-grained GPU memory management", 2022), which splits single tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops.fused import SEPARATOR
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.depth_first_groups import Cutter, Division, Group
from mbc.optimize.schedule.emit_launches import Draft, renumbered
from mbc.optimize.schedule.regions import Region
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Program, Rows


def divided_operations(
    table: CandidateTable, draft: Draft, operations: Sequence[Operation], division: Division
) -> Mapping[str, int]:
    """Return the rows of a micro-batch for all operations that would be in depth-first groups, by name.

    Args:
        table: Candidates of the graph.
        draft: A draft without groups.
        operations: Operations that the draft launches.
        division: The division.
    """
    names: dict[str, int] = {}
    for program in (draft.train, draft.infer):
        cutter = Cutter(table, draft, program, operations, division)
        groups, _ = cutter.groups(settled=False)
        for group in groups:
            for region in (*group.recomputed, *group.rows):
                launched = program.launches[cutter.regions[region].start].operations
                if launched:  # a layout conversion has no operations
                    names[SEPARATOR.join(launched)] = division.rows
    return names


def depth_first(table: CandidateTable, draft: Draft, operations: Sequence[Operation], division: Division) -> Draft:
    """Return the draft executed depth-first.

    Args:
        table: Candidates of the graph.
        draft: A draft in which the operations that `divided_operations` names are divided.
        operations: Operations that the draft launches.
        division: The division.
    """
    buffers = list(draft.buffers)

    def of(program: Program) -> Program:
        cutter = Cutter(table, draft, program, operations, division)
        groups, discarded = cutter.groups(settled=True)
        return _Writer(table.graph, program, buffers, cutter.regions, division, discarded).write(groups)

    train, infer = of(draft.train), of(draft.infer)
    # A buffer may alias one with a lower number only: numbers follow the launches.
    numbers = dict.fromkeys((*draft.persistent, *train.entry, *infer.entry))
    launches = (*train.launches, *infer.launches)
    numbers |= dict.fromkeys(access.buffer for launch in launches for access in launch.accesses)
    return renumbered(replace(draft, buffers=tuple(buffers), train=train, infer=infer), tuple(numbers))


@dataclass
class _Writer:
    """Writes a program with its depth-first groups. New buffers are added to `buffers`."""

    graph: TrainingGraph
    program: Program
    buffers: list[Buffer]
    regions: Sequence[Region]
    division: Division
    discarded: frozenset[int]
    launches: list[Launch] = field(default_factory=list[Launch])
    _readers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def write(self, groups: Sequence[Group]) -> Program:
        for i, region in enumerate(self.regions):
            for buffer in region.reads:
                self._readers.setdefault(buffer, []).append(i)
        starts = {group.start: group for group in groups}
        cloned = frozenset(b for group in groups for i in group.recomputed for b in self.regions[i].reads)
        i = 0
        while i < len(self.regions):
            group = starts.get(i)
            if group is None:
                self._region(i)
                i += 1
                continue
            for region in group.first:
                self._region(region)
            self._write_group(group, cloned)
            for region in group.last:
                self._region(region)
            i = group.stop
        return replace(self.program, launches=tuple(self.launches))

    def _region(self, region: int) -> None:
        self.launches += self.program.launches[self.regions[region].start : self.regions[region].stop]

    def _write_group(self, group: Group, cloned: frozenset[int]) -> None:
        """Write a group, whose recomputed regions read the buffers `cloned`."""
        members = {*group.rows, *group.recomputed}
        here = {b for i in members for b in self.regions[i].writes if self._per_sample(b)}
        elsewhere = {b for b in here if any(i not in members for i in self._readers.get(b, ()))}
        elsewhere |= cloned | set(self.program.exit)
        recomputed = {b for i in group.recomputed for b in self.regions[i].writes}
        inner = {b for b in here if b in recomputed or b in self.discarded or b not in elsewhere}
        for number, part in enumerate(self.division.parts(self.graph.batch)):
            renamed: dict[int, int] = {}
            for b in sorted(inner):
                old = self.buffers[b]
                size_bytes = old.size_bytes // old.rows.count * part.count
                renamed[b] = self._new(replace(old, rows=part, size_bytes=size_bytes))
            for i in group.recomputed:
                self._micro_batch(self.regions[i], number, part, renamed, recomputed=True)
            for i in group.rows:
                self._micro_batch(self.regions[i], number, part, renamed, recomputed=False)

    def _micro_batch(
        self, region: Region, number: int, part: Rows, renamed: Mapping[int, int], recomputed: bool
    ) -> None:
        launch = self.program.launches[region.start + (number if region.stop - region.start > 1 else 0)]
        work = launch.work
        if not launch.operations and isinstance(work, Kernel):
            work = replace(work, time_us=work.time_us * part.count / self.graph.batch)
        accesses: list[Access] = []
        for access in launch.accesses:
            buffer, rows = access.buffer, access.rows
            if self.buffers[buffer].value is None:
                buffer = self._new(self.buffers[buffer]) if recomputed else buffer
            elif self._per_sample(buffer):
                buffer, rows = renamed.get(buffer, buffer), part
            else:
                assert not (recomputed and access.mode is not Mode.READ), "reductions are not recomputed"
            accesses.append(replace(access, buffer=buffer, rows=rows))
        self.launches.append(replace(launch, work=work, accesses=tuple(accesses)))

    def _per_sample(self, buffer: int) -> bool:
        return self.graph.values[self.buffers[buffer].value or ""].per_sample

    def _new(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

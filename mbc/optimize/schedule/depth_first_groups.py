"""Depth-first groups of a program, and the large values that are discarded and recomputed in them.

The program is cut where no large value is live. A stretch with large values between its regions, all of which work row
by row or reduce over rows, becomes a group. A large value of the forward pass that only its group reads in that pass is
discarded: the groups of the backward pass that need it recompute its micro-batch first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.ir.graph import Operation
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region, regions_of
from mbc.plan.collectives import is_collective
from mbc.plan.model import Copy, Program, Rows


@dataclass(frozen=True, slots=True)
class Division:
    """A division of large values into micro-batches.

    Attributes:
        large_bytes: Values of more bytes exist in micro-batches only.
        rows: Rows of a micro-batch.
        max_recompute_us: Time to recompute a value, per byte, above which the value is kept as a whole for the backward
            pass.
    """

    large_bytes: int
    rows: int
    max_recompute_us: float = math.inf

    def parts(self, batch: int) -> tuple[Rows, ...]:
        """Return the rows of each micro-batch; the last may have fewer."""
        return tuple(Rows(start, min(start + self.rows, batch)) for start in range(0, batch, self.rows))


@dataclass(frozen=True, slots=True)
class Group:
    """Regions [start, stop) that execute depth-first.

    Attributes:
        start: The first region.
        stop: The region after the last.
        first: Regions that are launched before the group.
        rows: Regions that run in micro-batches.
        last: Regions that are launched after the group.
        recomputed: Regions of the forward pass whose micro-batches are recomputed.
    """

    start: int
    stop: int
    first: tuple[int, ...]
    rows: tuple[int, ...]
    last: tuple[int, ...]
    recomputed: tuple[int, ...] = ()


class Cutter:
    """Finds the depth-first groups of a program."""

    def __init__(
        self, table: CandidateTable, draft: Draft, program: Program, operations: Sequence[Operation], division: Division
    ) -> None:
        """Find the regions of a program."""
        graph = table.graph
        self._table, self._draft, self._program, self._division = table, draft, program, division
        self._parts = division.parts(graph.batch)
        self._operations = {names_of(operation): operation for operation in operations}
        self.regions = regions_of(graph, draft, program)
        self._defined_at: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        self._updated: dict[int, int] = {}  # by state: the region that writes its next version
        for i, region in enumerate(self.regions):
            for buffer in region.reads:
                self._reads.setdefault(buffer, []).append(i)
            for buffer in region.writes:
                self._defined_at[buffer] = i
                alias = draft.buffers[buffer].alias
                if alias is not None:
                    self._updated[alias] = i
        self._whole = frozenset((*program.entry, *program.exit))
        losses = (i for b, i in self._defined_at.items() if draft.buffers[b].value == graph.loss)
        self._middle = max(losses, default=len(self.regions))  # where the forward pass ends
        self._batched = [any(map(self._per_sample, (*region.reads, *region.writes))) for region in self.regions]
        self._by_rows: list[bool] = []  # regions that work row by row

    def groups(self, settled: bool) -> tuple[tuple[Group, ...], frozenset[int]]:
        """Return the groups, and the values that are discarded for groups of the backward pass to recompute.

        If `settled`, only regions that are divided already can be in a group.
        """
        self._by_rows = [
            batched and self._is_by_rows(region, settled)
            for batched, region in zip(self._batched, self.regions, strict=True)
        ]
        stretches = self._stretches()
        inside = {i: number for number, stretch in enumerate(stretches) for i in range(stretch.start, stretch.stop)}
        dividing = {inside[self._defined_at[b]] for b in self._large() if self._consumed_inside(b, inside)}
        discarded = {b for b in self._large() if self._can_discard(b, inside, dividing)}
        discarded -= {b for b in discarded if self._is_expensive(b, discarded)}
        # A value that a group cannot recompute from live values is kept.
        while True:
            wanted = [self._wanted(stretch, discarded) for stretch in stretches]
            kept = {
                b
                for stretch, values in zip(stretches, wanted, strict=True)
                for b in values
                if self._chain((b,), discarded, stretch) is None
            }
            if not kept:
                break
            discarded -= kept
        groups: list[Group] = []
        for number, stretch in enumerate(stretches):
            recomputed = self._chain(wanted[number], discarded, stretch)
            assert recomputed is not None, "each value can be recomputed, and so can all"
            if recomputed or number in dividing:
                groups.append(replace(stretch, recomputed=recomputed))
        return tuple(groups), frozenset(discarded)

    def _wanted(self, stretch: Group, discarded: Collection[int]) -> list[int]:
        """Return the discarded values of other groups that this group reads."""
        return [
            b
            for i in stretch.rows
            for b in self.regions[i].reads
            if b in discarded and not stretch.start <= self._defined_at[b] < stretch.stop
        ]

    def _per_sample(self, buffer: int) -> bool:
        return self._table.graph.values[self._draft.buffers[buffer].value or ""].per_sample

    def _is_by_rows(self, region: Region, settled: bool) -> bool:
        """Return whether a region with values of each row works row by row, or reduces over rows."""
        launches = self._program.launches[region.start : region.stop]
        if isinstance(launches[0].work, Copy):
            return False
        if not launches[0].operations:
            return self._per_sample(region.writes[0])
        operation = self._operations[launches[0].operations]
        kind = kind_of(operation)
        # An operation that neither reduces over rows nor works per sample needs all rows together.
        if not kind.divisible or not (kind.accumulates or all(map(self._per_sample, region.writes))):
            return False
        if not settled:
            return bool(self._table.fronts_in_micro_batches(operation, self._division.rows))
        if len(launches) != len(self._parts):
            return False
        return all(
            access.rows == part
            for launch, part in zip(launches, self._parts, strict=True)
            for access in launch.accesses
            if self._draft.buffers[access.buffer].value is not None and self._per_sample(access.buffer)
        )

    def _large(self) -> list[int]:
        """Return the buffers that may exist in micro-batches only, because of their size (`Division.large_bytes`)."""
        return [
            b
            for b in self._defined_at
            if self._draft.buffers[b].size_bytes > self._division.large_bytes
            and b not in self._whole
            and self._per_sample(b)
        ]

    def _last_near(self, buffer: int) -> int:
        """Return the last region that reads a value in the pass, forward or backward, that defines the value."""
        defined_at = self._defined_at[buffer]
        reads = self._reads.get(buffer, ())
        return max((i for i in reads if defined_at >= self._middle or i < self._middle), default=defined_at)

    def _stretches(self) -> list[Group]:
        """Return maximal stretches of regions that could be depth-first groups, in order."""
        joined = [False] * (len(self.regions) + 1)  # whether a region is joined with the one before
        for buffer in self._large():
            for i in range(self._defined_at[buffer] + 1, self._last_near(buffer) + 1):
                joined[i] = True
        stretches: list[Group] = []
        start = 0
        while start < len(self.regions):
            stop = start + 1
            while stop < len(self.regions) and joined[stop]:
                stop += 1
            stretches += self._split_at_barriers(start, stop)
            start = stop
        return stretches

    def _split_at_barriers(self, start: int, stop: int) -> list[Group]:
        """Return regions [start, stop) split at those that need all rows together."""
        stretches: list[Group] = []
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
                stretches.append(stretch)
            start = end
        return stretches

    def _stretch(self, start: int, stop: int) -> Group | None:
        """Return regions [start, stop) as a depth-first group; None if they cannot be one."""
        rows = [i for i in range(start, stop) if self._batched[i]]
        if not all(self._by_rows[i] for i in rows):
            return None
        summed = {b for i in rows for b in self.regions[i].writes if not self._per_sample(b)}
        if any(b in summed for i in rows for b in self.regions[i].reads):
            return None
        first: list[int] = []
        last: list[int] = []
        late = set(summed)
        for i in range(start, stop):
            if self._batched[i]:
                continue
            # Collectives keep their order, which is the same on all ranks.
            behind = self._is_collective(i) and any(map(self._is_collective, last))
            if not behind and late.isdisjoint(self.regions[i].reads) and not self._overwrites(i, rows):
                first.append(i)
            else:
                last.append(i)
                late.update(self.regions[i].writes)
        if any(b in late for i in (*rows, *first) for b in self.regions[i].reads):
            return None
        return Group(start, stop, tuple(first), tuple(rows), tuple(last))

    def _is_collective(self, region: int) -> bool:
        return is_collective(self._program.launches[self.regions[region].start])

    def _overwrites(self, region: int, rows: Sequence[int]) -> bool:
        """Return whether a region updates a state whose old version other regions of the group still need."""
        old = {self._draft.buffers[b].alias for b in self.regions[region].writes} - {None}
        return any(not old.isdisjoint(self.regions[i].reads) for i in rows)

    def _consumed_inside(self, buffer: int, inside: Mapping[int, int]) -> bool:
        defined_at, last = self._defined_at[buffer], self._last_near(buffer)
        return last > defined_at and defined_at in inside and inside.get(last) == inside[defined_at]

    def _can_discard(self, buffer: int, inside: Mapping[int, int], dividing: set[int]) -> bool:
        """Return whether a large value of the forward pass need not be kept: all later readers work by rows."""
        defined_at = self._defined_at[buffer]
        is_divided = inside.get(defined_at) in dividing and self._consumed_inside(buffer, inside)
        if defined_at >= self._middle or not is_divided:
            return False
        later = [i for i in self._reads.get(buffer, ()) if inside.get(i) != inside[defined_at]]
        return all(i in inside and self._by_rows[i] for i in later) and self.regions[defined_at].recomputable

    def _is_expensive(self, buffer: int, discarded: Collection[int]) -> bool:
        """Return whether recomputing a value takes longer than its bytes justify (`Division.max_recompute_us`).

        The time includes the recomputation of the discarded values from which the value is computed, except those that
        the backward pass also reads, because they are recomputed in any case.
        """
        total_us = 0.0
        pending = [buffer] if self._reads[buffer][-1] >= self._middle else []
        while pending:
            region = self.regions[self._defined_at[pending.pop()]]
            total_us += region.time_us
            pending += [b for b in region.reads if b in discarded and self._reads[b][-1] < self._middle]
        return total_us > self._division.max_recompute_us * self._draft.buffers[buffer].size_bytes

    def _chain(self, wanted: Sequence[int], discarded: Collection[int], stretch: Group) -> tuple[int, ...] | None:
        """Return the regions that recompute discarded values in a group from kept ones, in order.

        Return None if a state that they read is updated before.
        """
        regions: set[int] = set()
        pending = list(wanted)
        while pending:
            region = self._defined_at[pending.pop()]
            if region in regions:
                continue
            regions.add(region)
            for source in self.regions[region].reads:
                updated = self._updated.get(source, stretch.stop)
                if updated < stretch.stop and updated not in stretch.last:
                    return None
                if source in discarded:
                    pending.append(source)
        return tuple(sorted(regions))

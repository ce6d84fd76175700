"""Symbolic execution of one program of a plan: which value every byte holds, and which launches may touch it when.

The launches are executed in order. A launch that comes before another in the *happens-before* order (same stream, or a
chain of waits) has ended when the other starts. Any other two launches may run at the same time, so they must not
touch the same byte unless both only read it. Given that, every possible schedule gives the result of the launches in
order. The end of a program waits for every stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.plan.demand import Demand, Demands, Operand, is_canonical
from mbc.plan.group import title
from mbc.plan.kernels import KernelCheck, check_sums
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Plan, Program, Rows
from mbc.plan.occupancy import NOBODY, Occupancy, RowSet, Segment

_STREAM_INDEX = {stream: i for i, stream in enumerate(Stream)}
_REMEDY = "this plan would not compute its network: report it with the plan file, and compile again"


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of an access."""

    space: Space
    start: int
    stop: int

    def overlaps(self, other: _Span) -> bool:
        return self.space is other.space and self.start < other.stop and other.start < self.stop


def _overlaps(spans: Sequence[_Span]) -> Mapping[int, list[int]]:
    """Return the indices of the spans that share bytes with each span, by its index.

    The spans are sorted first, because some kernels have thousands of operands.
    """
    overlapping: dict[int, list[int]] = {}
    order = sorted(range(len(spans)), key=lambda i: (spans[i].space, spans[i].start))
    for place, i in enumerate(order):
        for after in range(place + 1, len(order)):
            j = order[after]
            if spans[j].space is not spans[i].space or spans[j].start >= spans[i].stop:
                break
            if spans[i].overlaps(spans[j]):
                overlapping.setdefault(i, []).append(j)
                overlapping.setdefault(j, []).append(i)
    return overlapping


@dataclass
class Execution:
    """The symbolic execution of one program."""

    plan: Plan
    program: Program
    title: str  # train | infer
    demands: Demands
    kernels: KernelCheck
    _spaces: Mapping[Space, Occupancy] = field(default_factory=lambda: {space: Occupancy() for space in Space})
    # By launch, then by stream: the latest launch that has ended when this launch has.
    _after: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _latest: list[int] = field(default_factory=lambda: [-1] * len(_STREAM_INDEX))
    _written: dict[int, RowSet] = field(default_factory=dict[int, RowSet])
    _executed: dict[str, RowSet] = field(default_factory=dict[str, RowSet])
    _before: tuple[int, ...] = NOBODY

    def run(self) -> None:
        """Execute all launches, then check that every operation ran and that the exit buffers hold their values.

        Raises:
            MbcError: MBC122 to MBC130 or MBC132 to MBC134 if the program does not compute its graph.
        """
        waits = self._sorted_waits()
        for buffer in self.program.entry:
            self._enter(buffer)
        for index, launch in enumerate(self.program.launches):
            stream = _STREAM_INDEX[launch.stream]
            before = NOBODY if self._latest[stream] < 0 else self._after[self._latest[stream]]
            for earlier in waits.get(index, ()):
                before = tuple(map(max, before, self._after[earlier]))
            self._before = before
            self._execute(index, launch)
            self._after.append((*before[:stream], index, *before[stream + 1 :]))
            self._latest[stream] = index
        for op in self.demands.launched():
            rows = self.demands.of((op.name,), self.title).rows
            done = self._executed.get(op.name, RowSet())
            if not done.is_exactly(rows.start, rows.stop):
                self._fail("MBC127", f"{self.title}: '{op.name}' runs for rows {done} of {rows.start}..{rows.stop}")
        self._leave()

    # Entry, exit and waits.

    def _sorted_waits(self) -> dict[int, list[int]]:
        launches = self.program.launches
        waits: dict[int, list[int]] = {}
        for earlier, later in self.program.waits:
            if not 0 <= earlier < later < len(launches):
                self._fail("MBC130", f"{self.title}: launch {later} waits for launch {earlier}, which is not before it")
            if launches[earlier].stream is launches[later].stream:
                self._fail("MBC130", f"{self.title}: launch {later} waits for launch {earlier} of its own stream")
            waits.setdefault(later, []).append(earlier)
        return waits

    def _enter(self, index: int) -> None:
        buffer = self.plan.buffers[index]
        assert buffer.value is not None  # checked with the interface of the programs
        span = self._span(Access(index, buffer.rows, Mode.WRITE))
        occupancy = self._spaces[span.space]
        for other in occupancy.within(span.start, span.stop):
            self._fail(
                "MBC122", f"{self.title}: {self._name(index)} and {self._name(other.buffer)} share bytes at the entry"
            )
        occupancy.replace(Segment(span.start, span.stop, index, -1, 0, None))
        self._written[index] = RowSet().united(buffer.rows)

    def _leave(self) -> None:
        for index in self.program.exit:
            span = self._span(Access(index, self.plan.buffers[index].rows, Mode.READ))
            place = f"at the end of {self.title}"
            for segment in self._segments(index, span, place, "MBC129"):
                self._check_sum(segment, place)

    # One launch.

    def _execute(self, index: int, launch: Launch) -> None:
        place = f"launch {index} of {self.title}" + (f" ({title(launch.operations)})" if launch.operations else "")
        for access in launch.accesses:
            rows = self.plan.buffers[access.buffer].rows
            if not rows.start <= access.rows.start < access.rows.stop <= rows.stop:
                self._fail(
                    "MBC123",
                    f"{place}: rows {access.rows.start}..{access.rows.stop} are not in {self._name(access.buffer)}",
                )
            if self.plan.buffers[access.buffer].space is not Space.ARENA and isinstance(launch.work, Kernel):
                self._fail("MBC123", f"{place}: a kernel touches {self._name(access.buffer)} outside the arena")
        if launch.operations:
            self._execute_operations(index, launch, place)
        else:
            self._execute_transfer(index, launch, place)

    def _execute_operations(self, index: int, launch: Launch, place: str) -> None:
        if isinstance(launch.work, Copy):
            self._fail("MBC123", f"{place}: a copy runs no operation")
        demand = self.demands.of(launch.operations, place)
        reads, writes, workspace = self._assign(demand, launch, place)
        rows = self._rows(demand, reads, writes, place)
        spans = [self._span(access) for _, access in reads]
        for (operand, access), span in zip(reads, spans, strict=True):
            self._check_operand(operand, access, place)
            self._read(index, launch.stream, access, span, place)
        check_sums([access for operand, access in writes if operand.sums], place)
        operands = [access for _, access in (*reads, *writes)]
        overlapping = _overlaps([*spans, *(self._span(access) for _, access in writes)])
        # A value that stays inside a fused kernel is an output of the demand, but no access writes it.
        outputs = {operand.name: position for position, operand in enumerate(demand.outputs)}
        for at, (operand, access) in enumerate(writes, len(reads)):
            self._check_operand(operand, access, place)
            allowed = self._check_alias(demand, outputs[operand.name], access, reads, place)
            self._check_disjoint(at, allowed, operands, len(reads), overlapping.get(at, ()), place)
            if access.mode is Mode.ACCUMULATE:
                self._accumulate(index, launch.stream, access, rows, place)
            else:
                self._write(index, launch.stream, access, rows if operand.sums else None, place)
        if workspace is not None:
            span = self._span(workspace)
            if any(span.overlaps(self._span(access)) for access in operands):
                self._fail("MBC132", f"{place}: its workspace shares bytes with one of its operands")
            self._overwrite(index, launch.stream, workspace, None, place)
        self.kernels.check(launch, self.demands.operations, place)
        self._count(launch, demand, rows, place)

    def _execute_transfer(self, index: int, launch: Launch, place: str) -> None:
        """Execute a conversion or a copy: it turns one buffer of a value into another buffer of that value."""
        if [access.mode for access in launch.accesses] != [Mode.READ, Mode.WRITE]:
            self._fail("MBC123", f"{place}: a conversion or copy reads one buffer and writes one buffer")
        source, target = launch.accesses
        old, new = self.plan.buffers[source.buffer], self.plan.buffers[target.buffer]
        roots = (new.value, self.demands.root(new.value or ""))
        same_value = old.value is not None and old.value in roots
        if not same_value or source.rows != target.rows:
            self._fail("MBC123", f"{place}: it must copy the same rows of one value from one buffer to another")
        if old.value != new.value and not is_canonical(old.layout, self.plan.graph.values[old.value or ""].type.shape):
            self._fail("MBC123", f"{place}: it reads a view of '{old.value}', which is in {old.layout}")
        if isinstance(launch.work, Copy):
            if (old.layout, old.dtype) != (new.layout, new.dtype):
                self._fail("MBC123", f"{place}: a copy changes neither layout nor type")
        elif (launch.work.provider, launch.work.name) != ("mbc", "convert"):
            self._fail("MBC123", f"{place}: '{launch.work.provider}/{launch.work.name}' runs no operation")
        else:
            self.kernels.check(launch, self.demands.operations, place)
        if new.alias is not None and not self._updates_state_outside(launch, new):
            self._fail("MBC128", f"{place}: a conversion or copy cannot work in place")
        span = self._span(source)
        if span.overlaps(self._span(target)):
            self._fail("MBC132", f"{place}: its source and its target share bytes")
        self._read(index, launch.stream, source, span, place)
        self._write(index, launch.stream, target, None, place)

    def _updates_state_outside(self, launch: Launch, new: Buffer) -> bool:
        """Return whether a copy writes the next version of a state outside the arena over the version before it."""
        if new.alias is None or not isinstance(launch.work, Copy) or new.space is Space.ARENA:
            return False
        state = self.plan.buffers[new.alias]
        return new.alias in self.program.entry and (state.value, new.value) in self.plan.graph.updates

    def _assign(
        self, demand: Demand, launch: Launch, place: str
    ) -> tuple[list[tuple[Operand, Access]], list[tuple[Operand, Access]], Access | None]:
        """Return the operands with their accesses: inputs in order, outputs in order, and the workspace."""
        accesses = list(launch.accesses)
        workspace = None
        if accesses and self.plan.buffers[accesses[-1].buffer].value is None:
            workspace = accesses.pop()
            if workspace.mode is not Mode.WRITE or workspace.rows != self.plan.buffers[workspace.buffer].rows:
                self._fail("MBC123", f"{place}: its workspace must be written as a whole")
        reads, writes = accesses[: len(demand.inputs)], accesses[len(demand.inputs) :]
        outputs = demand.outputs
        if demand.fused:  # a value inside the fused kernel has no access
            present = {self.plan.buffers[access.buffer].value for access in writes}
            outputs = tuple(operand for operand in outputs if operand.root in present)
        if len(reads) != len(demand.inputs) or len(writes) != len(outputs):
            expected = f"{len(demand.inputs)} inputs and {len(outputs)} outputs"
            self._fail("MBC123", f"{place}: it has {len(accesses)} accesses beside workspace instead of {expected}")
        return list(zip(demand.inputs, reads, strict=True)), list(zip(outputs, writes, strict=True)), workspace

    def _rows(
        self, demand: Demand, reads: list[tuple[Operand, Access]], writes: list[tuple[Operand, Access]], place: str
    ) -> Rows:
        """Return the rows that the launch runs over, which are equal in every per-sample access."""
        row_ranges = {access.rows for operand, access in (*reads, *writes) if operand.per_sample} or {demand.rows}
        if len(row_ranges) > 1:
            self._fail("MBC123", f"{place}: its operands have different rows")
        rows = row_ranges.pop()
        if rows != demand.rows and not (
            demand.divisible and all(operand.per_sample or operand.sums for operand, _ in writes)
        ):
            self._fail("MBC123", f"{place}: it cannot be divided, but runs over rows {rows.start}..{rows.stop} only")
        for operand, access in (*reads, *writes):
            if not operand.per_sample and access.rows != Rows(0, 1):
                self._fail("MBC123", f"{place}: '{operand.name}' is not per sample, so its rows must be 0..1")
        for _, access in reads:
            if access.mode is not Mode.READ:
                self._fail("MBC123", f"{place}: it may only read its input in {self._name(access.buffer)}")
        for operand, access in writes:
            if access.mode is Mode.READ or (access.mode is Mode.ACCUMULATE and not operand.sums):
                self._fail("MBC123", f"{place}: the mode of its output '{operand.name}' is '{access.mode}'")
        return rows

    def _check_operand(self, operand: Operand, access: Access, place: str) -> None:
        buffer = self.plan.buffers[access.buffer]
        if buffer.value not in (operand.root, operand.name):
            self._fail("MBC123", f"{place}: it needs '{operand.name}', but is given {self._name(access.buffer)}")
        through_view = buffer.value != operand.name
        if buffer.dtype is not self.plan.graph.values[operand.root].type.dtype:
            self._fail(
                "MBC123", f"{place}: it needs '{operand.name}' in {operand.dtype}, but the buffer is in {buffer.dtype}"
            )
        if through_view and not is_canonical(buffer.layout, self.plan.graph.values[operand.root].type.shape):
            self._fail("MBC123", f"{place}: it reads a view of '{operand.root}', which is in {buffer.layout}")

    def _check_alias(
        self, demand: Demand, position: int, access: Access, reads: list[tuple[Operand, Access]], place: str
    ) -> int | None:
        """Return the position of the input that this output overwrites; None if it overwrites none."""
        buffer = self.plan.buffers[access.buffer]
        for source in demand.updates.get(position, ()):
            if buffer.alias != reads[source][1].buffer:
                self._fail("MBC128", f"{place}: the next version of '{reads[source][0].name}' must overwrite it")
        if buffer.alias is None:
            return None
        sources = [s for s in demand.in_place.get(position, ()) if reads[s][1].buffer == buffer.alias]
        if not sources:
            old, new = self._name(buffer.alias), self._name(access.buffer)
            self._fail("MBC128", f"{place}: it may not write {new} in place on {old}")
        return sources[0]

    def _check_disjoint(
        self, at: int, allowed: int | None, operands: list[Access], inputs: int, overlapping: Sequence[int], place: str
    ) -> None:
        """Check that output `at` shares bytes with no earlier operand except the input that it may overwrite.

        Args:
            at: Position of the output in `operands`.
            allowed: Position of the input that the output may overwrite, if any.
            operands: Accesses of inputs, then outputs.
            inputs: Number of inputs.
            overlapping: Positions of the operands that share bytes with the output.
            place: The launch, as a message names it.
        """
        for other in sorted(overlapping):
            if other < inputs and other != allowed:
                self._fail(
                    "MBC132",
                    f"{place}: it writes {self._name(operands[at].buffer)} over its input "
                    f"{self._name(operands[other].buffer)}",
                )
            if inputs <= other < at:
                self._fail("MBC132", f"{place}: two of its outputs share bytes")

    def _count(self, launch: Launch, demand: Demand, rows: Rows, place: str) -> None:
        for name in launch.operations:
            done = self._executed.get(name, RowSet())
            if done.joined(rows) is None and self.demands.updates_state(name):
                self._fail("MBC127", f"{place}: '{name}' updates a state a second time")
            own = demand.rows if not demand.fused else self.demands.of((name,), place).rows
            self._executed[name] = done.united(rows if own == demand.rows else own)

    # Bytes.

    def _read(self, index: int, stream: Stream, access: Access, span: _Span, place: str) -> None:
        for segment in self._segments(access.buffer, span, place, "MBC124"):
            self._check_over(segment.writer, segment.writer_stream, place, "reads {} from", access.buffer)
            self._check_sum(segment, place)
            at = _STREAM_INDEX[stream]
            segment.readers = (*segment.readers[:at], index, *segment.readers[at + 1 :])

    def _write(self, index: int, stream: Stream, access: Access, summed: Rows | None, place: str) -> None:
        joined = self._written.get(access.buffer, RowSet()).joined(access.rows)
        if joined is None:
            self._fail(
                "MBC127",
                f"{place}: rows {access.rows.start}..{access.rows.stop} of {self._name(access.buffer)} "
                "are written a second time",
            )
        self._written[access.buffer] = joined
        self._overwrite(index, stream, access, None if summed is None else RowSet().united(summed), place)

    def _accumulate(self, index: int, stream: Stream, access: Access, rows: Rows, place: str) -> None:
        summed: RowSet | None = None
        for segment in self._segments(access.buffer, self._span(access), place, "MBC126"):
            summed = segment.summed.joined(rows) if segment.summed is not None else None
            if summed is None:
                self._fail(
                    "MBC126",
                    f"{place}: rows {rows.start}..{rows.stop} are in the sum of {self._name(access.buffer)} already "
                    f"(it holds {segment.summed})",
                )
        self._overwrite(index, stream, access, summed, place)

    def _overwrite(self, index: int, stream: Stream, access: Access, summed: RowSet | None, place: str) -> None:
        span = self._span(access)
        occupancy = self._spaces[span.space]
        for old in occupancy.within(span.start, span.stop):
            self._check_over(old.writer, old.writer_stream, place, "overwrites {} of", old.buffer)
            for at, reader in enumerate(old.readers):
                if reader != index:
                    self._check_over(reader, at, place, "overwrites {}, which is read by", old.buffer)
        at = _STREAM_INDEX[stream]
        occupancy.replace(Segment(span.start, span.stop, access.buffer, index, at, summed))

    def _segments(self, buffer: int, span: _Span, place: str, code: str) -> list[Segment]:
        """Return the segments of the bytes of `span`, which must all have been written last through `buffer`."""
        segments = self._spaces[span.space].within(span.start, span.stop)
        position = span.start
        for segment in segments:
            if segment.start != position:
                break
            if segment.buffer != buffer:
                holder = self._name(segment.buffer)
                writer = f"written by launch {segment.writer}" if segment.writer >= 0 else "from before the start"
                self._fail(code, f"{place}: {self._name(buffer)} is needed, but its bytes hold {holder}, {writer}")
            position = segment.stop
        if position != span.stop:
            self._fail(code, f"{place}: {self._name(buffer)} is needed, but some of its bytes were never written")
        return segments

    def _check_sum(self, segment: Segment, place: str) -> None:
        if segment.summed is not None and not segment.summed.is_exactly(0, self.plan.graph.batch):
            self._fail(
                "MBC126",
                f"{place}: {self._name(segment.buffer)} is needed, but its sum holds rows {segment.summed} "
                f"of 0..{self.plan.graph.batch}",
            )

    def _check_over(self, other: int, stream: int, place: str, what: str, buffer: int) -> None:
        """Check that launch `other` of a stream has ended; `what` has a placeholder for the name of the buffer."""
        if self._before[stream] < other:
            self._fail(
                "MBC125", f"{place}: it {what.format(self._name(buffer))} launch {other}, which it does not wait for"
            )

    def _span(self, access: Access) -> _Span:
        buffer = self.plan.buffers[access.buffer]
        row_bytes = buffer.size_bytes // buffer.rows.count
        start = self.plan.offsets[access.buffer] + (access.rows.start - buffer.rows.start) * row_bytes
        return _Span(buffer.space, start, start + access.rows.count * row_bytes)

    def _name(self, index: int) -> str:
        return buffer_name(index, self.plan.buffers[index])

    def _fail(self, code: str, message: str) -> NoReturn:
        raise MbcError(code, message, _REMEDY)


def buffer_name(index: int, buffer: Buffer) -> str:
    """Return the name of a buffer for messages."""
    what = f"of '{buffer.value}'" if buffer.value is not None else "(workspace)"
    return f"buffer {index} {what}"

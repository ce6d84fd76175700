"""Write the chosen kernels down as launches over buffers, in the order of the graph.

Conversions are launched just before their first reader. Outputs take over the bytes of an input that nobody reads
afterwards, where the operation allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates import CandidateTable
from mbc.optimize.choose import Choices
from mbc.optimize.menus import adding_us
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Program, Rows, Stream

WHOLE = Rows(0, 1)


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without addresses. `persistent`: buffers of the states, shared by the two programs."""

    buffers: tuple[Buffer, ...]
    persistent: tuple[int, ...]
    train: Program
    infer: Program


def order(table: CandidateTable, choices: Choices) -> Draft:
    """Both programs over one list of buffers."""
    graph = table.graph
    buffers: list[Buffer] = []
    states: dict[str, int] = {}
    for state in graph.states:
        type_ = graph.values[state.value].type
        states[state.value] = len(buffers)
        buffers.append(Buffer(state.value, WHOLE, choices.states[state.value], type_.dtype, type_.size_bytes))
    persistent = tuple(states.values())
    finals = dict(graph.updates)
    train = _Writer(table, choices, buffers, dict(states))
    train.run(choices.train, graph.inputs)
    results = (*graph.outputs, graph.loss, *graph.metrics)
    train_program = train.finish(persistent, tuple(finals.get(name, name) for name in states) + results)
    infer = _Writer(table, choices, buffers, dict(states))
    infer.run(choices.infer, graph.infer_inputs)
    infer_program = infer.finish(persistent, (*states, *graph.infer_outputs))
    return Draft(tuple(buffers), persistent, train_program, infer_program)


@dataclass
class _Writer:
    """Writes one program. `buffers` is shared with the other one; a buffer that is not persistent belongs to one."""

    table: CandidateTable
    choices: Choices
    buffers: list[Buffer]
    states: dict[str, int]
    launches: list[Launch] = field(default_factory=list[Launch])
    ran: list[Operation | None] = field(default_factory=list[Operation | None])  # by each launch, if any
    # (value, layout) -> buffer; the first layout of a value is the one its producer wrote.
    where: dict[tuple[str, Layout], int] = field(default_factory=dict[tuple[str, Layout], int])
    home: dict[str, Layout] = field(default_factory=dict[str, Layout])
    viewed: dict[str, str] = field(default_factory=dict[str, str])
    entry: list[int] = field(default_factory=list[int])

    def run(self, operations: tuple[Operation, ...], inputs: tuple[str, ...]) -> None:
        for name, buffer in self.states.items():
            self._set(name, self.buffers[buffer].layout, buffer)
        for name in inputs:
            self.entry.append(self._new(name, Layout.CHANNELS_FIRST))
        for operation in operations:
            if kind_of(operation).view:
                self.viewed[operation.outputs[0]] = operation.inputs[0]
                self.home[operation.outputs[0]] = Layout.CHANNELS_FIRST
            else:
                self._launch(operation)

    def finish(self, persistent: tuple[int, ...], exits: tuple[str, ...]) -> Program:
        exit_buffers = tuple(dict.fromkeys(self._at(name, self.home[name]) for name in exits))
        entry = (*persistent, *self.entry)
        self._take_over(frozenset(entry) | frozenset(exit_buffers))
        return Program(tuple(self.launches), (), entry, exit_buffers)

    def _new(self, name: str, layout: Layout, alias: int | None = None) -> int:
        value = self.table.graph.values[name]
        rows = Rows(0, self.table.graph.batch) if value.per_sample else WHOLE
        self.buffers.append(Buffer(name, rows, layout, value.type.dtype, value.type.size_bytes, alias=alias))
        self._set(name, layout, len(self.buffers) - 1)
        return len(self.buffers) - 1

    def _set(self, name: str, layout: Layout, buffer: int) -> None:
        self.where[name, layout] = buffer
        self.home.setdefault(name, layout)

    def _at(self, name: str, layout: Layout) -> int:
        """The buffer of a value in a layout, converting it there if it is not yet."""
        known = self.where.get((name, layout))
        if known is not None:
            return known
        if name in self.viewed and layout is Layout.CHANNELS_FIRST:
            return self._at(self.viewed[name], layout)
        source = self._at(name, self.home[name])
        target = self._new(name, layout)
        rows = self.buffers[target].rows
        type_ = self.table.graph.values[name].type
        time_us, measured = self.table.conversion_us(type_, layout), self.table.is_conversion_measured(type_)
        self.launches.append(
            Launch(
                Kernel("mbc", "convert", (), time_us, measured),
                (),
                Stream.COMPUTE,
                (Access(source, rows, Mode.READ), Access(target, rows, Mode.WRITE)),
            )
        )
        self.ran.append(None)
        return target

    def _launch(self, operation: Operation) -> None:
        choice = self.choices.operations[operation.name]
        kind = kind_of(operation)
        count = len(operation.inputs)
        inputs = [self._at(name, layout) for name, layout in zip(operation.inputs, choice.layouts, strict=False)]
        must_share = dict(kind.updates)
        outputs = [
            self._new(name, layout, inputs[must_share[i]] if i in must_share else None)
            for i, (name, layout) in enumerate(zip(operation.outputs, choice.layouts[count:], strict=True))
        ]
        start = 0
        for piece in choice.slices:
            candidate, part = piece.candidate, Rows(start, start + piece.rows)
            accesses = [self._access(b, part, Mode.READ) for b in inputs]
            accesses += [self._access(b, part, Mode.WRITE, adds=start > 0) for b in outputs]
            if candidate.workspace_bytes:
                self.buffers.append(Buffer(None, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, candidate.workspace_bytes))
                accesses.append(Access(len(self.buffers) - 1, WHOLE, Mode.WRITE))
            adds = start > 0 and kind.accumulates
            time_us = adding_us(candidate) if adds else candidate.time_us
            kernel = Kernel(candidate.provider, candidate.name, candidate.settings, time_us, candidate.measured)
            self.launches.append(Launch(kernel, names_of(operation), Stream.COMPUTE, tuple(accesses)))
            self.ran.append(operation)
            start = part.stop

    def _access(self, buffer: int, part: Rows, mode: Mode, adds: bool = False) -> Access:
        value = self.table.graph.values[self.buffers[buffer].value or ""]
        if value.per_sample:
            return Access(buffer, part, mode)
        return Access(buffer, WHOLE, Mode.ACCUMULATE if adds else mode)

    def _take_over(self, pinned: frozenset[int]) -> None:
        """Let outputs share the bytes of inputs that die, where the operation works in place."""
        last: dict[int, int] = {}
        for i, launch in enumerate(self.launches):
            for access in launch.accesses:
                last[access.buffer] = i
        last_of_operation = {operation.name: i for i, operation in enumerate(self.ran) if operation is not None}
        taken: set[int] = set()
        for launch, operation in zip(self.launches, self.ran, strict=True):
            if operation is None:
                continue
            count = len(operation.inputs)
            for output, source in kind_of(operation).in_place:
                if source >= count or output >= len(operation.outputs):
                    continue
                new = launch.accesses[count + output].buffer
                old = launch.accesses[source].buffer
                read_once = [a.buffer for a in launch.accesses].count(old) == 1
                dies_here = last[old] == last_of_operation[operation.name]
                if read_once and dies_here and old not in pinned | taken and self._same_bytes(old, new):
                    taken.add(old)
                    self.buffers[new] = replace(self.buffers[new], alias=old)

    def _same_bytes(self, old: int, new: int) -> bool:
        a, b = self.buffers[old], self.buffers[new]
        return b.alias is None and (a.size_bytes, a.layout, a.dtype, a.rows) == (
            b.size_bytes,
            b.layout,
            b.dtype,
            b.rows,
        )

"""The chosen kernels as launches over buffers, in the order of the graph.

States are updated as soon as that is possible, and conversions launched just before their first reader. Workspaces are
numbered after all other buffers, so that the numbers of values do not depend on how operations are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mbc.hardware.streams import Stream
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout
from mbc.ops.fused import kind_of, names_of
from mbc.optimize.candidates.pareto import MicroBatch, accumulating_us
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.selection.select import Choices
from mbc.plan.model import Access, Buffer, Kernel, Launch, Mode, Program, Rows

WHOLE = Rows(0, 1)


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without addresses. `persistent` are the buffers of the states, which the two programs share."""

    buffers: tuple[Buffer, ...]
    persistent: tuple[int, ...]
    train: Program
    infer: Program


def emit_launches(table: CandidateTable, choices: Choices) -> Draft:
    """Return both programs over one list of buffers."""
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
    train.run(updates_early(choices.train), graph.inputs)
    results = (*graph.outputs, graph.loss, *graph.metrics)
    train_program = train.finish(persistent, tuple(finals.get(name, name) for name in states) + results)
    infer = _Writer(table, choices, buffers, dict(states))
    infer.run(choices.infer, graph.infer_inputs)
    infer_program = infer.finish(persistent, (*states, *graph.infer_outputs))
    workspaces_last = sorted(range(len(buffers)), key=lambda i: buffers[i].value is None)
    return renumbered(Draft(tuple(buffers), persistent, train_program, infer_program), workspaces_last)


def updates_early(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations with every update of a state as early as possible.

    An update runs once its operands have values and the version that it replaces has no later reader, updates of other
    states included. Gradients are then freed before the end of the step.
    """
    defined_at: dict[str, int] = {}
    read: dict[str, int] = {}
    for i, operation in enumerate(operations):
        if not kind_of(operation).updates:
            read |= dict.fromkeys(operation.inputs, i)
    ready: list[int] = []
    for i, operation in enumerate(operations):
        at, updates = i, kind_of(operation).updates
        if updates:
            updated = {operation.inputs[k] for _, k in updates if k < len(operation.inputs)}
            at = max([defined_at.get(name, -1) for name in operation.inputs] + [read.get(name, -1) for name in updated])
            read |= {name: max(read.get(name, -1), at) for name in operation.inputs if name not in updated}
        defined_at |= dict.fromkeys(operation.outputs, at)
        ready.append(at)
    return tuple(operations[i] for i in sorted(range(len(operations)), key=lambda i: (ready[i], i)))


def renumbered(draft: Draft, numbers: Sequence[int]) -> Draft:
    """Return the draft with the buffers in another order: buffer `numbers[i]` becomes the i-th."""
    new = {old: i for i, old in enumerate(numbers)}

    def renamed(launch: Launch) -> Launch:
        if all(new[a.buffer] == a.buffer for a in launch.accesses):
            return launch
        accesses = tuple([Access(new[a.buffer], a.rows, a.mode) for a in launch.accesses])
        return Launch(launch.work, launch.operations, launch.stream, accesses)

    def of(program: Program) -> Program:
        entry, exit_ = (tuple(new[b] for b in numbers_) for numbers_ in (program.entry, program.exit))
        return Program(tuple(map(renamed, program.launches)), (), entry, exit_)

    buffers = [draft.buffers[i] for i in numbers]
    buffers = [b if b.alias is None else replace(b, alias=new[b.alias]) for b in buffers]
    persistent = tuple(new[b] for b in draft.persistent)
    return Draft(tuple(buffers), persistent, of(draft.train), of(draft.infer))


@dataclass
class _Writer:
    """Writes one program. Both programs share `buffers`, but only persistent buffers are used by both."""

    table: CandidateTable
    choices: Choices
    buffers: list[Buffer]
    states: dict[str, int]
    launches: list[Launch] = field(default_factory=list[Launch])
    # (value, layout) -> buffer; the first layout of a value is the one its producer wrote.
    where: dict[tuple[str, Layout], int] = field(default_factory=dict[tuple[str, Layout], int])
    written: dict[str, Layout] = field(default_factory=dict[str, Layout])
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
                self.written[operation.outputs[0]] = Layout.CHANNELS_FIRST
            else:
                self._launch(operation)

    def finish(self, persistent: tuple[int, ...], exits: tuple[str, ...]) -> Program:
        exit_buffers = tuple(dict.fromkeys(self._at(name, self.written[name]) for name in exits))
        return Program(tuple(self.launches), (), (*persistent, *self.entry), exit_buffers)

    def _new(self, name: str, layout: Layout, alias: int | None = None) -> int:
        value = self.table.graph.values[name]
        rows = Rows(0, self.table.graph.batch) if value.per_sample else WHOLE
        self.buffers.append(Buffer(name, rows, layout, value.type.dtype, value.type.size_bytes, alias=alias))
        self._set(name, layout, len(self.buffers) - 1)
        return len(self.buffers) - 1

    def _set(self, name: str, layout: Layout, buffer: int) -> None:
        self.where[name, layout] = buffer
        self.written.setdefault(name, layout)

    def _at(self, name: str, layout: Layout) -> int:
        """Return the buffer of a value in a layout, with a conversion if there is none yet."""
        existing = self.where.get((name, layout))
        if existing is not None:
            return existing
        if name in self.viewed and layout is Layout.CHANNELS_FIRST:
            return self._at(self.viewed[name], layout)
        source = self._at(name, self.written[name])
        target = self._new(name, layout)
        self.launches.append(conversion(self.table, self.buffers, source, target))
        return target

    def _launch(self, operation: Operation) -> None:
        choice = self.choices.operations[operation.name]
        kind = kind_of(operation)
        count = len(operation.inputs)
        inputs = [self._at(name, layout) for name, layout in zip(operation.inputs, choice.layouts, strict=False)]
        aliased = dict(kind.updates)
        outputs = [
            self._new(name, layout, inputs[aliased[i]] if i in aliased else None)
            for i, (name, layout) in enumerate(zip(operation.outputs, choice.layouts[count:], strict=True))
        ]
        self.launches += launches_of(self.table, operation, choice.micro_batches, (*inputs, *outputs), self.buffers)


def conversion(table: CandidateTable, buffers: Sequence[Buffer], source: int, target: int) -> Launch:
    """Return the launch that changes the layout from one buffer of a whole value to another."""
    buffer = buffers[target]
    type_ = table.graph.values[buffer.value or ""].type
    time_us, measured = table.conversion_us(type_, buffer.layout), table.is_conversion_measured(type_)
    accesses = Access(source, buffer.rows, Mode.READ), Access(target, buffer.rows, Mode.WRITE)
    return Launch(Kernel("mbc", "convert", (), time_us, measured), (), Stream.COMPUTE, accesses)


def launches_of(
    table: CandidateTable,
    operation: Operation,
    micro_batches: Sequence[MicroBatch],
    operands: Sequence[int],
    buffers: list[Buffer],
) -> list[Launch]:
    """Return the kernel calls of an operation over its operands' buffers, micro-batches in order.

    Workspaces are added to `buffers`, one for each call that needs one.
    """
    count = len(operation.inputs)
    per_sample = {b for b in operands if table.graph.values[buffers[b].value or ""].per_sample}

    def access(buffer: int, part: Rows, mode: Mode, adds: bool = False) -> Access:
        if buffer in per_sample:
            return Access(buffer, part, mode)
        return Access(buffer, WHOLE, Mode.ACCUMULATE if adds else mode)

    launches: list[Launch] = []
    start = 0
    for micro_batch in micro_batches:
        candidate, part = micro_batch.candidate, Rows(start, start + micro_batch.rows)
        accesses = [access(b, part, Mode.READ) for b in operands[:count]]
        accesses += [access(b, part, Mode.WRITE, adds=start > 0) for b in operands[count:]]
        if candidate.workspace_bytes:
            buffers.append(Buffer(None, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, candidate.workspace_bytes))
            accesses.append(Access(len(buffers) - 1, WHOLE, Mode.WRITE))
        adds = start > 0 and kind_of(operation).accumulates
        time_us = accumulating_us(candidate) if adds else candidate.time_us
        kernel = Kernel(candidate.provider, candidate.name, candidate.settings, time_us, candidate.measured)
        launches.append(Launch(kernel, names_of(operation), Stream.COMPUTE, tuple(accesses)))
        start = part.stop
    return launches

"""The two halves of a training program: before and after another program computes the loss.

A step computes outputs, and then, from the gradient of a loss with respect to them, the gradients of the parameters.
It keeps these gradients (`train { optimizer = none }`) or updates the parameters with them, if its own loss is a sum of
inner products of outputs with gradients that are given. The program is cut where it first reads an input on which no
output depends: a target, or the gradient that is given to `inner_product`. Everything that the second half needs stays
in the arena. The plan does not store the halves, because they follow from the training program. The verifier proves
that outputs are complete at the cut, and without an optimizer running statistics as well.

A step that accumulates the gradients of several mini-batches runs the first half for each of them. The second half of a
mini-batch before the last one lacks the launches that need the sums (`mbc.plan.accumulation`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.hardware.streams import Space
from mbc.ir.graph import NO_OPTIMIZER, Role, TrainingGraph
from mbc.ops import KINDS
from mbc.plan.accumulation import ACCUMULATE, accumulating
from mbc.plan.demand import whole_rows
from mbc.plan.live import rounded
from mbc.plan.model import Launch, Mode, Plan, Program
from mbc.plan.occupancy import RowSet

FORWARD, BACKWARD, ADD = "forward", "backward", "add"  # names of the programs
Region = tuple[Space, int, int]  # space, first byte, byte after the last


@dataclass(frozen=True, slots=True)
class Cut:
    """The two halves of a training program.

    Attributes:
        forward: Computes the outputs and, without an optimizer, changes the running statistics.
        backward: Computes the gradients of the parameters; an optimizer changes all states here.
        add: The second half for a mini-batch before the last one of its step; None if a step has one mini-batch.
        outputs: For each output of the network, the buffer that holds it at the cut.
        kept: All bytes outside of states that the forward half leaves for the backward half.
        read_again: Parameters and statistics that the backward half reads in their own places.
    """

    forward: Program
    backward: Program
    add: Program | None
    outputs: tuple[int, ...]
    kept: tuple[Region, ...]
    read_again: frozenset[str]


def given_at_cut(graph: TrainingGraph) -> tuple[str, ...]:
    """Return the inputs on which no output depends, which are given at the cut."""
    return tuple(name for name in graph.inputs if name not in graph.infer_inputs)


def cut(plan: Plan) -> Cut | None:
    """Return the halves of the training program; None for a step that computes its own loss and has an optimizer.

    Raises:
        MbcError: MBC129 if an output or a running statistic is not complete at the cut.
    """
    graph, program = plan.graph, plan.train
    if not is_cut(graph):
        return None
    late = given_at_cut(graph)
    given = {index for index in program.entry if plan.buffers[index].value in late}
    reads = (i for i, launch in enumerate(program.launches) if any(a.buffer in given for a in launch.accesses))
    at = next(reads, len(program.launches))
    halves = _Halves(plan, at)
    outputs = tuple(halves.complete(root_of(graph, name)) for name in graph.outputs)
    for state, after in graph.updates:
        if graph.optimizer.kind == NO_OPTIMIZER and graph.values[state].role is Role.STATISTIC:
            halves.complete(after)
    alive, part = halves.alive, accumulating(plan, at)
    return Cut(
        Program(program.launches[:at], tuple(w for w in program.waits if w[1] < at), program.entry, alive),
        _second(program, at, alive),
        None if part is None else _second(part, at, alive),
        outputs,
        halves.kept(late),
        halves.read_again(),
    )


def parts_of(plan: Plan) -> dict[str, Program]:
    """Return the parts of the training program that run alone, by name.

    A program that is cut has two halves, and ADD if its steps accumulate. Another program has ACCUMULATE if its steps
    accumulate, and no part otherwise.
    """
    halves = cut(plan)
    if halves is None:
        parts = {ACCUMULATE: accumulating(plan)}
    else:
        parts = {FORWARD: halves.forward, BACKWARD: halves.backward, ADD: halves.add}
    return {name: part for name, part in parts.items() if part is not None}


def parts_before_last(graph: TrainingGraph) -> tuple[str, ...]:
    """Return the names of the parts that run for each mini-batch but the last one of its step, in order."""
    return (FORWARD, ADD) if is_cut(graph) else (ACCUMULATE,)


def is_cut(graph: TrainingGraph) -> bool:
    """Return whether the training program has halves.

    It has them without an optimizer, and if the loss is a sum of inner products of outputs with inputs that are given
    at the cut.
    """
    if graph.optimizer.kind == NO_OPTIMIZER:
        return True
    makers = {value: op for op in graph.train for value in op.outputs}
    total = makers.get(graph.loss)
    if total is not None and total.kind == ACCUMULATE:
        total = makers[total.inputs[1]]
    if total is None or total.kind not in ("weighted_sum", "row_reduce_dot"):
        return False
    terms = [makers[value] for value in total.inputs] if total.kind == "weighted_sum" else [total]
    given = set(given_at_cut(graph))
    for op in graph.train:  # inputs in the working precision
        if given.issuperset(op.inputs):
            given.update(op.outputs)
    return all(op.kind == "row_reduce_dot" and op.inputs[1] in given for op in terms)


def _second(program: Program, at: int, entry: tuple[int, ...]) -> Program:
    """Return the launches of a program from launch `at` on, before which the buffers of `entry` are alive."""
    waits = tuple((a - at, b - at) for a, b in program.waits if a >= at)
    return Program(program.launches[at:], waits, entry, program.exit)


def root_of(graph: TrainingGraph, name: str) -> str:
    """Return the value whose buffer holds a value of the training program: the viewed value for a view."""
    views = {op.outputs[0]: op.inputs[0] for op in graph.train if KINDS[op.kind].view}
    while name in views:
        name = views[name]
    return name


class _Halves:
    """The launches of a program before and from launch `at`."""

    def __init__(self, plan: Plan, at: int) -> None:
        self._plan = plan
        program = plan.train
        halves = program.launches[:at], program.launches[at:]
        self._read = {a.buffer for launch in halves[1] for a in launch.accesses if a.mode is not Mode.WRITE}
        before, after = ({a.buffer for launch in half for a in launch.accesses} for half in halves)
        held = before.union(program.entry)
        self.alive = tuple(sorted(held & after.union(program.exit)))
        self._written, self._changed = map(_rows_written, halves)

    def complete(self, value: str) -> int:
        """Return the buffer of the arena that holds a whole value at the cut, and later.

        Raises:
            MbcError: MBC129 if there is none.
        """
        for index in self.alive:
            buffer = self._plan.buffers[index]
            if buffer.value != value or buffer.space is not Space.ARENA or index in self._changed:
                continue
            rows = whole_rows(self._plan.graph, self._plan.graph.values[value])
            if buffer.rows == rows and self._written.get(index, RowSet()).is_exactly(rows.start, rows.stop):
                return index
        raise MbcError(
            "MBC129",
            f"'{value}' is not complete before the step reads the gradients of its outputs",
            "this is a mistake of the compiler: report it with the plan file",
        )

    def kept(self, given: Collection[str]) -> tuple[Region, ...]:
        """Return the regions that the second half reads and the first half leaves, without those of states.

        Args:
            given: Inputs that are given at the cut.
        """
        plan, values = self._plan, self._plan.graph.values
        names = {index: plan.buffers[index].value for index in {*self.alive, *plan.train.entry}}
        persistent = (index for index, name in names.items() if name is not None and values[name].role.persistent)
        states = {self._region(index)[:2] for index in persistent}  # also of a state's new version, in its place
        read = (self._region(index) for index in self._read.intersection(self.alive) if names[index] not in given)
        parts: list[Region] = []
        for space, start, stop in sorted(region for region in read if region[:2] not in states):
            if parts and parts[-1][0] is space and start <= parts[-1][2]:
                _, start, before = parts.pop()
                stop = max(stop, before)
            parts.append((space, start, stop))
        return tuple(parts)

    def read_again(self) -> frozenset[str]:
        """Return the parameters and statistics that the second half reads in their own places."""
        values, roles = self._plan.graph.values, (Role.PARAMETER, Role.STATISTIC)
        names = (self._plan.buffers[index].value for index in self._read.intersection(self._plan.train.entry))
        return frozenset(name for name in names if name is not None and values[name].role in roles)

    def _region(self, index: int) -> Region:
        """Return the bytes of a buffer, with those up to the next buffer, so that neighbours become one region."""
        buffer, start = self._plan.buffers[index], self._plan.offsets[index]
        stop = min(start + rounded(buffer.size_bytes), self._plan.predictions.bytes_of(buffer.space))
        return buffer.space, start, stop


def _rows_written(launches: Iterable[Launch]) -> dict[int, RowSet]:
    """Return the rows of each buffer that the launches write."""
    written: dict[int, RowSet] = {}
    for launch in launches:
        for access in launch.accesses:
            if access.mode is not Mode.READ:
                written[access.buffer] = written.get(access.buffer, RowSet()).united(access.rows)
    return written

"""Demands of a plan's graph on the launch that runs an operation or a fused group. Used by the verifier only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.errors import MbcError
from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ir.types import DType, Layout, layout_matters
from mbc.ops import KINDS
from mbc.plan.model import Rows

# By type, the wider types that hold all of its numbers, so that a buffer of a wider type can hold its values.
_WIDER = {DType.FP32: (DType.FP64,), DType.BF16: (DType.FP32, DType.FP64), DType.FP16: (DType.FP32, DType.FP64)}


def can_hold(buffer: DType, value: DType) -> bool:
    """Return whether a buffer of type `buffer` can hold a value of type `value` without loss."""
    return buffer is value or buffer in _WIDER.get(value, ())


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a launch.

    Attributes:
        name: The value.
        root: The value whose bytes hold it: `name` itself, or the value that it is a view of.
        dtype: Type of the value.
        per_sample: Whether the value has a row for each row of the mini-batch.
        sums: Whether this is an output that sums over rows, so that a launch over some rows gives a partial result.
    """

    name: str
    root: str
    dtype: DType
    per_sample: bool
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """The accesses that one launch must have.

    Attributes:
        inputs: Operands that the launch reads.
        outputs: Operands that the launch computes.
        rows: All rows that the operation runs over.
        divisible: Whether several launches may each run some of the rows.
        fused: Whether the launch runs several operations.
        in_place: By the position of an output, the positions of the inputs that it may overwrite.
        updates: By the position of an output, the position of the state whose next version it is.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    rows: Rows
    divisible: bool
    fused: bool
    in_place: Mapping[int, frozenset[int]]
    updates: Mapping[int, frozenset[int]]


class Demands:
    """The demands of one list of operations (`graph.train` or `graph.infer`)."""

    def __init__(self, graph: TrainingGraph, operations: Sequence[Operation]) -> None:
        """Take the operations of one program of `graph`."""
        self._graph = graph
        self.operations = {op.name: op for op in operations}
        self._roots: dict[str, str] = {}
        self._demands: dict[tuple[str, ...], Demand] = {}
        for op in operations:
            if KINDS[op.kind].view:
                self._roots[op.outputs[0]] = self.root(op.inputs[0])

    def root(self, value: str) -> str:
        """Return the value whose bytes hold `value`."""
        return self._roots.get(value, value)

    def launched(self) -> list[Operation]:
        """Return the operations that a launch must run: all except views."""
        return [op for op in self.operations.values() if not KINDS[op.kind].view]

    def updates_state(self, name: str) -> bool:
        """Return whether the operation updates a state, so that it must run once."""
        return bool(KINDS[self.operations[name].kind].updates)

    def of(self, names: tuple[str, ...], place: str) -> Demand:
        """Return the demand on a launch of these operations.

        Args:
            names: Names of the operations, in order.
            place: The launch, as a message names it.

        Raises:
            MbcError: MBC123 if the program has no such operation, if one is a view, or if the order of a group is
                impossible.
        """
        demand = self._demands.get(names)
        if demand is None:
            for name in names:
                if name not in self.operations:
                    raise MbcError("MBC123", f"{place}: this program has no operation '{name}'")
                if KINDS[self.operations[name].kind].view:
                    raise MbcError("MBC123", f"{place}: '{name}' is a view, which no launch runs")
            group = [self.operations[name] for name in names]
            self._check_order(group, place)
            demand = self._demands[names] = self._make(group)
        return demand

    def _check_order(self, group: Sequence[Operation], place: str) -> None:
        """Check that each member of a group reads only values from outside the group or of members before it.

        Raises:
            MbcError: MBC123 otherwise.
        """
        later = {self.root(output) for op in group for output in op.outputs}
        for op in group:
            for name in op.inputs:
                if self.root(name) in later:
                    raise MbcError(
                        "MBC123", f"{place}: '{op.name}' reads '{name}', which no earlier member of the group computes",
                        "this plan would not compute its network: report it with the plan file",
                    )  # fmt: skip
            later -= {self.root(output) for output in op.outputs}

    def _make(self, group: list[Operation]) -> Demand:
        inputs: list[Operand] = []
        outputs: list[Operand] = []
        in_place: set[tuple[int, int]] = set()
        updates: set[tuple[int, int]] = set()
        through: dict[str, set[int]] = {}  # value inside a group -> inputs that it could overwrite
        inside = {output for op in group for output in op.outputs}
        read: dict[str, int] = {}
        for op in group:
            kind = KINDS[op.kind]
            position: dict[int, int] = {}
            for i, name in enumerate(op.inputs):
                if len(group) > 1 and self.root(name) in inside:
                    continue
                # A fused group reads a value from outside once. If a member overwrites the value, the kernel has read
                # it for all earlier members.
                if len(group) > 1 and name in read:
                    position[i] = read[name]
                    continue
                read[name] = position[i] = len(inputs)
                inputs.append(self._operand(name))
            first_output = len(outputs)
            outputs += [self._operand(name, kind.accumulates) for name in op.outputs]
            # Optional operands (the momentum of sgd) may be missing.
            for o, i in kind.in_place:
                if i < len(op.inputs) and o < len(op.outputs):
                    over = {position[i]} if i in position else through.get(op.inputs[i], set())
                    through.setdefault(op.outputs[o], set()).update(over)
                    in_place |= {(first_output + o, source) for source in over}
            updates |= {
                (first_output + o, position[i]) for o, i in kind.updates if i in position and o < len(op.outputs)
            }
        # A sum that another member reads is complete only after the last row, so the group cannot be divided.
        summed = {output for op in group if KINDS[op.kind].accumulates for output in op.outputs}
        whole = any(self.root(name) in summed for op in group for name in op.inputs)
        batched = any(operand.per_sample for operand in (*inputs, *outputs))
        if not batched:  # nothing to sum over
            outputs = [replace(operand, sums=False) for operand in outputs]
        return Demand(
            tuple(inputs),
            tuple(outputs),
            Rows(0, self._graph.batch) if batched else Rows(0, 1),
            batched and not whole and all(KINDS[op.kind].divisible for op in group),
            len(group) > 1,
            _by_output(in_place | updates),
            _by_output(updates),
        )

    def _operand(self, name: str, sums: bool = False) -> Operand:
        value = self._graph.values[name]
        root = self.root(name)
        return Operand(name, root, value.type.dtype, value.per_sample, sums and not value.per_sample)


def _by_output(pairs: Iterable[tuple[int, int]]) -> Mapping[int, frozenset[int]]:
    by_output: dict[int, set[int]] = {}
    for output, source in pairs:
        by_output.setdefault(output, set()).add(source)
    return {output: frozenset(sources) for output, sources in by_output.items()}


def whole_rows(graph: TrainingGraph, value: Value) -> Rows:
    """Return all rows of a value."""
    return Rows(0, graph.batch) if value.per_sample else Rows(0, 1)


def is_canonical(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Return whether bytes in this layout are in the row-major order of `shape`."""
    return layout is Layout.CHANNELS_FIRST or not layout_matters(shape)


def first_versions(graph: TrainingGraph) -> tuple[str, ...]:
    """Return the names of the states before a step: values that outlive the step and that no operation computes."""
    results = {output for op in (*graph.train, *graph.infer) for output in op.outputs}
    names = dict.fromkeys(state.value for state in graph.states)
    names |= dict.fromkeys(old for old, _ in graph.updates)
    names |= dict.fromkeys(
        name for name, value in graph.values.items() if value.role.persistent and name not in results
    )
    return tuple(names)

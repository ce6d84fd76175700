"""What the graph of a plan demands of the launch that runs an operation, or a fused group. For the verifier only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.errors import MbcError
from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ir.types import DType, Layout, layout_matters
from mbc.ops import KINDS
from mbc.plan.model import Rows

# Types that hold every number of another one, so that a buffer of the wider type can hold a value of the narrower.
_WIDER = {
    DType.FP32: (DType.FP64,),
    DType.BF16: (DType.FP32, DType.FP64),
    DType.FP16: (DType.FP32, DType.FP64),
}


def can_hold(buffer: DType, value: DType) -> bool:
    """Whether a buffer of one type holds a value of another without loss."""
    return buffer is value or buffer in _WIDER.get(value, ())


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a launch. `root` is the value whose bytes hold it: its own, or the one that it is a view of.

    `sums`: an output that is a reduction over rows, so a launch over some rows gives a partial result.
    """

    name: str
    root: str
    dtype: DType
    per_sample: bool
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What one launch must access. `rows` is what the operation runs over in all.

    `in_place` and `updates`, by positions in `outputs`: the positions of the inputs that an output may be written over,
    and of the state whose next version it is.
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
        self._graph = graph
        self.operations = {op.name: op for op in operations}
        self._roots: dict[str, str] = {}
        self._known: dict[tuple[str, ...], Demand] = {}
        for op in operations:
            if KINDS[op.kind].view:
                self._roots[op.outputs[0]] = self.root(op.inputs[0])

    def root(self, value: str) -> str:
        """The value whose bytes hold `value`."""
        return self._roots.get(value, value)

    def launched(self) -> list[Operation]:
        """The operations that a launch must run."""
        return [op for op in self.operations.values() if not KINDS[op.kind].view]

    def updates_state(self, name: str) -> bool:
        """Whether running the operation twice would change a state twice."""
        return bool(KINDS[self.operations[name].kind].updates)

    def of(self, names: tuple[str, ...], place: str) -> Demand:
        """The demand on a launch of these operations; `place` is what a message calls the launch."""
        known = self._known.get(names)
        if known is None:
            for name in names:
                if name not in self.operations:
                    raise MbcError("MBC123", f"{place}: this program has no operation '{name}'")
                if KINDS[self.operations[name].kind].view:
                    raise MbcError("MBC123", f"{place}: '{name}' is a view, which no launch runs")
            group = [self.operations[name] for name in names]
            self._check_order(group, place)
            known = self._known[names] = self._make(group)
        return known

    def _check_order(self, group: Sequence[Operation], place: str) -> None:
        """A member of a group reads what comes from outside or what a member before it has made."""
        later = {self.root(output) for op in group for output in op.outputs}
        for op in group:
            for name in op.inputs:
                if self.root(name) in later:
                    raise MbcError(
                        "MBC123", f"{place}: '{op.name}' reads '{name}', which no member of the group before it made",
                        "this plan would compute something else than its network: report it with the plan file",
                    )  # fmt: skip
            later -= {self.root(output) for output in op.outputs}

    def _make(self, group: list[Operation]) -> Demand:
        inputs: list[Operand] = []
        outputs: list[Operand] = []
        in_place: set[tuple[int, int]] = set()
        updates: set[tuple[int, int]] = set()
        through: dict[str, set[int]] = {}  # what stays inside a group -> inputs that it might have been written over
        inside = {output for op in group for output in op.outputs}
        read: dict[str, int] = {}
        for op in group:
            kind = KINDS[op.kind]
            position: dict[int, int] = {}
            for i, name in enumerate(op.inputs):
                if len(group) > 1 and self.root(name) in inside:
                    continue
                # A fused group reads what comes from outside, once. Where a member writes over it, its kernel has read
                # there for all members before.
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
        # A sum over all rows that another member reads is not there before the last of them.
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
    found: dict[int, set[int]] = {}
    for output, source in pairs:
        found.setdefault(output, set()).add(source)
    return {output: frozenset(sources) for output, sources in found.items()}


def whole_rows(graph: TrainingGraph, value: Value) -> Rows:
    """All rows of a value."""
    return Rows(0, graph.batch) if value.per_sample else Rows(0, 1)


def is_canonical(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether bytes in this layout lie as the shape reads."""
    return layout is Layout.CHANNELS_FIRST or not layout_matters(shape)


def first_versions(graph: TrainingGraph) -> tuple[str, ...]:
    """The states as they are before a step: what outlives it and no operation makes."""
    made = {output for op in (*graph.train, *graph.infer) for output in op.outputs}
    names = dict.fromkeys(state.value for state in graph.states)
    names |= dict.fromkeys(old for old, _ in graph.updates)
    names |= dict.fromkeys(name for name, value in graph.values.items() if value.role.persistent and name not in made)
    return tuple(names)

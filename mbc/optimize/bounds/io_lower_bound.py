"""I/O lower bound: the fewest bytes that a step has to move outside its convolutions and GEMMs, however it is fused.

The operations between two barriers can run as one *sweep* over memory: it reads each stored value that it needs once,
and keeps its results in registers. A barrier is a GEMM or convolution, whose operands and result are stored, or a
reduction across the samples (statistics, sums, losses): operations that depend on it come in a later sweep. Any other
value is either stored, written once and read once by every sweep that needs it, or recomputed from others in each of
these sweeps. Where only the sign of a value is needed a bit mask is stored, if that is smaller. Which values are stored
is a linear program, whose optimum is a lower bound for every fusion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ops import KINDS
from mbc.optimize import effort


def fewest_bytes(graph: TrainingGraph) -> int:
    """Return the fewest bytes that the training step reads and writes outside its convolutions and GEMMs."""
    step = _Step(graph)
    sweeps, optional = _sweeps(step)
    return round(_solve(step, sweeps, optional))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One pass over memory between two barriers.

    Attributes:
        level: Position of the sweep in the step.
        present: Values that the sweep must hold.
        optional: Values that the sweep writes if they are stored at all.
        computed_from: Operands of the values that the sweep can compute itself.
        inside: Values that the sweep may hold.
    """

    level: int
    present: tuple[str, ...]
    optional: tuple[str, ...]
    computed_from: Mapping[str, tuple[str, ...]]
    inside: tuple[str, ...]


@dataclass
class _Step:
    """The graph without its views.

    Attributes:
        graph: The training graph.
        size: Bytes of each value.
        level: The first sweep in which each value can exist.
        computed_from: Operands of the operation that computes a value within a sweep.
        stored: Values that are in memory in any case.
        held: Operands of the barriers, by sweep.
    """

    graph: TrainingGraph
    size: dict[str, float] = field(default_factory=dict[str, float])
    level: dict[str, int] = field(default_factory=dict[str, int])
    computed_from: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    stored: set[str] = field(default_factory=set[str])
    held: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    _root: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        graph = self.graph
        for name in (*graph.inputs, *(state.value for state in graph.states)):
            self._add(name, 0)
            self.stored.add(name)
        for operation in graph.train:
            if KINDS[operation.kind].view:
                self._root[operation.outputs[0]] = self._at(operation.inputs[0])
            else:
                self._enter(operation)
        kept = (*graph.outputs, graph.loss, *graph.metrics, *(after for _, after in graph.updates))
        self.stored.update(map(self._at, kept))

    def _at(self, name: str) -> str:
        return self._root.get(name, name)

    def _add(self, name: str, level: int, share: float = 1.0) -> None:
        self.size[name] = share * self.graph.values[name].type.size_bytes
        self.level[name] = level

    def _enter(self, operation: Operation) -> None:
        kind = KINDS[operation.kind]
        operands = [self._at(name) for name in operation.inputs]
        for i in kind.signs:
            operands[i] = self._sign(operands[i])
        level = max((self.level[name] for name in operands), default=0)
        if kind.flops is not None:
            self.stored.update(operands)
            self.stored.update(operation.outputs)
        elif self._gathers(operation):
            self.held.setdefault(level, set()).update(operands)
            self.stored.update(operation.outputs)
        else:
            for name in operation.outputs:
                self._add(name, level)
                self.computed_from[name] = tuple(dict.fromkeys(operands))
            return
        for name in operation.outputs:
            self._add(name, level + 1)

    def _sign(self, name: str) -> str:
        sign = f"sign of {name}"
        self.size[sign] = self.graph.values[name].type.elements / 8
        self.level[sign] = self.level[name]
        self.computed_from[sign] = (name,)
        return sign

    def _gathers(self, operation: Operation) -> bool:
        values = self.graph.values
        if any(values[name].per_sample for name in operation.outputs):
            return False
        computed_from = sum(values[name].type.elements for name in operation.outputs)
        return computed_from < max(values[name].type.elements for name in operation.inputs)


def _sweeps(step: _Step) -> tuple[list[_Sweep], set[str]]:
    """Return all sweeps, last first, and the values that a later sweep might read, which may be stored or not."""
    written: dict[int, list[str]] = {}
    for name in step.computed_from:
        if name in step.stored:
            written.setdefault(step.level[name], []).append(name)
    wanted: dict[int, list[str]] = {}  # by the sweep that could write it
    optional: set[str] = set()
    sweeps: list[_Sweep] = []
    # Backwards, since an earlier sweep has to write what a later one might read.
    for level in sorted({*step.held, *written, *step.level.values()}, reverse=True):
        present = tuple(sorted({*step.held.get(level, ()), *written.get(level, ())}))
        choices = tuple(wanted.get(level, ()))
        computed_from, inside = _within(step, (*present, *choices))
        for name in inside:
            if (
                name in step.computed_from
                and name not in step.stored
                and name not in optional
                and step.level[name] < level
            ):
                optional.add(name)
                wanted.setdefault(step.level[name], []).append(name)
        sweeps.append(_Sweep(level, present, choices, computed_from, inside))
    return sweeps, optional


def _within(step: _Step, roots: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return what a sweep with `roots` can compute and may hold.

    Returns:
        The operands of each value that the sweep can compute, and all values that it may hold, nearest first.
    """
    computed_from: dict[str, tuple[str, ...]] = {}
    inside = dict.fromkeys(roots)
    pending = deque(inside)
    while pending:
        name = pending.popleft()
        operands = step.computed_from.get(name)
        if operands is None or (len(computed_from) >= effort.IO_BOUND_REACH + len(roots) and name not in roots):
            continue
        computed_from[name] = operands
        for operand in operands:
            if operand not in inside:
                inside[operand] = None
                pending.append(operand)
    return computed_from, tuple(inside)


def _solve(step: _Step, sweeps: Sequence[_Sweep], optional: set[str]) -> float:
    from ortools.linear_solver.python import model_builder as linear  # heavy, and only needed here

    model = linear.Model()
    # Each variable, with the bytes that move where it is 1.
    costs: list[tuple[linear.Variable, float]] = []
    store = {name: model.new_num_var(0, 1, None) for name in sorted(optional)}
    costs += [(variable, step.size[name]) for name, variable in store.items()]
    constant = 0.0
    for sweep in sweeps:
        least = dict.fromkeys(sweep.present, 1.0)
        hold = {name: model.new_num_var(least.get(name, 0.0), 1, None) for name in sweep.inside}
        for name in sweep.optional:
            model.add(hold[name] >= store[name])
        for name, variable in hold.items():
            operands = sweep.computed_from.get(name, ())
            if name in sweep.computed_from and step.level[name] == sweep.level:
                # The sweep computes the value for the first time: there is nothing to read yet.
                read = None
                constant += step.size[name] if name in step.stored else 0.0
            else:
                read = model.new_num_var(0, 1, None) if name in sweep.computed_from else variable
                costs.append((read, step.size[name]))
                if name in store:
                    model.add(read <= store[name])
            for operand in operands:
                model.add(hold[operand] >= (variable if read is None else variable - read))
    variables, sizes = [variable for variable, _ in costs], [size for _, size in costs]
    model.minimize(linear.LinearExpr.weighted_sum(variables, sizes))  # pyright: ignore[reportUnknownMemberType]
    solver = linear.Solver("glop")
    status = solver.solve(model)
    assert status == linear.SolveStatus.OPTIMAL, status
    return constant + solver.objective_value

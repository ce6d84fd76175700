"""Choose a kernel and a layout for every operation.

Layout is a choice among candidates: the candidate that runs an operation decides how its outputs lie in memory, and a
consumer that wants another order pays for a conversion. One pass in program order weighs kernel against conversions,
once leaning towards channels first and once towards channels last; the better total wins. States take the layout that
their readers ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout, layout_matters
from mbc.kernels.base import Candidate
from mbc.ops import KINDS
from mbc.ops.convolution import Convolution
from mbc.optimize.candidates import CandidateTable, Limits, conversion_us
from mbc.plan.model import Rows

# How an operation that may be divided is divided: rows of its kernel calls, in order.
Division = Callable[[Operation], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate a slice, all with the same layouts."""

    division: tuple[int, ...]
    candidates: tuple[Candidate, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return self.candidates[0].layouts

    @property
    def time_us(self) -> float:
        return sum(c.time_us for c in self.candidates)


@dataclass(frozen=True, slots=True)
class Choices:
    """`operations` by name, of both programs; `states`: layout of each state; `total_us` with conversions."""

    operations: Mapping[str, Choice]
    states: Mapping[str, Layout]
    total_us: float


def choose(table: CandidateTable, limits: Limits, division: Division) -> Choices:
    """The cheaper of the two leanings. Raises MBC200, MBC201 or MBC202 where an operation has no candidate."""
    return min(
        (_choose_leaning(table, limits, division, lean) for lean in Layout),
        key=lambda choices: choices.total_us,
    )


def _choose_leaning(table: CandidateTable, limits: Limits, division: Division, lean: Layout) -> Choices:
    graph = table.graph
    states = {
        name: lean if layout_matters(value.type.shape) else Layout.CHANNELS_FIRST
        for name, value in graph.values.items()
        if value.role.persistent
    }
    options: dict[str, tuple[Choice, ...]] = {}
    wishes: Counter[tuple[str, Layout]] = Counter()
    _Pass(table, limits, division, lean, states, options, wishes, voting=True).run()
    # A state has no producer to decide its layout: let its readers vote, then choose once more.
    for name in states:
        if layout_matters(graph.values[name].type.shape):
            states[name] = max(Layout, key=lambda layout: (wishes[name, layout], layout is lean))
    # What one operation updates together (a parameter and its momentum) lies alike: as the parameter.
    for operation in graph.train:
        updated = [operation.inputs[i] for _, i in KINDS[operation.kind].updates if i < len(operation.inputs)]
        for name in updated[1:]:
            if layout_matters(graph.values[name].type.shape):
                states[name] = states[updated[0]]
    final = _Pass(table, limits, division, lean, states, options, wishes, voting=False)
    final.run()
    return Choices(final.chosen, states, final.total_us)


@dataclass
class _Pass:
    """One walk over both programs. While `voting`, states may still take the layout that an update asks for."""

    table: CandidateTable
    limits: Limits
    division: Division
    lean: Layout
    states: dict[str, Layout]
    options: dict[str, tuple[Choice, ...]]
    wishes: Counter[tuple[str, Layout]]
    voting: bool

    def run(self) -> None:
        self.chosen: dict[str, Choice] = {}
        self.total_us = 0.0
        for program in (self.table.graph.train, self.table.graph.infer):
            self._run_program(program)

    def _run_program(self, program: tuple[Operation, ...]) -> None:
        graph = self.table.graph
        # Layouts in which a value exists so far.
        exists: dict[str, set[Layout]] = {name: {layout} for name, layout in self.states.items()}
        exists |= {name: {Layout.CHANNELS_FIRST} for name in (*graph.inputs, *graph.infer_inputs)}
        for operation in program:
            kind = KINDS[operation.kind]
            if kind.view:
                viewed = operation.inputs[0]
                if Layout.CHANNELS_FIRST not in exists[viewed]:
                    self.total_us += conversion_us(graph.values[viewed].type, self.table.device)
                    exists[viewed].add(Layout.CHANNELS_FIRST)
                exists[operation.outputs[0]] = {Layout.CHANNELS_FIRST}
                continue
            best, cost = self._best(operation, exists)
            self.chosen[operation.name] = best
            self.total_us += cost
            layouts = best.layouts
            for name, layout in zip(operation.inputs, layouts, strict=False):
                self.wishes[name, layout] += 1
                exists[name].add(layout)
            for name, layout in zip(operation.outputs, layouts[len(operation.inputs) :], strict=True):
                exists[name] = {layout}

    def _best(self, operation: Operation, exists: dict[str, set[Layout]]) -> tuple[Choice, float]:
        """The choice with the least time, conversions of its inputs included, and that time."""
        graph, device = self.table.graph, self.table.device
        kind = KINDS[operation.kind]
        best: tuple[float, float, Choice] | None = None
        for choice in self._options(operation):
            layouts = choice.layouts
            updated = [i for _, i in kind.updates if i < len(operation.inputs)]
            if not self.voting and any(layouts[i] is not self.states.get(operation.inputs[i]) for i in updated):
                continue  # a state is updated where it lies
            cost = choice.time_us
            for name, layout in zip(operation.inputs, layouts, strict=False):
                if layout not in exists[name]:
                    cost += conversion_us(graph.values[name].type, device)
            # What leaves in the other layout than the leaning will probably be converted by a reader.
            bias = 0.0
            for name, layout in zip(operation.outputs, layouts[len(operation.inputs) :], strict=True):
                type_ = graph.values[name].type
                if layout is not self.lean and layout_matters(type_.shape):
                    bias += conversion_us(type_, device)
            if best is None or cost + bias < best[0]:
                best = (cost + bias, cost, choice)
        assert best is not None, f"{operation.name}: no candidate in the layout of the state that it updates"
        return best[2], best[1]

    def _options(self, operation: Operation) -> tuple[Choice, ...]:
        known = self.options.get(operation.name)
        if known is None:
            known = self.options[operation.name] = options(self.table, self.limits, operation, self.division(operation))
        return known


def options(
    table: CandidateTable, limits: Limits, operation: Operation, division: tuple[int, ...]
) -> tuple[Choice, ...]:
    """The fastest choice for each combination of layouts in which every slice has a candidate; never empty."""
    slices: list[dict[tuple[Layout, ...], Candidate]] = []
    must_accumulate = len(division) > 1 and KINDS[operation.kind].accumulates
    for rows in division:
        fastest: dict[tuple[Layout, ...], Candidate] = {}
        for candidate in table.admitted(operation, Rows(0, rows), limits):
            if must_accumulate and not candidate.accumulates:
                continue
            known = fastest.get(candidate.layouts)
            if known is None or _rank(candidate) < _rank(known):
                fastest[candidate.layouts] = candidate
        slices.append(fastest)
    together = tuple(
        Choice(division, tuple(fastest[layouts] for fastest in slices))
        for layouts in slices[0]
        if all(layouts in fastest for fastest in slices)
    )
    # Where no kernel can add up the slices, or none runs them all in one layout, the operation stays whole.
    return together or options(table, limits, operation, (sum(division),))


def _rank(candidate: Candidate) -> tuple[float, int, str]:
    return (candidate.time_us, candidate.workspace_bytes, candidate.provider)


def undivided(graph: TrainingGraph) -> Division:
    """Every operation in one call."""
    return lambda operation: (graph.batch,)


def slices_of(graph: TrainingGraph, rows: int) -> Division:
    """Convolutions in calls of `rows` rows (the last one may have fewer), where every slice starts 16-byte aligned."""

    def divide(operation: Operation) -> tuple[int, ...]:
        kind = KINDS[operation.kind]
        sizes = [
            value.type.size_bytes // graph.batch
            for value in (graph.values[name] for name in (*operation.inputs, *operation.outputs))
            if value.per_sample
        ]
        aligned = all(rows * size % 16 == 0 for size in sizes)
        if not (kind.divisible and isinstance(operation.attributes, Convolution) and aligned):
            return (graph.batch,)
        full, rest = divmod(graph.batch, rows)
        return (rows,) * full + ((rest,) if rest else ())

    return divide

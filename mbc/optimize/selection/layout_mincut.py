"""The layouts that make a program fastest, exactly: a minimum cut.

Every operation whose operands' layout matters is labelled channels first or channels last, at the cost of its time in
that layout; a value that is read in another layout than it was written in is converted once for all readers. A sum of
such unary costs, and of pairwise costs where labels differ, all submodular, is a cut of a graph (Kolmogorov and Zabih,
"What energy functions can be minimized via graph cuts?", 2004), so the cheapest labelling is found by a maximum flow,
and its cost is a lower bound: no other choice of layouts is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.pareto import Point
from mbc.optimize.candidates.table import CandidateTable

FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
_UNITS_PER_US = 10_000  # the flow solver takes whole numbers
_NEVER = 1 << 44  # larger than the time of any step, and small enough that sums do not overflow

# Source and sink of the flow have fixed labels.
_LAST_END, _FIRST_END = 0, 1

Options = Mapping[tuple[Layout, ...], Point]  # the best candidate of an operation, by its layouts


@dataclass(frozen=True, slots=True)
class Labelling:
    """The layouts of a program.

    Attributes:
        operations: Layouts of the operands of each operation, by name.
        states: Layout of each state that the program reads.
        total_us: Time of all kernels and conversions.
    """

    operations: Mapping[str, tuple[Layout, ...]]
    states: Mapping[str, Layout]
    total_us: float


@dataclass
class _Cut:
    """Labels as nodes: channels last on the source's side, channels first on the sink's."""

    count: int = 2
    tails: list[int] = field(default_factory=list[int])
    heads: list[int] = field(default_factory=list[int])
    capacities: list[int] = field(default_factory=list[int])
    constant: int = 0

    def node(self) -> int:
        self.count += 1
        return self.count - 1

    def pair(self, last: int, first: int, cost: int) -> None:
        """Add a cost that applies where label `last` is channels last and label `first` is channels first."""
        if cost and last != first:
            self.tails.append(last)
            self.heads.append(first)
            self.capacities.append(min(cost, _NEVER))

    def single(self, node: int, first: int, last: int) -> None:
        """Add the unary costs of one node."""
        least = min(first, last)
        self.constant += least
        self.pair(_LAST_END, node, first - least)
        self.pair(node, _FIRST_END, last - least)

    def same(self, a: int, b: int) -> None:
        self.pair(a, b, _NEVER)
        self.pair(b, a, _NEVER)

    def solve(self) -> tuple[frozenset[int], float]:
        """Return the nodes that are channels last, and the total in microseconds."""
        # Heavy, and only needed here.
        from ortools.graph.python import max_flow  # pyright: ignore[reportMissingTypeStubs]

        if not self.tails:
            return frozenset(), self.constant / _UNITS_PER_US
        flow: Any = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(
            np.array(self.tails, np.int32), np.array(self.heads, np.int32), np.array(self.capacities, np.int64)
        )
        status: Any = flow.solve(_LAST_END, _FIRST_END)
        assert status == flow.OPTIMAL, f"the maximum flow of the layouts ended with {status}"
        last = frozenset(int(node) for node in flow.get_source_side_min_cut())
        return last, (self.constant + flow.optimal_flow()) / _UNITS_PER_US


def _units(time_us: float) -> int:
    return int(time_us * _UNITS_PER_US)  # rounded down, so that the total is a bound


def label(
    table: CandidateTable,
    program: tuple[Operation, ...],
    inputs: tuple[str, ...],
    options: Mapping[str, Options],
    states: Mapping[str, Layout] | None = None,
) -> Labelling:
    """Return the fastest labelling of one program.

    Args:
        table: Candidates of the graph.
        program: Operations in order.
        inputs: Values that exist before the program, all channels first.
        options: The best candidate of each operation in each combination of layouts.
        states: Layouts of the states, if they are fixed.
    """
    return _Labeller(table, options, states).run(program, inputs)


@dataclass
class _Labeller:
    table: CandidateTable
    options: Mapping[str, Options]
    settled: Mapping[str, Layout] | None
    cut: _Cut = field(default_factory=_Cut)
    written: dict[str, int] = field(default_factory=dict[str, int])  # value -> label of the layout it is written in
    readers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    labels: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # of inputs, of outputs
    states: dict[str, int] = field(default_factory=dict[str, int])
    # Costs by options and operands whose layout matters: many operations share them.
    costs: dict[tuple[Any, ...], dict[tuple[bool, bool], int]] = field(
        default_factory=dict[tuple[Any, ...], dict[tuple[bool, bool], int]]
    )
    best: dict[tuple[Any, ...], tuple[Layout, ...]] = field(default_factory=dict[tuple[Any, ...], tuple[Layout, ...]])

    def run(self, program: tuple[Operation, ...], inputs: tuple[str, ...]) -> Labelling:
        for name in inputs:
            self.written[name] = _FIRST_END
        for operation in program:
            self._operation(operation)
        for name, readers in self.readers.items():
            self._conversions(name, readers)
        last, total_us = self.cut.solve()
        last |= {_LAST_END}
        chosen = {
            operation.name: self._layouts(operation, *(node in last for node in self.labels[operation.name]))
            for operation in program
            if operation.name in self.labels
        }
        return Labelling(
            chosen, {name: LAST if node in last else FIRST for name, node in self.states.items()}, total_us
        )

    def _matters(self, name: str) -> bool:
        return name in self.table.values_with_layout

    def _written(self, name: str) -> int:
        """Return the label of the layout that a value is written in; a value that no operation writes is a state."""
        node = self.written.get(name)
        if node is None:
            if self.settled is not None:
                node = _LAST_END if self.settled.get(name) is LAST else _FIRST_END
            else:
                node = self.states[name] = self.cut.node()
            self.written[name] = node
        return node

    def _operation(self, operation: Operation) -> None:
        kind = kind_of(operation)
        if kind.view:
            # A view is its operand's bytes in canonical order.
            self._read(operation.inputs[0], _FIRST_END)
            self.written[operation.outputs[0]] = _FIRST_END
            return
        source, result = self._labels(operation)
        self.labels[operation.name] = source, result
        for name in operation.inputs:
            self._read(name, source)
        for name in operation.outputs:
            self.written[name] = result
        for output, updated in kind.updates:
            # A state is updated in place.
            if updated < len(operation.inputs) and output < len(operation.outputs):
                name = operation.inputs[updated]
                if self._matters(name):
                    self.cut.same(self._written(name), source)

    def _read(self, name: str, label_: int) -> None:
        if self._matters(name):
            self._written(name)
            self.readers.setdefault(name, []).append(label_)

    def _labels(self, operation: Operation) -> tuple[int, int]:
        """Return the nodes of an operation's input and output layouts, and add its costs to the cut."""
        cost = self._costs(operation)
        if not any(self._matters(name) for name in (*operation.inputs, *operation.outputs)):
            self.cut.constant += cost[False, False]
            return _FIRST_END, _FIRST_END
        if cost[False, True] >= _NEVER and cost[True, False] >= _NEVER:
            node = self.cut.node()
            self.cut.single(node, cost[False, False], cost[True, True])
            return node, node
        source, result = self.cut.node(), self.cut.node()
        first, last = cost[False, False], cost[True, True]
        # Four costs become two unary costs and a pairwise one. This is exact if the two mixed labellings together cost
        # no less than the two uniform ones; otherwise the difference is left out.
        self.cut.single(source, first, cost[True, False])
        self.cut.single(result, 0, last - cost[True, False])
        self.cut.pair(result, source, max(0, cost[False, True] + cost[True, False] - first - last))
        return source, result

    def _key(self, operation: Operation) -> tuple[Any, ...]:
        """Return the key under which operations share costs."""
        matters = tuple(map(self.table.values_with_layout.__contains__, (*operation.inputs, *operation.outputs)))
        return id(self.options[operation.name]), len(operation.inputs), matters

    def _costs(self, operation: Operation) -> dict[tuple[bool, bool], int]:
        """Return the cost for each pair of (inputs are channels last, outputs are channels last)."""
        key = self._key(operation)
        cached = self.costs.get(key)
        if cached is not None:
            return cached
        cost = dict.fromkeys(((a, b) for a in (False, True) for b in (False, True)), _NEVER)
        for layouts, point in self.options[operation.name].items():
            for ends in _keys(self._relevant(operation, layouts)):
                cost[ends] = min(cost[ends], _units(point.time_us))
        self.costs[key] = cost
        return cost

    def _relevant(self, operation: Operation, layouts: tuple[Layout, ...]) -> tuple[set[Layout], set[Layout]]:
        """Return the layouts among the inputs, and among the outputs, whose layout matters."""
        count = len(operation.inputs)
        pairs = list(zip((*operation.inputs, *operation.outputs), layouts, strict=True))
        return (
            {layout for name, layout in pairs[:count] if self._matters(name)},
            {layout for name, layout in pairs[count:] if self._matters(name)},
        )

    def _layouts(self, operation: Operation, inputs_last: bool, outputs_last: bool) -> tuple[Layout, ...]:
        """Return the layouts of the fastest option that agrees with the labels."""
        key = *self._key(operation), inputs_last, outputs_last
        cached = self.best.get(key)
        if cached is not None:
            return cached
        fitting = [
            (point.time_us, layouts)
            for layouts, point in self.options[operation.name].items()
            if (inputs_last, outputs_last) in _keys(self._relevant(operation, layouts))
        ]
        best = self.best[key] = min(fitting)[1]
        return best

    def _conversions(self, name: str, readers: list[int]) -> None:
        """Add the cost of one conversion for each layout that a value is read in, but not written in."""
        written, type_ = self.written[name], self.table.graph.values[name].type
        to_last = _units(self.table.conversion_us(type_, LAST))
        to_first = _units(self.table.conversion_us(type_, FIRST))
        others = [reader for reader in dict.fromkeys(readers) if reader != written]
        if len(others) == 1:
            self.cut.pair(others[0], written, to_last)
            self.cut.pair(written, others[0], to_first)
        elif others:
            last, first = self.cut.node(), self.cut.node()
            for reader in others:
                self.cut.pair(reader, last, _NEVER)
                self.cut.pair(first, reader, _NEVER)
            self.cut.pair(last, written, to_last)
            self.cut.pair(written, first, to_first)


def _keys(relevant: tuple[set[Layout], set[Layout]]) -> list[tuple[bool, bool]]:
    """Return the labels, (inputs last, outputs last), that a combination of layouts agrees with.

    There is none if operands differ among themselves. Operands without a choice take the other side's label.
    """
    inputs, outputs = relevant
    if len(inputs) > 1 or len(outputs) > 1:
        return []
    source = LAST in inputs if inputs else None
    result = LAST in outputs if outputs else None
    if source is None and result is None:
        return [(False, False)]
    return [(source if source is not None else bool(result), result if result is not None else bool(source))]

"""The Pareto fronts of an operation's divisions into micro-batches, per combination of layouts, from the candidates of
a table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol

from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.pareto import ParetoFront, fixed_division, pareto_front, worthwhile
from mbc.optimize.candidates.user_rules import Rules
from mbc.plan.model import Rows
from mbc.profile.model import Profile

ParetoFronts = Mapping[tuple[Layout, ...], ParetoFront]  # by layouts of the operands


class Table(Protocol):
    """What is asked of `mbc.optimize.candidates.table.CandidateTable`."""

    @property
    def graph(self) -> TrainingGraph: ...
    @property
    def profile(self) -> Profile | None: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def whole(self) -> Rows: ...

    def candidates(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]: ...
    def candidates_of_micro_batch(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]: ...
    def profiled(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]: ...
    def timed(self, operation: Operation) -> bool: ...
    def micro_batch_rows(self, operation: Operation) -> tuple[int, ...]: ...
    def divisible(self, operation: Operation) -> bool: ...
    def aligned_rows(self, operation: Operation) -> int: ...


def fronts_of(table: Table, operation: Operation) -> ParetoFronts:
    """With the division that the user gave, else with those that policy and alignment admit; never empty. A warning
    (RuntimeWarning) says where a given division cannot be."""
    accumulates = kind_of(operation).accumulates
    division = _given_division(table, operation)
    sizes = division or table.micro_batch_rows(operation)
    offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
    measured = True
    for rows in dict.fromkeys(sizes):
        if division:  # given sizes may use any candidate
            found = table.candidates_of_micro_batch(operation, Rows(0, rows))
        elif rows == sizes[0]:
            found = table.candidates_of_micro_batch(operation, Rows(0, rows))
            measured = any(c.measured for c in found)
        elif measured and table.profile is not None:
            # A size that was not profiled is left out: its estimates would compete with measurements.
            found = table.profiled(operation, Rows(0, rows))
        elif table.timed(operation):
            found = table.candidates_of_micro_batch(operation, Rows(0, rows))
        else:  # estimates compete with estimates only
            found = table.candidates(operation, Rows(0, rows))
        for candidate in found:
            offers.setdefault(candidate.layouts, {}).setdefault(rows, []).append(candidate)
    fronts = {
        layouts: fixed_division(found, division, accumulates)
        if division
        else _front(found, table.graph.batch, accumulates)
        for layouts, found in offers.items()
    }
    fronts = {layouts: front for layouts, front in fronts.items() if front}
    if fronts:
        return fronts
    # Where no kernel can accumulate given micro-batches, or none runs them all in one layout, the operation stays
    # undivided.
    warnings.warn(
        f"--micro-batch {table.rules.micro_batch}: '{operation.name}' stays whole, for want of a kernel that "
        "accumulates the results of micro-batches, or that runs all of them in one layout",
        RuntimeWarning,
        stacklevel=2,
    )
    whole = table.candidates(operation, table.whole)
    by_layouts = {c.layouts: [o for o in whole if o.layouts == c.layouts] for c in whole}
    return {
        layouts: pareto_front({table.graph.batch: found}, table.graph.batch, accumulates)
        for layouts, found in by_layouts.items()
    }


def fronts_in_micro_batches(table: Table, operation: Operation, rows: int) -> ParetoFronts:
    """With all rows in micro-batches of so many (the last may be smaller); empty where that is impossible."""
    division = _micro_batches(table.graph.batch, rows)
    if not kind_of(operation).divisible or rows % table.aligned_rows(operation):
        return {}
    offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
    for count in dict.fromkeys(division):
        for candidate in table.candidates_of_micro_batch(operation, Rows(0, count)):
            offers.setdefault(candidate.layouts, {}).setdefault(count, []).append(candidate)
    accumulates = kind_of(operation).accumulates
    fronts = {layouts: fixed_division(found, division, accumulates) for layouts, found in offers.items()}
    return {layouts: front for layouts, front in fronts.items() if front}


def _front(offers: Mapping[int, Sequence[Candidate]], batch: int, accumulates: bool) -> ParetoFront:
    front = pareto_front(offers, batch, accumulates)
    if len(offers) == 1:
        return front
    return worthwhile(front, pareto_front({batch: offers.get(batch, ())}, batch, accumulates))


def _given_division(table: Table, operation: Operation) -> tuple[int, ...]:
    rows = table.rules.micro_batch
    if not rows or not table.divisible(operation) or rows % table.aligned_rows(operation):
        return ()
    return _micro_batches(table.graph.batch, rows)


def _micro_batches(batch: int, rows: int) -> tuple[int, ...]:
    full, rest = divmod(batch, rows)
    return (rows,) * full + ((rest,) if rest else ())

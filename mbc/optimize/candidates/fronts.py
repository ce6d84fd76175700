"""The Pareto fronts of an operation's divisions into micro-batches, from the candidates of a table.

There is one front for each combination of layouts.
"""

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
    """The part of `mbc.optimize.candidates.table.CandidateTable` that fronts need."""

    @property
    def graph(self) -> TrainingGraph:
        """The training graph."""
        ...

    @property
    def profile(self) -> Profile | None:
        """Measurements on this GPU."""
        ...

    @property
    def rules(self) -> Rules:
        """The user's rules."""
        ...

    @property
    def whole(self) -> Rows:
        """All rows of the mini-batch."""
        ...

    def candidates(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return every admitted candidate for `rows`."""
        ...

    def candidates_of_micro_batch(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return every admitted candidate of a micro-batch, including times scaled from larger sizes."""
        ...

    def profiled(self, operation: Operation, rows: Rows) -> tuple[Candidate, ...]:
        """Return the candidates that the profile alone has."""
        ...

    def timed(self, operation: Operation) -> bool:
        """Return whether a profile has times of the operation for the whole mini-batch, or leaves it to its estimate.

        The time may then be compared with measured times.
        """
        ...

    def micro_batch_rows(self, operation: Operation) -> tuple[int, ...]:
        """Return the rows that a kernel call may work on, largest first."""
        ...

    def divisible(self, operation: Operation) -> bool:
        """Return whether dividing the operation can save workspace."""
        ...

    def aligned_rows(self, operation: Operation) -> int:
        """Return the least number of rows whose multiples start at aligned addresses."""
        ...


def fronts_of(table: Table, operation: Operation) -> ParetoFronts:
    """Return the Pareto front of an operation's divisions for each combination of layouts; never empty.

    The division is the one that the user gave, else any that policy and alignment admit. A warning (RuntimeWarning)
    reports a given division that is impossible.
    """
    accumulates = kind_of(operation).accumulates
    division = _given_division(table, operation)
    sizes = division or table.micro_batch_rows(operation)
    offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
    measured = True
    for rows in dict.fromkeys(sizes):
        if division:  # given sizes may use any candidate
            candidates = table.candidates_of_micro_batch(operation, Rows(0, rows))
        elif rows == sizes[0]:
            candidates = table.candidates_of_micro_batch(operation, Rows(0, rows))
            measured = any(c.measured for c in candidates)
        elif measured and table.profile is not None:
            # A size that was not profiled is left out: estimates would compete with measurements.
            candidates = table.profiled(operation, Rows(0, rows))
        elif table.timed(operation):
            candidates = table.candidates_of_micro_batch(operation, Rows(0, rows))
        else:  # no size is measured, so estimates compete only with one another
            candidates = table.candidates(operation, Rows(0, rows))
        for candidate in candidates:
            offers.setdefault(candidate.layouts, {}).setdefault(rows, []).append(candidate)
    fronts = {
        layouts: fixed_division(candidates, division, accumulates)
        if division
        else _front(candidates, table.graph.batch, accumulates)
        for layouts, candidates in offers.items()
    }
    fronts = {layouts: front for layouts, front in fronts.items() if front}
    if fronts:
        return fronts
    # The operation stays undivided where no kernel can accumulate the given micro-batches, or none runs all of them in
    # one layout.
    warnings.warn(
        f"--micro-batch {table.rules.micro_batch}: '{operation.name}' is not divided: no kernel accumulates the "
        "results of micro-batches, or none runs all of them in one layout",
        RuntimeWarning,
        stacklevel=2,
    )
    whole = table.candidates(operation, table.whole)
    by_layouts = {c.layouts: [o for o in whole if o.layouts == c.layouts] for c in whole}
    return {
        layouts: pareto_front({table.graph.batch: candidates}, table.graph.batch, accumulates)
        for layouts, candidates in by_layouts.items()
    }


def fronts_in_micro_batches(table: Table, operation: Operation, rows: int) -> ParetoFronts:
    """Return the fronts with all rows in micro-batches of `rows` rows; empty if that is impossible.

    The last micro-batch may be smaller.
    """
    division = _micro_batches(table.graph.batch, rows)
    if not kind_of(operation).divisible or rows % table.aligned_rows(operation):
        return {}
    offers: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
    for count in dict.fromkeys(division):
        for candidate in table.candidates_of_micro_batch(operation, Rows(0, count)):
            offers.setdefault(candidate.layouts, {}).setdefault(count, []).append(candidate)
    accumulates = kind_of(operation).accumulates
    fronts = {layouts: fixed_division(by_rows, division, accumulates) for layouts, by_rows in offers.items()}
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

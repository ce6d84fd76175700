"""Selects a kernel, a layout and a division for every operation: one optimum over each program.

Under a given limit of workspace for each operation the best point of its Pareto front in each layout is known, and
`mbc.optimize.selection.layout_mincut` finds the layouts that are fastest together, conversions included. Without limits
the total is a lower bound: no plan of these candidates is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mbc.errors import MbcError
from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.pareto import ParetoFront, Point
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.fusion.horizontal import Choice, fuse_horizontally
from mbc.optimize.fusion.select_groups import Programs, plain
from mbc.optimize.selection.layout_mincut import Labelling, Options, label
from mbc.units import show_distinct, show_enough

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Choices:
    """`train` and `infer`: the programs, a fusion group as one operation. `operations` by name, of both programs;
    `states`: layout of each state; `train_us` and `infer_us` with conversions."""

    train: tuple[Operation, ...]
    infer: tuple[Operation, ...]
    operations: Mapping[str, Choice]
    states: Mapping[str, Layout]
    train_us: float
    infer_us: float


def choose(
    table: CandidateTable,
    limits: Mapping[str, int],
    rows: Mapping[str, int] | None = None,
    programs: Programs | None = None,
    updates: bool = True,
) -> Choices:
    """The fastest training step, and the fastest inference with the states as the step leaves them.

    `limits`: workspace of operations by name, in bytes; an operation that is not named has no limit, and one without a
    candidate within its limit takes the one that needs least. `rows`: of the micro-batches of operations whose division
    is given. `programs`: with fusion groups, if any are wanted; small operations are then fused horizontally as well,
    updates of the optimizer's states only with `updates`. Raises MBC200 or MBC202 where an operation has no candidate
    at all.
    """
    graph = table.graph
    divided = rows or {}
    chosen = programs or plain(graph)
    limited = tuple(
        (o.name, o.outputs, min(limits.get(o.name, _NO_LIMIT), _NO_LIMIT), divided.get(o.name))
        for o in (*chosen.train, *chosen.infer)
    )
    asked = limited, updates if programs is not None else None
    known = table.chosen.get(asked)
    if known is None:
        known = _choose(table, chosen, limits, divided)
        known = table.chosen[asked] = known if programs is None else _horizontally_fused(table, known, updates)
    return known


def _choose(
    table: CandidateTable, programs: Programs, limits: Mapping[str, int], divided: Mapping[str, int]
) -> Choices:
    graph = table.graph

    def fronts(operation: Operation) -> Mapping[tuple[Layout, ...], ParetoFront]:
        name = operation.name
        return table.fronts_in_micro_batches(operation, divided[name]) if name in divided else table.fronts(operation)

    known: dict[tuple[int, int | None], Options] = {}  # a deep network has few distinct fronts

    def within(operation: Operation) -> Options:
        found, limit_bytes = fronts(operation), limits.get(operation.name)
        key = id(found), limit_bytes
        if key not in known:
            known[key] = best_within(found, limit_bytes)
        return known[key]

    options = {
        operation.name: within(operation)
        for operation in (*programs.train, *programs.infer)
        if not kind_of(operation).view
    }
    train = label(table, programs.train, graph.inputs, options)
    # States whose layout does not matter are channels first.
    states = {state.value: train.states.get(state.value, Layout.CHANNELS_FIRST) for state in graph.states}
    infer = label(table, programs.infer, graph.infer_inputs, options, states)
    operations = _chosen(options, train) | _chosen(options, infer)
    return Choices(programs.train, programs.infer, operations, states, train.total_us, infer.total_us)


def _horizontally_fused(table: CandidateTable, found: Choices, updates: bool) -> Choices:
    """With small operations of one kind fused horizontally."""
    step, inference = (
        fuse_horizontally(table, program, found.operations, updates) for program in (found.train, found.infer)
    )
    operations = {**found.operations, **step.choices, **inference.choices}
    return Choices(
        step.program,
        inference.program,
        operations,
        found.states,
        found.train_us - step.saved_us,
        found.infer_us - inference.saved_us,
    )


def best_within(fronts: Mapping[tuple[Layout, ...], ParetoFront], limit_bytes: int | None) -> Options:
    """In each layout the fastest point within the limit; where no layout has one, the points that need least."""
    if limit_bytes is None:
        return {layouts: front[-1] for layouts, front in fronts.items()}
    limit_bytes = max(limit_bytes, least_workspace_bytes(fronts))
    found: dict[tuple[Layout, ...], Point] = {}
    for layouts, front in fronts.items():
        within = [point for point in front if point.workspace_bytes <= limit_bytes]
        if within:
            found[layouts] = within[-1]
    return found


def check_limit(table: CandidateTable, limit_bytes: int) -> None:
    """MBC201 where an operation has no candidate within a limit that the user set: names the least limit that suffices
    for all, and the settings that exclude smaller candidates."""
    operations = [o for o in (*table.graph.train, *table.graph.infer) if not kind_of(o).view]
    least = {o: least_workspace_bytes(table.fronts(o)) for o in operations}
    operation = max(operations, key=lambda o: least[o])
    if least[operation] <= limit_bytes:
        return
    needed, limit = show_distinct(least[operation], limit_bytes)
    raise MbcError(
        "MBC201",
        f"'{operation.name}' needs {needed} of workspace, the limit is {limit}; chosen among what "
        f"{', '.join(table.rules.excluding())} admits",
        f"raise --workspace-limit to at least {show_enough(least[operation])}",
        operation.span,
    )


def _chosen(options: Mapping[str, Options], labelling: Labelling) -> dict[str, Choice]:
    return {name: Choice(layouts, options[name][layouts]) for name, layouts in labelling.operations.items()}

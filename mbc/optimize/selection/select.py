"""Selects a kernel, a layout and a division for every operation: one optimum over each program.

Under a given workspace limit of each operation, the best point of its Pareto front in each layout is fixed.
`mbc.optimize.selection.layout_mincut` then finds the layouts that are fastest together, conversions included. Without
limits the total is a lower bound: no plan of these candidates is faster.
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
from mbc.options import UNLIMITED_BYTES
from mbc.units import show_distinct, show_enough


@dataclass(frozen=True, slots=True)
class Choices:
    """The selected candidates of both programs.

    Attributes:
        train: The training step, each fusion group as one operation.
        infer: The inference program, each fusion group as one operation.
        operations: Layouts and micro-batches of each operation of both programs, by name.
        states: Layout of each state.
        train_us: Time of the training step, with conversions.
        infer_us: Time of inference, with conversions.
    """

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
    """Return the fastest training step, and the fastest inference with the states in the layouts of the step.

    Args:
        table: Candidates of the graph.
        limits: Workspace in bytes of operations, by name. An operation that is not named has no limit. An operation
            without a candidate within its limit takes the candidate that needs least.
        rows: Rows of the micro-batches of operations whose division is given.
        programs: Programs with fusion groups, if any are wanted. Small operations are then fused horizontally as well.
        updates: Whether updates of the optimizer's states are fused horizontally.

    Raises:
        MbcError: MBC200 or MBC202, if an operation has no candidate.
    """
    choices = _choose(table, programs or plain(table.graph), limits, rows or {})
    return choices if programs is None else _horizontally_fused(table, choices, updates)


def _choose(
    table: CandidateTable, programs: Programs, limits: Mapping[str, int], divided: Mapping[str, int]
) -> Choices:
    graph = table.graph

    def fronts(operation: Operation) -> Mapping[tuple[Layout, ...], ParetoFront]:
        name = operation.name
        return table.fronts_in_micro_batches(operation, divided[name]) if name in divided else table.fronts(operation)

    cached: dict[tuple[int, int], Options] = {}  # a deep network has few distinct fronts

    def within(operation: Operation) -> Options:
        operation_fronts, limit_bytes = fronts(operation), limits.get(operation.name, UNLIMITED_BYTES)
        key = id(operation_fronts), limit_bytes
        if key not in cached:
            cached[key] = best_within(operation_fronts, limit_bytes)
        return cached[key]

    options = {
        operation.name: within(operation)
        for operation in (*programs.train, *programs.infer)
        if not kind_of(operation).view
    }
    settled = dict(table.rules.state_layouts)
    train = label(table, programs.train, graph.inputs, options, settled or None)
    chosen = settled or train.states
    # States whose layout does not matter are channels first.
    states = {state.value: chosen.get(state.value, Layout.CHANNELS_FIRST) for state in graph.states}
    infer = label(table, programs.infer, graph.infer_inputs, options, states)
    operations = _chosen(options, train) | _chosen(options, infer)
    return Choices(programs.train, programs.infer, operations, states, train.total_us, infer.total_us)


def _horizontally_fused(table: CandidateTable, choices: Choices, updates: bool) -> Choices:
    """Return the choices with small operations of one kind fused horizontally."""
    step, inference = (
        fuse_horizontally(table, program, choices.operations, updates) for program in (choices.train, choices.infer)
    )
    operations = {**choices.operations, **step.choices, **inference.choices}
    return Choices(
        step.program,
        inference.program,
        operations,
        choices.states,
        choices.train_us - step.saved_us,
        choices.infer_us - inference.saved_us,
    )


def best_within(fronts: Mapping[tuple[Layout, ...], ParetoFront], limit_bytes: int) -> Options:
    """Return the fastest point within the limit in each layout.

    Where no layout has a point within the limit, return the points that need least.
    """
    if limit_bytes >= UNLIMITED_BYTES:
        return {layouts: front[-1] for layouts, front in fronts.items()}
    limit_bytes = max(limit_bytes, least_workspace_bytes(fronts))
    options: dict[tuple[Layout, ...], Point] = {}
    for layouts, front in fronts.items():
        within = [point for point in front if point.workspace_bytes <= limit_bytes]
        if within:
            options[layouts] = within[-1]
    return options


def check_limit(table: CandidateTable, limit_bytes: int) -> None:
    """Raise MBC201 unless every operation has a candidate within a workspace limit that the user set.

    Raises:
        MbcError: MBC201, with the least limit that suffices for all, and the settings that exclude smaller candidates.
    """
    operations = [o for o in (*table.graph.train, *table.graph.infer) if not kind_of(o).view]
    least = {o: least_workspace_bytes(table.fronts(o)) for o in operations}
    operation = max(operations, key=lambda o: least[o])
    if least[operation] <= limit_bytes:
        return
    needed, limit = show_distinct(least[operation], limit_bytes)
    raise MbcError(
        "MBC201",
        f"'{operation.name}' needs {needed} of workspace, but the limit is {limit}; "
        f"no kernel with less is allowed by {', '.join(table.rules.excluding())}",
        f"raise --workspace-limit to at least {show_enough(least[operation])}",
        operation.span,
    )


def _chosen(options: Mapping[str, Options], labelling: Labelling) -> dict[str, Choice]:
    return {name: Choice(layouts, options[name][layouts]) for name, layouts in labelling.operations.items()}

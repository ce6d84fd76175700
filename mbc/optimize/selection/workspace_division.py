"""Workspace division: one total divided among all operations of a program.

It solves micro-cuDNN's integer program (Oyama et al. 2018): choose one point of the Pareto front of every operation,
with the sum of workspaces within the total, at the least time. Layouts are chosen first, by pricing workspace
(Lagrangian relaxation): at the lowest price at which the cheapest labelling keeps to the total. Under these layouts the
division is exact, by CP-SAT with one worker and a deterministic limit, so that the same input gives the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mbc.errors import MbcError
from mbc.hardware.streams import ALIGNMENT_BYTES, aligned
from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.ops.fused import kind_of
from mbc.optimize import effort
from mbc.optimize.candidates.pareto import ParetoFront, Point
from mbc.optimize.candidates.table import CandidateTable, least_workspace_bytes
from mbc.optimize.selection.layout_mincut import label
from mbc.units import show_distinct, show_enough

_UNITS_PER_US = 1000

_Menus = Mapping[str, Mapping[tuple[Layout, ...], ParetoFront]]


def divide_workspace(
    table: CandidateTable, program: tuple[Operation, ...], inputs: tuple[str, ...], total_bytes: int
) -> Mapping[str, int]:
    """Return the workspace of each operation by name.

    Args:
        table: Candidates of the graph.
        program: Operations in order.
        inputs: Values that exist before the program.
        total_bytes: Bytes that all workspaces may take together.

    Raises:
        MbcError: MBC201, if not even the smallest workspaces fit together.
    """
    fronts = {o.name: table.fronts(o) for o in program if not kind_of(o).view}
    least_bytes = sum(aligned(least_workspace_bytes(front)) for front in fronts.values())
    if least_bytes > total_bytes:
        needed, total = show_distinct(least_bytes, total_bytes)
        raise MbcError(
            "MBC201",
            f"the operations of '{table.graph.name}' need {needed} of workspace together, but the total is {total}",
            f"raise --workspace-total to at least {show_enough(least_bytes)}",
        )
    layouts = _settled_layouts(table, program, inputs, fronts, total_bytes)
    return fastest_division({name: fronts[name][chosen] for name, chosen in layouts.items()}, total_bytes)


def _settled_layouts(
    table: CandidateTable, program: tuple[Operation, ...], inputs: tuple[str, ...], fronts: _Menus, total_bytes: int
) -> Mapping[str, tuple[Layout, ...]]:
    """Return the layouts at the lowest price of workspace at which the total is kept."""

    def at(price: float) -> tuple[Mapping[str, tuple[Layout, ...]], int]:
        priced = {
            name: {layouts: _cheapest(front, price) for layouts, front in by_layouts.items()}
            for name, by_layouts in fronts.items()
        }
        chosen = label(table, program, inputs, priced).operations
        taken = sum(aligned(priced[name][layouts].workspace_bytes) for name, layouts in chosen.items())
        return chosen, taken

    chosen, taken = at(0.0)
    if taken <= total_bytes:
        return chosen
    low, high = 0.0, effort.MAX_US_PER_BYTE
    fitting, _ = at(high)
    for _ in range(effort.PRICE_BISECTIONS):
        price = (low + high) / 2
        chosen, taken = at(price)
        if taken <= total_bytes:
            fitting, high = chosen, price
        else:
            low = price
    return fitting


def _cheapest(front: ParetoFront, price: float) -> Point:
    """Return the best point where a byte of workspace costs `price` microseconds; its time includes the price."""
    best = min(front, key=lambda point: point.time_us + price * aligned(point.workspace_bytes))
    return replace(best, time_us=best.time_us + price * aligned(best.workspace_bytes))


def fastest_division(fronts: Mapping[str, ParetoFront], total_bytes: int) -> Mapping[str, int]:
    """Return the workspaces of the least total time within `total_bytes`; the solution is exact.

    Raises:
        MbcError: MBC201, if even the smallest workspaces exceed the total.
    """
    from ortools.sat.python import cp_model  # heavy, and only needed here

    model = cp_model.CpModel()
    times: list[cp_model.LinearExprT] = []
    sizes: list[cp_model.LinearExprT] = []
    literals: dict[str, list[cp_model.IntVar]] = {}
    for name, front in fronts.items():
        literals[name] = [model.new_bool_var(f"{name}.{i}") for i in range(len(front))]
        model.add_exactly_one(literals[name])
        for literal, point in zip(literals[name], front, strict=True):
            times.append(round(point.time_us * _UNITS_PER_US) * literal)
            sizes.append(aligned(point.workspace_bytes) // ALIGNMENT_BYTES * literal)
    model.add(sum(sizes) <= total_bytes // ALIGNMENT_BYTES)
    model.minimize(sum(times))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort.KNAPSACK_DETERMINISTIC_TIME
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # The layouts chosen by price exceed the total even with their smallest workspaces.
        raise MbcError("MBC201", "no division of the workspace total fits all operations", "raise --workspace-total")
    return {
        name: next(
            point.workspace_bytes for literal, point in zip(choices, fronts[name], strict=True) if solver.value(literal)
        )
        for name, choices in literals.items()
    }

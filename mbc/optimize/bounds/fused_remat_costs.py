"""The least additional time of fused rematerialization, for the lower bound within a budget.

`mbc.optimize.remat.fused_remat` describes the technique.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mbc.ir.graph import Operation
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.ops.fused import names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion


def fused_remat_costs(fusion: Fusion, launches: Iterable[Operation]) -> Mapping[str, float]:
    """Return for each value the least additional microseconds of a launch of reductions that recomputes it.

    Args:
        fusion: Fused rematerializations of the step.
        launches: All launches that a step without a limit may contain.
    """
    reductions: dict[str, list[Operation]] = {}
    for launch in launches:
        reductions.setdefault(names_of(launch)[-1], []).append(launch)
    costs_us: dict[str, float] = {}
    for fused_remat in fusion.fused_remats:
        name = names_of(fused_remat.operation)[-1]
        replaced = tuple(filter(fused_remat.can_replace, reductions.get(name, ())))
        more_us = _more_us(fusion.table, fused_remat.operation, replaced)
        costs_us[fused_remat.value] = min(costs_us.get(fused_remat.value, math.inf), more_us)
    return costs_us


def _more_us(table: CandidateTable, fused_remat: Operation, replaced: Sequence[Operation]) -> float:
    """Return the least additional time of a launch over the one that it replaces; infinite if it cannot run.

    The replaced launch is any of `replaced` with the same layouts: with other layouts, the step without a limit would
    be a different one.
    """
    least_us = math.inf
    for candidate in table.offered(fused_remat):
        layouts = _layouts(fused_remat, candidate)
        times_us = (
            other.time_us
            for launch in replaced
            for other in table.offered(launch)
            if all(layouts.get(name, layout) == layout for name, layout in _layouts(launch, other).items())
        )
        least_us = min(least_us, max(0.0, candidate.time_us - min(times_us, default=-math.inf)))
    return least_us


def _layouts(launch: Operation, candidate: Candidate) -> Mapping[str, Layout]:
    return dict(zip((*launch.inputs, *launch.outputs), candidate.layouts, strict=True))

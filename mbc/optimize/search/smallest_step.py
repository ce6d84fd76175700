"""The smallest step that quick searches find, whatever the budget: a budget that it fits is never refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from mbc.optimize import effort
from mbc.optimize.fusion.select_groups import plain
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.schedule.choose_buckets import Buckets
from mbc.optimize.search.fit_budget import movable_bytes, posed
from mbc.optimize.search.limits import Limits
from mbc.optimize.search.reclaim_workspace import Decided
from mbc.optimize.search.solution import Problem, Solution
from mbc.optimize.search.variants import undecided
from mbc.optimize.selection.selector import Selector
from mbc.options import UNLIMITED_BYTES


def smallest_step(
    selector: Selector, limits: Limits, techniques: AllowedTechniques, buckets: Buckets | None
) -> Solution | None:
    """Return the smallest step that quick searches for a few sizes find; None if no technique saves memory.

    The sizes are slightly above the lower bound of live bytes: far below it, a search gives up the wrong values.

    Args:
        selector: Choices for the graph.
        limits: All limits; the budget does not count.
        techniques: Techniques that may be used.
        buckets: Gradient buckets; None if there is one rank.
    """
    if not techniques.recompute and techniques.offload <= 0:
        return None
    table, moved_bytes = selector.table, movable_bytes(selector.table, techniques)
    trials = [techniques]
    if moved_bytes and techniques.offload > 0:
        trials.append(replace(techniques, states_bytes=moved_bytes))

    def problem(available_bytes: int, is_fused: bool) -> Problem:
        held_bytes = int(effort.HELD_SHARE * available_bytes)
        groups = selector.fastest_fused(limits.operation_bytes, held_bytes) if is_fused else None
        workspaces = limits.of_workspaces(table, groups or plain(table.graph))
        return Problem(selector, workspaces, available_bytes, groups, buckets=buckets)

    def steps() -> Iterator[Decided]:
        for trial in trials:
            least_bytes = undecided(posed(problem(UNLIMITED_BYTES, True), trial), trial, 0).least_bytes
            for share, is_fused in product(effort.SMALLEST_SHARES, (True, False)):
                here = posed(problem(int(share * least_bytes), is_fused), trial)
                step = undecided(here, trial, 0)
                yield Decided(here, step.quickly_searched(math.inf).residency.draft, step.choices, step.divided)

    count = max(2, effort.VARIANTS_WORK // len(table.graph.train))
    values = [(step, assign_addresses(step.draft, thorough=False)) for step in islice(steps(), count)]
    step, placed = min(values, key=lambda value: value[1].arena_bytes)
    placed = min(placed, assign_addresses(step.draft), key=lambda one: one.arena_bytes)
    within = replace(step, problem=replace(step.problem, available_bytes=placed.arena_bytes))
    fast, _ = within.placed(0)
    return fast if within.problem.fits(fast) else Solution(step.draft, placed, selector)

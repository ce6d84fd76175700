"""Steps that keep every value in the arena: the first that are tried within a budget."""

from __future__ import annotations

from mbc.optimize import effort
from mbc.optimize.placement.assign_addresses import assign_addresses
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.schedule.in_place import alias_in_place
from mbc.optimize.search.solution import Problem, Solution, free_bytes, scheduled_draft
from mbc.optimize.search.variants import Undecided


def may_keep_all(step: Undecided) -> bool:
    """Return whether all values of a step fit the available bytes together, without workspace."""
    graph, choices = step.problem.table.graph, step.choices
    draft = alias_in_place(graph, step.draft, (*choices.train, *choices.infer))
    return min(free_bytes(draft, step.problem.available_bytes).values()) >= 0


def kept_step(problem: Problem, techniques: AllowedTechniques, is_needed: bool) -> Solution | None:
    """Return a step that keeps every value, with updates split only where it does not fit otherwise.

    `is_needed` is the argument of `_keep_all`.
    """
    kept = _keep_all(problem, techniques, None, is_needed=False)
    if kept is not None and problem.fits(kept):
        return kept
    return _keep_all(problem, techniques, problem.available_bytes, is_needed)


def _keep_all(
    problem: Problem, techniques: AllowedTechniques, split_bytes: int | None, is_needed: bool
) -> Solution | None:
    """Return a step that keeps every value, with less workspace where it does not fit.

    Args:
        problem: The step and its available bytes.
        techniques: Techniques that may be used.
        split_bytes: `scheduled_draft`'s argument `available_bytes`.
        is_needed: Whether the step is placed even if its values alone exceed the available bytes; if not, the result is
            then None.
    """
    table, workspace_limits, available_bytes = problem.table, problem.workspace_limits, problem.available_bytes
    limits = workspace_limits
    spared_bytes = 0  # fragmentation: bytes that placement leaves unused
    smallest: Solution | None = None
    for _ in range(effort.KEEP_ALL_ROUNDS):
        choices = problem.choose(limits)
        draft = alias_in_place(
            table.graph, scheduled_draft(problem, choices, techniques, split_bytes), (*choices.train, *choices.infer)
        )
        free = free_bytes(draft, available_bytes - spared_bytes)
        hopeless = min(free.values()) < 0
        if hopeless and (smallest is not None or not is_needed):
            break
        placed = assign_addresses(draft, available_bytes, thorough=not hopeless)
        if placed.arena_bytes <= available_bytes:
            return Solution(draft, placed, problem.selector)
        if smallest is None or placed.arena_bytes < smallest.placed.arena_bytes:
            smallest = Solution(draft, placed, problem.selector)
        if placed.live_bytes <= available_bytes:
            spared_bytes += placed.arena_bytes - available_bytes
            free = free_bytes(draft, available_bytes - spared_bytes)
        # Where values alone exceed the available bytes, no workspace is small enough.
        tighter = {name: min(limit, max(0, free.get(name, limit))) for name, limit in workspace_limits.items()}
        if tighter == limits or min(free.values()) < 0:
            break
        limits = tighter
    return smallest

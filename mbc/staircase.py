"""What each technique contributes: the same network planned with techniques left out one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.errors import BudgetError, MbcError
from mbc.fit import Figures, figures
from mbc.options import STAIRCASE
from mbc.plan.model import Plan

MOST_TRIES = 4

PlanWith = Callable[[frozenset[str], int | None], Plan]  # techniques left out; budget in bytes, None: as asked


@dataclass(frozen=True, slots=True)
class Stair:
    """`figures` of the plan without these techniques; where it does not fit (`fits`), of one as small as was found.
    None where there is none at all, for the reason `refusal`."""

    without: frozenset[str]
    figures: Figures | None
    fits: bool
    refusal: MbcError | None = None


def staircase(plan_with: PlanWith, without: frozenset[str] = frozenset()) -> tuple[Stair, ...]:
    """All techniques but `without`, then one fewer each time, in the order of STAIRCASE. Raises what planning raises,
    but for budgets that are too small."""
    stairs = [_stair(plan_with, without)]
    for technique in STAIRCASE:
        if technique not in without:
            without |= {technique}
            stairs.append(_stair(plan_with, without))
    return tuple(stairs)


def _stair(plan_with: PlanWith, without: frozenset[str]) -> Stair:
    budget_bytes: int | None = None
    refusal: BudgetError | None = None
    for _ in range(MOST_TRIES):
        try:
            return Stair(without, figures(plan_with(without, budget_bytes)), budget_bytes is None, refusal)
        except BudgetError as error:
            # The smallest plan that was found is one within the budget that it needs.
            refusal, budget_bytes = error, error.needed_bytes
    return Stair(without, None, False, refusal)

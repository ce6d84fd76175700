"""Cumulative ablation: a network is planned several times, each time with one more technique left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.errors import BudgetError, MbcError
from mbc.fit import Figures, figures
from mbc.options import ABLATION_ORDER
from mbc.plan.model import Plan

MOST_TRIES = 4

PlanWith = Callable[[frozenset[str], int | None], Plan]  # (techniques left out, budget in bytes or None for the user's)


@dataclass(frozen=True, slots=True)
class Ablation:
    """One plan of an ablation, without the techniques in `without`.

    If the plan does not fit the budget (`fits`), `figures` describe the smallest plan that the search has. If there is
    no plan, `figures` is None and `refusal` has the reason.
    """

    without: frozenset[str]
    figures: Figures | None
    fits: bool
    refusal: MbcError | None = None


def ablation(plan_with: PlanWith, without: frozenset[str] = frozenset()) -> tuple[Ablation, ...]:
    """Plan with all techniques but `without`, then with one technique fewer each time, in the order of ABLATION_ORDER.

    Raises:
        MbcError: An error of planning other than a budget that is too small.
    """
    ablations = [_ablated(plan_with, without)]
    for technique in ABLATION_ORDER:
        if technique not in without:
            without |= {technique}
            ablations.append(_ablated(plan_with, without))
    return tuple(ablations)


def _ablated(plan_with: PlanWith, without: frozenset[str]) -> Ablation:
    budget_bytes: int | None = None
    refusal: BudgetError | None = None
    for _ in range(MOST_TRIES):
        try:
            return Ablation(without, figures(plan_with(without, budget_bytes)), budget_bytes is None, refusal)
        except BudgetError as error:
            # The smallest plan that was found fits the budget that it needs.
            refusal, budget_bytes = error, error.needed_bytes
    return Ablation(without, None, False, refusal)

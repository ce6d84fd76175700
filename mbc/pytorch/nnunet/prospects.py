"""Predictions of nnU-Net's configurations within a budget: the step, the least budget, the largest batch or patch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.errors import BudgetError, MbcError
from mbc.fit import NOTHING_FITS, Batches, Figures, PlanAt, Probe, Search, largest_count, with_batch, with_budget
from mbc.options import Options
from mbc.plan.model import Plan
from mbc.pytorch.nnunet.network_settings import patches, settings_of
from mbc.pytorch.nnunet.plans_file import Configuration, Dataset, Sizes

STEPS = 250  # of an epoch of nnU-Net
LEAST_BUDGET_RATIO = 1.25  # of the least budget with a plan over a budget without one

PlanWith = Callable[[Options, str], Plan]


@dataclass(frozen=True, slots=True)
class Prospect:
    """Predictions of a configuration.

    Attributes:
        configuration: The configuration of the plans file.
        probe: The plan of the configuration as it is, or the reason why there is none.
        least: The plan within the least budget; None if not asked for, or if the GPU has too little memory for any.
        largest: The plan of the largest batch or patch within the budget; None if not asked for.
        patch: The patch of `largest`.
    """

    configuration: Configuration
    probe: Probe
    least: Figures | None
    largest: Figures | None = None
    patch: Sizes = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question about configurations.

    Attributes:
        dataset: The data set.
        options: Further options, whose settings replace those of the configuration.
        budget_bytes: The budget.
        memory_bytes: Memory of the GPU.
        largest: `batch` or `patch` if its largest within the budget is asked for.
        least: Whether the least budget is asked for.
    """

    dataset: Dataset
    options: Options
    budget_bytes: int
    memory_bytes: int
    largest: str | None = None
    least: bool = True


def judge(
    configuration: Configuration, question: Question, plan: PlanWith, tell: Callable[[str, Probe], None]
) -> Prospect:
    """Return the predictions of a configuration.

    Args:
        configuration: The configuration.
        question: The budget and further questions.
        plan: Plans with options; the text says what is planned.
        tell: Receives the name of each probe and the probe.

    Raises:
        MbcError: An error that occurs with any budget.
    """
    name = f"{configuration.plans} {configuration.name}"
    own = dict(question.options.settings)
    kept = tuple(one for one in settings_of(configuration, question.dataset) if one[0] not in own)
    options = replace(question.options, settings=(*kept, *question.options.settings))
    within = with_budget(options, question.budget_bytes)

    def searched(plan_at: PlanAt, what: str, of_budgets: bool = False) -> Search:
        return Search(plan_at, {}, lambda probe: tell(f"{name}, {what}", probe), of_budgets)

    budgets = searched(lambda at: plan(with_budget(options, at), name), "within", of_budgets=True)
    least = least_budget(budgets, question.budget_bytes, question.memory_bytes) if question.least else None
    # The refusal of the first probe names the smallest plan of the search for the least budget.
    prospect = Prospect(configuration, budgets.probe(question.budget_bytes), least)
    try:
        if question.largest == "batch":
            search = searched(lambda at: plan(with_batch(within, at), f"{name}, batch {at}"), "batch")
            figures = search.probe(largest_count(search, Batches(configuration.batch))).figures
            return replace(prospect, largest=figures, patch=configuration.patch)
        if question.largest == "patch":
            sizes = patches(configuration)

            def with_patch(at: int) -> Plan:
                settings = (*(s for s in within.settings if s[0] != "patch"), ("patch", str(sizes[at - 1])))
                return plan(replace(within, settings=settings), f"{name}, patch {sizes[at - 1]}")

            search = searched(with_patch, "patch number")
            count = largest_count(search, Batches(sizes.index(configuration.patch) + 1, most=len(sizes)))
            return replace(prospect, largest=search.probe(count).figures, patch=sizes[count - 1])
    except MbcError as error:
        if error.code != NOTHING_FITS:
            raise
    return prospect


def least_budget(search: Search, budget_bytes: int, most_bytes: int) -> Figures | None:
    """Return the plan within the smallest budget for which the search finds a plan.

    A refusal may name the size of the smallest step, as `mbc compile` does; then that size is this budget. Otherwise
    the gap to the lower bound is halved until no plan is found within the budget divided by LEAST_BUDGET_RATIO.

    Args:
        search: Plans by budgets.
        budget_bytes: First budget to try.
        most_bytes: Largest budget to try; None is returned if no plan fits it.

    Raises:
        MbcError: A plan is refused for another reason than its budget.
    """

    def refused(at: int) -> BudgetError | None:
        refusal = search.probe(at).refusal
        if refusal is not None and not isinstance(refusal, BudgetError):
            raise refusal
        return refusal

    low, high, is_smallest = 0, budget_bytes, False
    while (refusal := refused(high)) is not None:
        if high == most_bytes:
            return None
        further = max(high + 1, refusal.needed_bytes if refusal.is_planned else 2 * refusal.floor_bytes)
        low, high = high, min(further, most_bytes)
        is_smallest = refusal.is_certain and further == high
    fitting = _figures(search, high)
    low = max(low, fitting.floor_bytes - 1)
    if LEAST_BUDGET_RATIO * fitting.needed_bytes < high and refused(fitting.needed_bytes) is None:
        high = fitting.needed_bytes
    while high > LEAST_BUDGET_RATIO * low and not is_smallest:
        at = math.isqrt(low * high)
        refusal = refused(at)
        if refusal is None:
            high = at
            continue
        low, is_smallest = at, refusal.is_certain
        less = refusal.needed_bytes < high if is_smallest else LEAST_BUDGET_RATIO * refusal.needed_bytes < high
        if less and refused(refusal.needed_bytes) is None:
            high = refusal.needed_bytes
    return _figures(search, high)


def _figures(search: Search, at: int) -> Figures:
    figures = search.probe(at).figures
    assert figures is not None
    return figures

"""The time of a predicted step, its range, and its measured share, for one plan and for two that are compared."""

from __future__ import annotations

from mbc.optimize.schedule.step_time import step_us
from mbc.plan.model import Plan
from mbc.report.tables import measured_percent, time_cell
from mbc.units import show_range

UNLIKE_SHARES = 0.3  # difference of measured shares above which errors are independent


def range_us(plan: Plan) -> tuple[float, float]:
    """Return the range of the whole step, scaled from that of its last mini-batch, which the training program runs."""
    p = plan.predictions
    ratio = step_us(plan) / p.train_us if p.train_us else 1.0
    return ratio * p.train_low_us, ratio * p.train_high_us


def range_text(low_us: float, high_us: float, measured_share: float) -> str:
    """Format a range such as `5.70 to 6.41 ms; 73 % of it measured`."""
    return f"{show_range(low_us, high_us)}; {measured_percent(measured_share)} of it measured"


def step_text(plan: Plan) -> str:
    """Format a step such as `~5.92 ms (5.70 to 6.41 ms; 73 % of it measured)`."""
    share = plan.predictions.measured_share
    return f"{time_cell(step_us(plan), share < 1)} ({range_text(*range_us(plan), share)})"


def unlike_estimates(plans: tuple[Plan, Plan]) -> bool:
    """Return whether the errors of two predictions are largely independent.

    They are for different GPUs or profiles, or where the measured shares of the steps differ much. Plans by one profile
    have similar errors, so their comparison is more exact than their ranges.
    """
    before, after = plans
    shares = [plan.predictions.measured_share for plan in plans]
    other = (before.target.gpu, before.target.profile) != (after.target.gpu, after.target.profile)
    return min(shares) < 1 and (other or abs(shares[0] - shares[1]) >= UNLIKE_SHARES)


def compared_steps(plans: tuple[Plan, Plan], titles: tuple[str, str]) -> str:
    """Say in one sentence which of two plans is faster, or why that is unknown."""
    if untimed := [title for plan, title in zip(plans, titles, strict=True) if not plan.is_timed]:
        named = f"{' and '.join(untimed)} {'are' if untimed[1:] else 'is'}"
        return f"The plans cannot be compared by time: {named} in fp64, which is for the CPU."
    old, new = (step_us(plan) for plan in plans)
    times = " and ".join(f"{step_text(plan)} by {title}" for plan, title in zip(plans, titles, strict=True))
    (low, high), (other_low, other_high) = map(range_us, plans)
    if unlike_estimates(plans) and low <= other_high and other_low <= high:
        return f"It is unknown which plan is faster: the step takes {times}, and these ranges overlap."
    share = f": {100 * (new / old - 1):+.2f} %" if old else ""
    return f"The step takes {times}{share}."

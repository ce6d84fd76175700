"""The time of a step that accumulates the gradients of several mini-batches."""

from __future__ import annotations

from mbc.optimize.schedule.simulate import simulate
from mbc.plan.accumulation import accumulating
from mbc.plan.model import Plan


def accumulate_us(plan: Plan) -> float:
    """Return the predicted time of a mini-batch that is not the last of its step; 0 if each is the last.

    The training program is predicted for the last mini-batch. The result is the share of that time that the launches of
    an earlier mini-batch take.
    """
    part = accumulating(plan)
    whole_us = 0.0 if part is None else simulate(plan.train)
    return 0.0 if part is None or not whole_us else plan.predictions.train_us * simulate(part) / whole_us


def step_us(plan: Plan) -> float:
    """Return the predicted time of all mini-batches of a step."""
    return plan.predictions.train_us + (plan.graph.optimizer.accumulate - 1) * accumulate_us(plan)


def samples_per_s(plan: Plan) -> float:
    """Return the rows per second of all ranks that share the step; 0 if the step has no predicted time."""
    whole_us = step_us(plan)
    return plan.graph.optimizer.accumulate * plan.graph.global_batch * 1e6 / whole_us if whole_us else 0.0

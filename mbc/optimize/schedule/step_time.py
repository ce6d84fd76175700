"""How long a step takes that accumulates the gradients of several mini-batches."""

from __future__ import annotations

from mbc.optimize.schedule.simulate import simulate
from mbc.plan.accumulation import accumulating
from mbc.plan.model import Plan


def accumulate_us(plan: Plan) -> float:
    """Of a mini-batch that is not the last of its step, which the training program is predicted for: what its launches
    take of that. 0 where each mini-batch is the last."""
    part = accumulating(plan)
    whole_us = 0.0 if part is None else simulate(plan.train)
    return 0.0 if part is None or not whole_us else plan.predictions.train_us * simulate(part) / whole_us


def step_us(plan: Plan) -> float:
    """Of all mini-batches of a step."""
    return plan.predictions.train_us + (plan.graph.optimizer.accumulate - 1) * accumulate_us(plan)


def samples_per_s(plan: Plan) -> float:
    """Rows a second of all ranks that share the step; 0 where it is not timed."""
    whole_us = step_us(plan)
    return plan.graph.optimizer.accumulate * plan.graph.global_batch * 1e6 / whole_us if whole_us else 0.0

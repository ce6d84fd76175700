"""Device memory in which the inputs of the next step arrive from the host while this step runs."""

from __future__ import annotations

from mbc.ir.types import Precision
from mbc.plan.live import rounded
from mbc.plan.model import Plan


def input_bytes(plan: Plan) -> int:
    """Of every input of a step, as it lies in the arena."""
    return sum(rounded(plan.graph.values[name].type.size_bytes) for name in plan.graph.inputs)


def prefetch_bytes(plan: Plan) -> int:
    """What a module takes beside the arena for prefetching: each input once more, where the budget has room for it
    beside arena and overhead; else 0, and inputs wait for the step before."""
    if plan.graph.precision is Precision.FP64:
        return 0  # runs on the CPU only
    predicted, wanted = plan.predictions, input_bytes(plan)
    return wanted if predicted.arena_bytes + predicted.overhead_bytes + wanted <= plan.budget_bytes else 0

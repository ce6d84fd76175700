"""Device memory in which the inputs of the next step arrive from the host while this step runs."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.plan.live import rounded
from mbc.plan.model import Plan


def input_bytes(graph: TrainingGraph) -> int:
    """Of every input of a step, as it lies in the arena."""
    return sum(rounded(graph.values[name].type.size_bytes) for name in graph.inputs)


def ahead_bytes(graph: TrainingGraph, available_bytes: int) -> int:
    """A second copy of each input, where `available_bytes` hold all of them; else 0, and inputs wait for the step
    before."""
    if graph.precision is Precision.FP64:
        return 0  # runs on the CPU only
    wanted = input_bytes(graph)
    return wanted if wanted <= available_bytes else 0


def prefetch_bytes(plan: Plan) -> int:
    """What a module takes outside the arena for prefetching, where the budget is large enough for it besides arena and
    overhead."""
    return ahead_bytes(plan.graph, plan.arena_budget_bytes - plan.predictions.arena_bytes)

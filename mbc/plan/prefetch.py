"""Device memory in which the inputs of the next step arrive from the host while this step runs."""

from __future__ import annotations

from mbc.ir.graph import TrainingGraph
from mbc.plan.live import rounded
from mbc.plan.model import Plan


def input_bytes(graph: TrainingGraph) -> int:
    """Return the bytes of all inputs of a step, each rounded up as in the arena."""
    return sum(rounded(graph.values[name].type.size_bytes) for name in graph.inputs)


def ahead_bytes(graph: TrainingGraph, available_bytes: int) -> int:
    """Return the bytes for a second copy of each input if `available_bytes` suffice, else 0.

    Without a second copy, the inputs of a step are copied after the step before it.
    """
    if not graph.precision.runs_on_gpus:
        return 0  # fp64 runs on the CPU only
    wanted = input_bytes(graph)
    return wanted if wanted <= available_bytes else 0


def prefetch_bytes(plan: Plan) -> int:
    """Return the bytes outside the arena that a module uses to prefetch inputs.

    They are 0 if the budget does not suffice for them besides arena and overhead.
    """
    return ahead_bytes(plan.graph, plan.arena_budget_bytes - plan.predictions.arena_bytes)

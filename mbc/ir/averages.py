"""Exponential moving averages of weights: each is a state of its own, named after its weight."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.ir.graph import Role, TrainingGraph

_SUFFIX = ".ema"


def average_name(weight: str) -> str:
    """Return the name of the moving average of a parameter or statistic."""
    return weight + _SUFFIX


def averages_of(graph: TrainingGraph) -> Mapping[str, str]:
    """Return the moving average of each weight that has one, by the weight's name, in the order of the states.

    Frozen parameters have none, because their average equals the parameter.
    """
    weights = [s.value for s in graph.states if graph.values[s.value].role in (Role.PARAMETER, Role.STATISTIC)]
    if not graph.optimizer.ema:
        return {}
    return {weight: average_name(weight) for weight in weights if average_name(weight) in graph.values}

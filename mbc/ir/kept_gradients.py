"""Names of the states that hold gradients in a step without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.ir.graph import NO_OPTIMIZER, Role, TrainingGraph

_PREFIX = "gradient."


def gradient_name(parameter: str) -> str:
    """Return the name of the state that holds a parameter's gradient."""
    return f"{_PREFIX}{parameter}"


def gradients_of(graph: TrainingGraph) -> Mapping[str, str]:
    """Return the state of each parameter's gradient, by the parameter; empty for a step with an optimizer."""
    if graph.optimizer.kind != NO_OPTIMIZER:
        return {}
    held = [state.value for state in graph.states if graph.values[state.value].role is Role.GRADIENT]
    return {name.removeprefix(_PREFIX): name for name in held}

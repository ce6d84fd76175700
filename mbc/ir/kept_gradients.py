"""Names of the states that hold gradients in a step without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.errors import MbcError
from mbc.ir.graph import NO_OPTIMIZER, Optimizer, Role, TrainingGraph, Value
from mbc.ir.parameter_groups import is_trained
from mbc.ir.types import DType

_PREFIX = "gradient."


def has_gradient(optimizer: Optimizer, value: Value) -> bool:
    """Return whether a step computes the gradient of a value: a trained parameter, or an input if asked for."""
    is_input = value.role is Role.INPUT and value.type.dtype not in (DType.INT32, DType.UINT8)
    return is_trained(optimizer, value) or (optimizer.input_gradients and is_input)


def check_updates(optimizer: Optimizer, command: str) -> None:
    """Raise MBC068 if a command would train a network whose steps change no parameter.

    Raises:
        MbcError: MBC068.
    """
    if optimizer.kind == NO_OPTIMIZER:
        raise MbcError(
            "MBC068", f"{command} trains, but the network has optimizer = none", "--set train.optimizer=sgd sets one"
        )


def gradient_name(parameter: str) -> str:
    """Return the name of the state that holds the gradient of a parameter or input."""
    return f"{_PREFIX}{parameter}"


def gradients_of(graph: TrainingGraph) -> Mapping[str, str]:
    """Return the state of each kept gradient, by the parameter or input; empty for a step with an optimizer."""
    if graph.optimizer.kind != NO_OPTIMIZER:
        return {}
    held = [state.value for state in graph.states if graph.values[state.value].role is Role.GRADIENT]
    return {name.removeprefix(_PREFIX): name for name in held}

"""Hands the gradients of a planned step to PyTorch as its own backward pass would.

A parameter's `.grad` that lies in the plan's memory is added to in place; a missing one becomes a tensor over that
memory. In all other cases PyTorch gets a copy and accumulates it itself: behind hooks, with several processes, for
`torch.autograd.grad`, beside a gradient from elsewhere, and while somebody holds an earlier gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from mbc.pytorch.exported_model import PARAMETER_HOOKS
from mbc.pytorch.shared_states import SharedStates, is_own

torch: Any = importlib.import_module("torch")
_hooks: Any = attrgetter(*PARAMETER_HOOKS)


def finish(
    states: SharedStates, sinks: Sequence[Any], reached: Container[str], run: Callable[[bool], None]
) -> list[Any]:
    """Run the backward half, and return each trained parameter's gradient for PyTorch, None where it is in place.

    Args:
        states: The tensors that plan and model share.
        sinks: Nodes of PyTorch's graph; the last ones take the gradients of the trained parameters.
        reached: The states that get a gradient. PyTorch leaves the `.grad` of all others as they are, None included.
        run: Runs the backward half; it adds to the gradients in the plan's memory if its argument is true, and
            overwrites them otherwise.
    """
    trained = states.trained
    tensors = states.parameters()
    gradients = [tensor.grad for tensor in tensors]
    in_place = _may_write(tensors, sinks[len(sinks) - len(trained) :])
    rows = zip(in_place, gradients, trained, strict=True)
    added = [may and gradient is not None and is_own(gradient, shared) for may, gradient, shared in rows]
    overwritten = [number for number, adds in enumerate(added) if not adds]
    held = {number: trained[number].gradient.clone() for number in states.held() if not added[number]}
    if any(added):
        for tensor in (*(trained[number].gradient for number in overwritten), *states.inputs.values()):
            tensor.zero_()
        torch.autograd.graph.increment_version([tensors[n].grad for n, adds in enumerate(added) if adds])
    run(any(added))
    handed: list[Any] = [None] * len(trained)
    for number in overwritten:
        shared = trained[number]
        if shared.home.value in reached:
            if in_place[number] and gradients[number] is None and number not in held:
                tensors[number].grad = shared.given
                continue
            handed[number] = shared.gradient.clone()
        if number in held:
            shared.gradient.copy_(held[number])
    return handed


def _may_write(parameters: Sequence[Any], sinks: Sequence[Any]) -> list[bool]:
    """Return whether PyTorch would only store each parameter's gradient: no hook and no other process reads it."""
    nobody = [False] * len(parameters)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return nobody
    try:
        stored: list[bool] = list(map(torch._C._will_engine_execute_node, sinks))
    except RuntimeError:  # torch.autograd.grad takes the gradients itself
        return nobody
    hooks: list[tuple[Any, ...]] = list(map(_hooks, parameters))
    if not any(chain.from_iterable(hooks)):
        return stored
    return [stores and not any(both) for stores, both in zip(stored, hooks, strict=True)]

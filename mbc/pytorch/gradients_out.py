"""Hands the gradients of a planned step to PyTorch as its own backward pass would.

A parameter's `.grad` that lies in the plan's memory is added to in place; a missing one becomes a tensor over that
memory. In all other cases PyTorch gets a copy and accumulates it itself: behind hooks, with several processes, for
`torch.autograd.grad`, beside a gradient from elsewhere, and while somebody holds an earlier gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mbc.pytorch.exported_model import PARAMETER_HOOKS
from mbc.pytorch.shared_states import Shared, SharedStates, is_own

torch: Any = importlib.import_module("torch")


def finish(states: SharedStates, run: Callable[[bool], None]) -> list[Any]:
    """Run the backward half, and return each trained parameter's gradient for PyTorch, None where it is in place.

    Args:
        states: The tensors that plan and model share.
        run: Runs the backward half; it adds to the gradients in the plan's memory if its argument is true, and
            overwrites them otherwise.
    """
    in_place = [_may_write(shared) for shared in states.trained]
    added = [may and is_own(shared) for may, shared in zip(in_place, states.trained, strict=True)]
    overwritten = [shared for shared, adds in zip(states.trained, added, strict=True) if not adds]
    held = [(shared, shared.gradient.clone()) for shared in overwritten if shared.is_held]
    if any(added):
        for tensor in (*(shared.gradient for shared in overwritten), *states.inputs.values()):
            tensor.zero_()
    run(any(added))
    handed: list[Any] = []
    for shared, may, adds in zip(states.trained, in_place, added, strict=True):
        if adds:
            torch.autograd.graph.increment_version(shared.tensor.grad)
        elif may and shared.tensor.grad is None and not shared.is_held:
            shared.tensor.grad = states.give(shared)
        else:
            handed.append(shared.gradient.clone())
            continue
        handed.append(None)
    for shared, numbers in held:
        shared.gradient.copy_(numbers)
    return handed


def _may_write(shared: Shared) -> bool:
    """Return whether PyTorch would only store a parameter's gradient: no hook and no other process reads it."""
    parameter = shared.tensor
    if any(getattr(parameter, hooks, None) for hooks in PARAMETER_HOOKS):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad takes the gradient itself
        return False

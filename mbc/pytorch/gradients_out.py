"""Hands the gradients of a planned step to PyTorch as its own backward pass would.

A parameter's `.grad` that lies in the plan's memory is added to in place; a missing one becomes a tensor over that
memory. In all other cases PyTorch gets a copy and accumulates it itself: behind hooks, with several processes, for
`torch.autograd.grad`, beside a gradient from elsewhere, and while somebody holds an earlier gradient.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from mbc.pytorch.exported_model import PARAMETER_HOOKS
from mbc.pytorch.leaves import Leaves
from mbc.pytorch.shared_states import SharedStates, is_own

torch: Any = importlib.import_module("torch")
_grad: Callable[[Any], Any] = attrgetter("grad")
_hooks: Any = attrgetter(*PARAMETER_HOOKS)


def finish(states: SharedStates, leaves: Leaves, reached: frozenset[str], run: Callable[[bool], None]) -> list[Any]:
    """Run the backward half, and return each trained parameter's gradient for PyTorch, None where it is in place.

    Args:
        states: The tensors that plan and model share.
        leaves: The trained parameters in PyTorch's graph.
        reached: The states that get a gradient. PyTorch leaves the `.grad` of all others as they are, None included.
        run: Runs the backward half; it adds to the gradients in the plan's memory if its argument is true, and
            overwrites them otherwise.
    """
    trained, tensors = states.trained, leaves.parameters
    gradients = list(map(_grad, tensors))
    in_place, in_use = _may_write(leaves), states.held()
    if all(in_place) and not in_use and all(map(is_, gradients, repeat(None))) and states.names <= reached:
        run(False)  # the usual case, without a loop over the parameters in Python
        deque(map(setattr, tensors, repeat("grad"), states.given), maxlen=0)
        return gradients
    rows = zip(in_place, gradients, trained, strict=True)
    added = [may and gradient is not None and is_own(gradient, shared) for may, gradient, shared in rows]
    overwritten = [number for number, adds in enumerate(added) if not adds]
    held = {number: trained[number].gradient.clone() for number in in_use if not added[number]}
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


def _may_write(leaves: Leaves) -> list[bool]:
    """Return whether PyTorch would only store each parameter's gradient: no hook and no other process reads it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return [False] * len(leaves.parameters)
    stored = leaves.stored()
    hooks: list[tuple[Any, ...]] = list(map(_hooks, leaves.parameters))
    if not any(chain.from_iterable(hooks)):
        return stored
    return [stores and not any(both) for stores, both in zip(stored, hooks, strict=True)]

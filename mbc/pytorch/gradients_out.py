"""Hands the gradients of a planned step to PyTorch as its own backward pass would.

A parameter's `.grad` that lies in the plan's memory is added to in place; a missing one becomes a tensor over that
memory. In all other cases PyTorch gets a copy and accumulates it itself: behind hooks, with several processes, for
`torch.autograd.grad`, beside a gradient from elsewhere, and while somebody holds an earlier gradient.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from mbc.pytorch.leaves import Leaves
from mbc.pytorch.shared_states import SharedStates, is_own

torch: Any = importlib.import_module("torch")
_grad: Callable[[Any], Any] = attrgetter("grad")


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
    in_place, in_use = leaves.stored(), states.held()
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

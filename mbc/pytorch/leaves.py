"""The trained parameters of a model as one input of a planned step in PyTorch's graph.

PyTorch would make a node for each parameter whenever a step runs. Here the nodes of all parameters stay, behind one
node that each step takes in their place.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

from mbc.pytorch.compiled_model import current_stream
from mbc.pytorch.exported_model import PARAMETER_HOOKS

torch: Any = importlib.import_module("torch")
handles: Any = importlib.import_module("torch.utils.hooks").RemovableHandle
_hooks: Any = attrgetter(*PARAMETER_HOOKS)
_runs: Callable[[Any], bool] = torch._C._will_engine_execute_node


class Leaves:
    """The trained parameters, for one step at a time.

    Attributes:
        parameters: The parameters.
        tensor: The tensor that a step takes in their place; its value means nothing.
    """

    def __init__(self, parameters: Sequence[Any], device: str) -> None:
        """Make the nodes.

        Args:
            parameters: The parameters.
            device: Their device, on which PyTorch runs all nodes in one thread.
        """
        self.parameters = parameters
        self._handed: list[Any] = []
        self._stream = current_stream(device)  # on which PyTorch uses the gradients
        self._user: weakref.ref[Any] | None = None
        self._without_hooks = -1  # the number of hooks in this process for which no parameter had one
        every = torch.zeros((), device=device, requires_grad=True)
        self.tensor = _Leaves.apply(self._handed, every, *parameters)
        # PyTorch runs the first node unless a caller names the tensors whose gradients it wants.
        self._every, *self._sinks = (node for node, _ in self.tensor.grad_fn.next_functions)

    def lend(self, user: Any, parameters: Sequence[Any], device: str) -> bool:
        """Reserve the nodes for a step; return whether they are free and belong to these parameters.

        Args:
            user: The step's ticket, whose attribute `used` tells that the step has ended.
            parameters: The parameters that the model has now.
            device: Their device.
        """
        earlier = None if self._user is None else self._user()
        is_free = (earlier is None or earlier.used) and not self._handed and self._stream == current_stream(device)
        if not is_free or not all(map(is_, parameters, self.parameters)):
            return False
        self._user = weakref.ref(user)
        return True

    def stored(self) -> list[bool]:
        """Return, within a backward pass, for which parameters PyTorch only stores the gradient.

        No hook and no other process reads it.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return [False] * len(self._sinks)
        try:
            stored = [True] * len(self._sinks) if _runs(self._every) else list(map(_runs, self._sinks))
        except RuntimeError:  # torch.autograd.grad takes the gradients itself
            return [False] * len(self._sinks)
        if self._without_hooks != handles.next_id:
            hooked = [any(hooks) for hooks in map(_hooks, self.parameters)]
            if any(hooked):
                return [stores and not has_hook for stores, has_hook in zip(stored, hooked, strict=True)]
            self._without_hooks = handles.next_id
        return stored

    def hand(self, gradients: Sequence[Any]) -> None:
        """Hand the gradients of the parameters to PyTorch, within a backward pass of the step."""
        if _runs(self.tensor.grad_fn):
            self._handed[:] = gradients


class _Leaves(torch.autograd.Function):
    """The node of all parameters."""

    @staticmethod
    def forward(ctx: Any, handed: list[Any], every: Any, *_: Any) -> Any:
        """Return the tensor that stands for the parameters."""
        ctx.handed = handed
        ctx.set_materialize_grads(False)
        return torch.zeros_like(every)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        """Return the gradients that a step has left."""
        gradients = tuple(ctx.handed)
        ctx.handed.clear()
        return None, None, *gradients

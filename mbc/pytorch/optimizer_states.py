"""The state of a PyTorch optimizer as tensors over a plan's memory: momentum, Adam's moments and number of steps."""

from __future__ import annotations

import importlib
from itertools import chain
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.pytorch.shared_states import SharedStates, shaped
from mbc.runtime.module import Module

torch: Any = importlib.import_module("torch")
_KEYS = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}  # by the suffix of the plan's state


class OptimizerStates:
    """The tensors in `optimizer.state` of the parameters that a plan trains.

    Each has a storage of its own, of exactly its bytes. Tensors that PyTorch puts in their place, as `load_state_dict`
    does, are taken in at the next step. The plan counts Adam's steps; `count` tells PyTorch their number.
    """

    def __init__(self, optimizer: Any, module: Module, states: SharedStates) -> None:
        """Find the plan's tensors; `refresh` puts them into the optimizer, with the numbers that it has there, or 0."""
        self._optimizer, self._module = optimizer, module
        self._views: list[tuple[Any, str, Any, int]] = []  # parameter, key, tensor for mbc alone, its address
        adam: list[Any] = []
        for shared in states.shared:
            for suffix, key in _KEYS.items():
                place = module.places.get(f"{shared.home.value}.{suffix}")
                if place is not None:
                    self._add(shared.tensor, key, shaped(torch.from_dlpack(module.shared(place)), shared.view))
                    adam += [shared.tensor] if suffix == "m" else []
        self._counted, self._steps = -1.0, torch.full((len(adam),), -1.0)
        for parameter, step in zip(adam, self._steps, strict=True):
            self._add(parameter, "step", step)
        self._lent: dict[tuple[Any, str], Any] = {}  # what PyTorch was given, by parameter and key
        self._seen: object = None
        self._parted: list[tuple[Any, str, Any]] = []

    def _add(self, parameter: Any, key: str, view: Any) -> None:
        self._views.append((parameter, key, view, view.data_ptr()))

    def refresh(self) -> None:
        """Take in the tensors and numbers of steps that PyTorch has changed.

        Raises:
            MbcError: MBC335 for a tensor of another shape, and for parameters with different numbers of steps.
        """
        if self._look() == self._seen and bool((self._steps == self._counted).all()):
            return
        state = self._optimizer.state
        moved = [(p, key, view) for p, key, view, address in self._views if not _is_at(address, state.get(p), key)]
        for parameter, key, view in moved:
            given = state[parameter].get(key)
            if given is not None and given.shape != view.shape:
                _refuse(f"'{key}' of shape {list(given.shape)} for a parameter of shape {list(view.shape)}")
        self.count()
        for parameter, key, view in moved:
            given, before = state[parameter].get(key), self._lent.get((parameter, key))
            if before is not None:
                before.data = before.data.clone()  # a dict that somebody holds keeps its numbers
            view.fill_(0) if given is None else view.copy_(given)
            state[parameter][key] = self._lent[parameter, key] = view.detach()
        steps = sorted(set(self._steps.tolist()))
        if len(steps) > 1:
            _refuse(f"parameters after {steps[0]:g} and {steps[-1]:g} steps")
        if steps:
            (self._counted,) = steps
            self._module.set_control(updates=int(self._counted))
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[int]]:
        """Return which tensors the optimizer has, and where the plan's are: one of the lists differs after a change."""
        held = chain.from_iterable(map(dict[str, Any].values, self._optimizer.state.values()))
        return list(map(id, held)), list(map(torch.Tensor.data_ptr, self._lent.values()))

    def count(self, *_: object) -> None:
        """Write the plan's number of steps where PyTorch has not written another one; wait for the plan."""
        updates = self._module.control["updates"]
        self._steps[self._steps == self._counted] = updates
        self._counted = updates

    def part(self) -> None:
        """Copy the optimizer's tensors to host memory, and release the plan's memory; `settle` moves them back."""
        self.count()
        for parameter, key, _, address in self._views:
            held = self._optimizer.state.get(parameter)
            if _is_at(address, held, key):
                held[key].data = held[key].data.to("cpu", copy=True)
                self._parted.append((parameter, key, held[key]))
        self._views.clear()
        self._lent.clear()

    def settle(self) -> None:
        """Move the tensors of `part` to the devices that PyTorch uses; the model has been moved already."""
        group = self._optimizer.param_groups[0]
        on_host = not (group.get("fused") or group.get("capturable"))
        for parameter, key, tensor in self._parted:
            if key != "step":
                tensor.data = tensor.data.to(parameter.device, parameter.dtype)
            elif not on_host:
                tensor.data = tensor.data.to(parameter.device)
        self._parted.clear()


def _is_at(address: int, held: Any, key: str) -> bool:
    tensor = None if held is None else held.get(key)
    return tensor is not None and tensor.data_ptr() == address


def _refuse(what: str) -> NoReturn:
    raise MbcError("MBC335", f"the optimizer has {what}", "load the state of an optimizer of this model")

"""Parameters and statistics of a model, between torch's tensors and mbc's arena."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mbc.interchange.steps import Imported
from mbc.runtime.module import Module

torch: Any = importlib.import_module("torch")
_COUNTER = "num_batches_tracked"


class Hook:
    """Calls a method as long as its object lives. A copy of the model, pickled or not, has hooks that do nothing."""

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Weights:
    """`stale`: steps have changed the arena since it was last written into the model."""

    def __init__(self, model: Any, network: Imported, module: Module) -> None:
        self.stale = False
        self._model, self._network, self._module = model, network, module
        self._tracked = {key: int(array) for key, array in network.kept.items() if key.rpartition(".")[2] == _COUNTER}
        back, put_in = Hook(self.write_back), Hook(self.put_in)
        self._handles = (
            model.register_forward_pre_hook(back),
            model.register_state_dict_pre_hook(back),
            model.register_load_state_dict_pre_hook(back),  # what a partial dict leaves as it is
            model.register_load_state_dict_post_hook(put_in),
        )

    def write_back(self) -> None:
        """From the arena into the model, where it is stale."""
        if not self.stale:
            return
        found = self._tensors()
        updates = self._module.control["updates"]
        with torch.no_grad():
            for key in self._network.keys:
                if key.state:
                    array = np.ascontiguousarray(self._module.state(key.state))
                    found[key.name].copy_(torch.from_numpy(array).reshape(found[key.name].shape))
                elif key.kept in self._tracked:
                    found[key.name].fill_(self._tracked[key.kept] + updates)
        self.stale = False

    def put_in(self) -> None:
        """From the model into the arena."""
        found, shapes = self._tensors(), self._module.states
        self._module.load_state_dict(
            {
                key.state: found[key.name].detach().cpu().numpy().reshape(shapes[key.state])
                for key in self._network.keys
                if key.state
            }
        )
        updates = self._module.control["updates"]
        kept = {key.kept: key.name for key in self._network.keys if key.kept in self._tracked}
        self._tracked = {key: int(found[name]) - updates for key, name in kept.items()}
        self.stale = False

    def close(self) -> None:
        """Write the model back, and take the hooks off it."""
        try:
            self.write_back()
        finally:
            for handle in self._handles:
                handle.remove()

    def _tensors(self) -> dict[str, Any]:
        """Parameters and buffers by all of their names."""
        own = self._model
        return dict([*own.named_parameters(remove_duplicate=False), *own.named_buffers(remove_duplicate=False)])

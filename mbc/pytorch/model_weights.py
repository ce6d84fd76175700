"""Parameters and statistics of a model, between PyTorch's tensors and mbc's arena."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mbc.errors import MbcError
from mbc.interchange.steps import Imported
from mbc.runtime.module import Module

torch: Any = importlib.import_module("torch")
_FIRST = "_mbc_writes_back"
_LISTS = ("named_parameters", "named_buffers")
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_holders: weakref.WeakKeyDictionary[Any, Hook] = weakref.WeakKeyDictionary()


class Hook:
    """Calls a method as long as the method's object lives.

    Copying or pickling a hook calls the method, too. The hook is the first attribute of a module, before the
    parameters, so that the parameters are written back before they are copied. A copy of the model has hooks that do
    nothing.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        """Create a hook for a method, or one that does nothing."""
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        """Call the method if its object lives."""
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        """Return a hook that does nothing as the copy, after calling the method."""
        self()
        return Hook, ()


class Weights:
    """Moves weights between a model and the arena, and notices changes by PyTorch.

    Attributes:
        stale: Steps have changed the arena since it was last written into the model.
    """

    def __init__(self, model: Any, network: Imported, module: Module) -> None:
        """Install hooks in a model that write the arena back before the model's weights are read."""
        self.stale = False
        self._model, self._network, self._module = model, network, module
        self._tracked = {key.name: int(network.kept[key.kept]) for key in network.keys if key.per_update}
        self._handles: list[Any] = []
        self._modules = list(model.modules())
        back, take_in = Hook(self.write_back), Hook(self.take_in)
        for part in self._modules:
            self._handles += [
                part.register_forward_pre_hook(back),
                part.register_state_dict_pre_hook(back),
                part.register_load_state_dict_pre_hook(back),  # a partial dict leaves some tensors unchanged
            ]
            _hold(part, back)
        self._handles.append(model.register_load_state_dict_post_hook(take_in))
        self._remember()

    def write_back(self) -> None:
        """Write the arena into the model if the model is stale.

        Raises:
            MbcError: MBC338 if PyTorch has changed a tensor in the meantime.
        """
        if not self.stale:
            return
        self._refuse(self._changed(True))
        self._write()

    def take_in(self) -> None:
        """Put the tensors that PyTorch has changed into the arena.

        Raises:
            MbcError: MBC338 if the model had not been written back before the change.
        """
        changed = self._changed(not self.stale)
        if self.stale:
            self._refuse(changed)
        if not changed:
            return
        tensors, shapes = self._tensors(), self._module.states
        updates = self._module.control["updates"]
        for key in self._network.keys:
            if key.name not in changed:
                continue
            if key.state:
                array = tensors[key.name].detach().cpu().numpy().reshape(shapes[key.state])
                self._module.set_state(key.state, array)
            elif key.per_update:
                self._tracked[key.name] = int(tensors[key.name] - key.per_update * updates)
        self._remember()

    def close(self) -> None:
        """Write the model back, and remove all hooks from it.

        Raises:
            MbcError: MBC338 if a change by PyTorch is lost.
        """
        lost: Sequence[str] = ()
        try:
            if self.stale:
                lost = self._changed(True)
                self._write()
        finally:
            for handle in self._handles:
                handle.remove()
            for part in self._modules:
                _release(part)
        self._refuse(lost)

    def _write(self) -> None:
        tensors = self._tensors()
        updates = self._module.control["updates"]
        with torch.no_grad():
            for key in self._network.keys:
                if key.state:
                    array = np.ascontiguousarray(self._module.state(key.state))
                    tensors[key.name].copy_(torch.from_numpy(array).reshape(tensors[key.name].shape))
                elif key.per_update:
                    tensors[key.name].fill_(self._tracked[key.name] + key.per_update * updates)
        self.stale = False
        self._remember()

    def _remember(self) -> None:
        """Record the current version and a checksum of each tensor."""
        tensors = self._listed = self._tensors()
        self._marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        self._sums = dict(zip(tensors, _sums(tensors.values()), strict=True))

    def _changed(self, thorough: bool) -> list[str]:
        """Return the names of tensors whose elements differ from the recorded ones.

        Without `thorough`, only tensors are read whose version or address has changed. PyTorch does not count writes
        through `tensor.data`. `Watch` looks for a tensor that replaces another one.
        """
        tensors = self._tensors() if thorough else self._listed
        asked = [name for name, tensor in tensors.items() if thorough or _mark(tensor) != self._marks.get(name)]
        sums = zip(asked, _sums([tensors[name] for name in asked]), strict=True)
        marks = {name: (_mark(tensors[name]), self._marks[name]) for name in asked if self.stale}
        written = {name for name, (now, then) in marks.items() if now[1] == then[1] and now[0] != then[0]}
        # If the arena is newer, a write counts as a change even if it writes the numbers that the tensor already has.
        changed = [name for name, number in sums if number != self._sums.get(name) or name in written]
        if not changed:
            self._marks |= {name: _mark(tensors[name]) for name in asked}
        return changed

    def _refuse(self, changed: Sequence[str]) -> None:
        if changed:
            more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
            raise MbcError(
                "MBC338",
                f"torch has changed '{changed[0]}'{more} of the model, which did not have mbc's trained weights",
                "call trainer.synchronize() before the change; the next step then uses the changed tensors",
            )

    def _tensors(self) -> dict[str, Any]:
        """Return parameters and buffers by all of their names."""
        kind: Any = self._model.__class__
        lists = (getattr(kind, name)(self._model, remove_duplicate=False) for name in _LISTS)
        return {name: tensor for listed in lists for name, tensor in listed}


def _hold(part: Any, back: Hook) -> None:
    """Let a module write back before its attributes are copied and its parameters are listed."""
    _holders[part] = back
    own = dict(part.__dict__)
    part.__dict__.clear()
    part.__dict__.update({_FIRST: back, **{name: value for name, value in own.items() if name != _FIRST}})
    for function in (named_parameters, named_buffers):
        part.__dict__[function.__name__] = function.__get__(part)


def _release(part: Any) -> None:
    _holders.pop(part, None)
    for name in (_FIRST, *_LISTS):
        part.__dict__.pop(name, None)


def named_parameters(part: Any, *arguments: Any, **named: Any) -> Any:
    """Return the parameters of a module that mbc trains, after writing the arena back."""
    _holders.get(part, Hook())()
    return part.__class__.named_parameters(part, *arguments, **named)


def named_buffers(part: Any, *arguments: Any, **named: Any) -> Any:
    """Return the buffers of a module that mbc trains, after writing the arena back."""
    _holders.get(part, Hook())()
    return part.__class__.named_buffers(part, *arguments, **named)


def _mark(tensor: Any) -> tuple[int, int]:
    """Return two numbers of which one changes when PyTorch writes to a tensor or moves it."""
    return tensor._version, tensor.data_ptr()


def _sums(tensors: Any) -> list[int]:
    """Return a checksum over the bits of each tensor."""
    words = [
        t.detach().reshape(-1).view(_WORDS.get(t.element_size(), torch.uint8)).sum(dtype=torch.int64) for t in tensors
    ]
    return torch.stack(words).tolist() if words else []

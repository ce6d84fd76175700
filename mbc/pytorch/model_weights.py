"""Parameters and statistics of a model, between torch's tensors and mbc's arena."""

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
    """Calls a method as long as its object lives.

    Being copied or pickled calls the method, too: it stands before the parameters in a module's attributes, so that
    they are written back before they are copied. A copy of the model has hooks that do nothing.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        self()
        return Hook, ()


class Weights:
    """Moves weights between a model and the arena, and sees what torch changes meanwhile.

    Attributes:
        stale: Steps have changed the arena since it was last written into the model.
    """

    def __init__(self, model: Any, network: Imported, module: Module) -> None:
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
                part.register_load_state_dict_pre_hook(back),  # what a partial dict leaves as it is
            ]
            _hold(part, back)
        self._handles.append(model.register_load_state_dict_post_hook(take_in))
        self._remember()

    def write_back(self) -> None:
        """Write the arena into the model, where it is stale; MBC338 where torch has changed a tensor since."""
        if not self.stale:
            return
        self._refuse(self._changed(True))
        self._write()

    def take_in(self) -> None:
        """Put what torch has changed into the arena; MBC338 where the model had not been written back before."""
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
        """Write the model back, and take everything off it; MBC338 where something of torch is lost by that."""
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
        """Note what the tensors are now."""
        tensors = self._listed = self._tensors()
        self._marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        self._sums = dict(zip(tensors, _sums(tensors.values()), strict=True))

    def _changed(self, thorough: bool) -> list[str]:
        """Return the names of tensors whose elements are others than were noted.

        Without `thorough` only tensors are read that torch says it wrote to, or that lie elsewhere. Writes through
        `tensor.data` are counted by nobody. A tensor in the place of another one is what `Watch` looks for.
        """
        tensors = self._tensors() if thorough else self._listed
        asked = [name for name, tensor in tensors.items() if thorough or _mark(tensor) != self._marks.get(name)]
        sums = zip(asked, _sums([tensors[name] for name in asked]), strict=True)
        marks = {name: (_mark(tensors[name]), self._marks[name]) for name in asked if self.stale}
        written = {name for name, (now, then) in marks.items() if now[1] == then[1] and now[0] != then[0]}
        # Where the arena is ahead, a write is a change even if it writes what the older tensor already holds.
        changed = [name for name, number in sums if number != self._sums.get(name) or name in written]
        if not changed:
            self._marks |= {name: _mark(tensors[name]) for name in asked}
        return changed

    def _refuse(self, changed: Sequence[str]) -> None:
        if changed:
            more = f" and {len(changed) - 1} more tensors" if len(changed) > 1 else ""
            raise MbcError(
                "MBC338",
                f"torch has changed '{changed[0]}'{more} of the model, which were not what mbc had trained by then",
                "call trainer.synchronize() before: what is changed then is taken in by the next step",
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
    """List the parameters of a module that mbc trains, as they are in the arena."""
    _holders.get(part, Hook())()
    return part.__class__.named_parameters(part, *arguments, **named)


def named_buffers(part: Any, *arguments: Any, **named: Any) -> Any:
    """List the buffers of a module that mbc trains, as they are in the arena."""
    _holders.get(part, Hook())()
    return part.__class__.named_buffers(part, *arguments, **named)


def _mark(tensor: Any) -> tuple[int, int]:
    """Return what changes when torch writes to a tensor or gives it other memory."""
    return tensor._version, tensor.data_ptr()


def _sums(tensors: Any) -> list[int]:
    """Return a sum over the bits of each tensor, which any change of its numbers changes but for rare chances."""
    words = [
        t.detach().reshape(-1).view(_WORDS.get(t.element_size(), torch.uint8)).sum(dtype=torch.int64) for t in tensors
    ]
    return torch.stack(words).tolist() if words else []

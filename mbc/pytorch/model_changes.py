"""Changes of a model that make its plan wrong; they are looked for at each call.

A call may take some hundred microseconds, and a model has thousands of settings, so all are compared at once by lists.
Only if something differs does a slower way say what it is.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from types import SimpleNamespace
from typing import Any, cast

from mbc.pytorch.compiled_model import PRECISIONS
from mbc.pytorch.exported_model import HOOKS_OF_ALL_MODULES, MODULE_HOOKS, PARAMETER_HOOKS

torch: Any = importlib.import_module("torch")
handles: Any = importlib.import_module("torch.utils.hooks").RemovableHandle
_get: Callable[..., Any] = dict[str, Any].get
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")
_hooks: Callable[[Any], tuple[Any, ...]] = attrgetter(*PARAMETER_HOOKS)
_values: Callable[[Any], Any] = methodcaller("values")
_PLAIN = (bool, int, float, str, type(None))
# Attributes of all modules, which are compared as layers, modes and hooks, and the counters of batch norms.
_COMPARED_ELSEWHERE: frozenset[str] = frozenset([*torch.nn.Module().__dict__, "num_batches_tracked"])


class _Entries:
    """Entries of tables, with the value of each that the plan is for."""

    def __init__(self) -> None:
        """Begin without entries."""
        self.names: list[str] = []
        self.values: list[Any] = []
        self._tables: list[Mapping[str, Any]] = []
        self._keys: list[str] = []

    def add(self, name: str, table: Mapping[str, Any], key: str, value: Any) -> None:
        """Add an entry, with its name for messages."""
        self.names.append(name)
        self.values.append(value)
        self._tables.append(table)
        self._keys.append(key)

    def present(self) -> list[Any]:
        """Return the entries that the tables have now."""
        return list(map(_get, self._tables, self._keys))


class ModelChanges:
    """The settings, layers, modes and hooks of a model when its plan was made.

    Where the plan makes the whole step, attributes of a user's own modules are not compared, because a forward pass in
    PyTorch may change them; but tensors must stay the objects that the optimizer has, without hooks.
    """

    def __init__(self, model: Any, whole_step: bool = False, losses: Sequence[Any] = (), optimizer: Any = None) -> None:
        """Record the settings, layers, modes and hooks of a model.

        Args:
            model: The model.
            whole_step: Whether the plan makes the whole step, in place of a call of the model.
            losses: The modules of the step's losses.
            optimizer: The step's optimizer.
        """
        modules, of_losses = list(model.named_modules()), [(f"loss.{n}", loss) for n, loss in enumerate(losses)]
        self._whole_step = whole_step
        self._modes, self._parameters, self._settings = _Entries(), _Entries(), _Entries()
        self._tensors = _Entries()
        for path, module in modules:
            if "training" in module.__dict__:  # what torch.compile returns asks the module within it
                self._modes.add(f"{path}.training".lstrip("."), module.__dict__, "training", module.training)
            # Parameters are looked up in tables, because a parameter that is held here could not be replaced.
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameters.add(f"{path}.{key}".lstrip("."), module._parameters, key, parameter.requires_grad)
        for path, module in (*modules, *of_losses):
            for name, table, key, value in _settings(path, module, whole_step):
                (self._tensors if isinstance(value, torch.Tensor) else self._settings).add(name, table, key, value)
        for path, module in modules[1:]:
            self._settings.add(f"{path}.forward", module.__dict__, "forward", module.__dict__.get("forward"))
        inner = modules if whole_step else modules[1:]  # PyTorch calls the hooks of a model that it calls
        self._hooks = [(path, getattr(module, name)) for path, module in (*inner, *of_losses) for name in MODULE_HOOKS]
        self._hooks += [("(all modules)", getattr(torch.nn.modules.module, name)) for name in HOOKS_OF_ALL_MODULES]
        self._hook_tables = [table for _, table in self._hooks]
        self._without_hooks = -1  # the number of hooks in this process for which no module had one
        layers = [(f"the layers of '{path or '(the model)'}'", module._modules) for path, module in modules]
        if optimizer is not None:
            of_steps = (getattr(optimizer, f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
            layers += [("the hooks of the optimizer", hooks) for hooks in of_steps]
        self._layers = [(name, table, (*table.values(),)) for name, table in layers]
        self._no_layers = [table for _, table in layers if not table]  # of most modules
        self._layer_tables = [table for _, table in layers if table]
        self._layers_before = _contents(self._layer_tables)

    def reason(self, training: bool) -> str:
        """Return what has changed, for a call in this mode; an empty text if nothing has."""
        modes = self._modes.values if training else [False] * len(self._modes.values)
        if self._modes.present() != modes:
            return _difference(self._modes, self._modes.present(), modes)
        if any(self._no_layers) or _contents(self._layer_tables) != self._layers_before:
            return f"{next(path for path, table, before in self._layers if (*table.values(),) != before)} have changed"
        if not _equal(present := self._settings.present(), self._settings.values):
            return _difference(self._settings, present, self._settings.values)
        if self._without_hooks != handles.next_id and any(self._hook_tables):
            return f"the module '{next(path for path, table in self._hooks if table)}' has hooks"
        self._without_hooks = handles.next_id
        if any(now is not was for now, was in zip(self._tensors.present(), self._tensors.values, strict=True)):
            rows = zip(self._tensors.names, self._tensors.present(), self._tensors.values, strict=True)
            return f"'{next(name for name, now, was in rows if now is not was)}' was replaced"
        return self._parameter_reason() if training or self._whole_step else ""

    def _parameter_reason(self) -> str:
        parameters = self._parameters.present()
        try:
            present = list(map(_requires_grad, parameters))
            hooked = [any(hooks) for hooks in map(_hooks, parameters)] if self._whole_step else []
        except AttributeError:  # a removed parameter is noticed where it is read
            return ""
        if any(hooked):
            return f"the parameter '{self._parameters.names[hooked.index(True)]}' has hooks"
        return "" if present == self._parameters.values else self._frozen(present)

    def _frozen(self, present: Sequence[bool]) -> str:
        rows = zip(self._parameters.names, present, self._parameters.values, strict=True)
        return next(f"'{name}.requires_grad' is {now} now" for name, now, before in rows if now != before)


def autocast_reason(precision: str) -> str:
    """Return why autocast does not suit a plan of this precision; an empty text if it does."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            asked = PRECISIONS.get(torch.get_autocast_dtype(device), "another type")
            if asked != precision:
                return f"autocast asks for {asked}, but the plan computes in {precision}"
    return ""


def _settings(path: str, module: Any, whole_step: bool) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
    """Yield the name, the table, the key in the table and the value of each setting of a module."""
    tables = (module._parameters, module._buffers)
    settings = [(t, key, held) for t in tables for key, held in t.items() if whole_step or held is None]
    if not whole_step or module.__class__.__module__.startswith("torch.nn."):
        own = module.__dict__.items()  # a list may change in place
        settings += [(module.__dict__, key, copy.deepcopy(value)) for key, value in own if _is_plain(value)]
    for table, key, value in settings:
        if key not in _COMPARED_ELSEWHERE:
            yield f"{path}.{key}" if path else key, table, key, value


def _is_plain(value: Any) -> bool:
    """Return whether a value is compared: a number, a text, or a collection, data class or namespace of these."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        return _is_plain(getattr(value, "__dict__", torch))
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        return all(map(_is_plain, (*table, *table.values())))
    return isinstance(value, _PLAIN)


def _contents(tables: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[Any]]:
    return list(map(len, tables)), list(chain.from_iterable(map(_values, tables)))


def _equal(present: list[Any], before: list[Any]) -> bool:
    try:
        return present == before
    except RuntimeError:  # a number became a tensor of several numbers
        return False


def _difference(entries: _Entries, present: Sequence[Any], before: Sequence[Any]) -> str:
    """Return a sentence on the first entry that differs."""
    for name, now, was in zip(entries.names, present, before, strict=True):
        if now is not was and (type(now) is not type(was) or now != was):
            return f"'{name}' was {was!r} and is {now!r} now"
    return ""

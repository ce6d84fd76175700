"""Changes of a model that make its plan wrong; they are looked for at each call.

A call may take some hundred microseconds, and a model has thousands of settings, so all are compared at once by lists.
Only if something differs does a slower way say what it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from mbc.pytorch.exported_model import HOOKS_OF_ALL_MODULES, MODULE_HOOKS
from mbc.pytorch.watch import settings_of

torch: Any = importlib.import_module("torch")
_get: Callable[..., Any] = dict[str, Any].get
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


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
    """The settings, layers, modes and hooks of a model when its plan was made."""

    def __init__(self, model: Any) -> None:
        """Record them."""
        modules = list(model.named_modules())
        self._modes, self._parameters, self._settings = _Entries(), _Entries(), _Entries()
        for path, module in modules:
            self._modes.add(f"{path}.training", module.__dict__, "training", module.training)
            # Parameters are looked up in tables, because a parameter that is held here could not be replaced.
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameters.add(f"{path}.{key}", module._parameters, key, parameter.requires_grad)
        for entry in settings_of(model):
            self._settings.add(*entry)
        inner = modules[1:]  # PyTorch calls the hooks of the model itself
        for path, module in inner:
            self._settings.add(f"{path}.forward", module.__dict__, "forward", module.__dict__.get("forward"))
        self._hooks = [(path, getattr(module, name)) for path, module in inner for name in MODULE_HOOKS]
        self._hooks += [("(all modules)", getattr(torch.nn.modules.module, name)) for name in HOOKS_OF_ALL_MODULES]
        self._hook_tables = [table for _, table in self._hooks]
        self._layers = [(path or "(the model)", module._modules) for path, module in modules]
        self._layer_tables = [table for _, table in self._layers]
        self._layers_before = _contents(self._layer_tables)

    def reason(self, training: bool) -> str:
        """Return what has changed, for a call in this mode; an empty text if nothing has."""
        modes = self._modes.values if training else [False] * len(self._modes.values)
        if self._modes.present() != modes:
            return _difference(self._modes, self._modes.present(), modes)
        if _contents(self._layer_tables) != self._layers_before:
            pairs = zip(self._layers, self._layers_before, strict=True)
            path = next(path for (path, table), before in pairs if (*table.values(),) != before)
            return f"the layers of '{path}' have changed"
        if not _equal(present := self._settings.present(), self._settings.values):
            return _difference(self._settings, present, self._settings.values)
        if any(self._hook_tables):
            return f"the module '{next(path for path, table in self._hooks if table)}' has hooks"
        return self._parameter_reason() if training else ""

    def _parameter_reason(self) -> str:
        try:
            present = list(map(_requires_grad, self._parameters.present()))
        except AttributeError:  # a removed parameter is noticed where it is read
            return ""
        return "" if present == self._parameters.values else self._frozen(present)

    def _frozen(self, present: Sequence[bool]) -> str:
        rows = zip(self._parameters.names, present, self._parameters.values, strict=True)
        return next(f"'{name}.requires_grad' is {now}" for name, now, before in rows if now != before)


def _contents(tables: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(*table.values(),) for table in tables]


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

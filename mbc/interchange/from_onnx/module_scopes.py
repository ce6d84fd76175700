"""The modules that a node was exported from, as the two exporters of PyTorch record them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import cast

from mbc.interchange.program import ModuleCall
from mbc.interchange.refusal import printable

_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
_LONGEST = 4000  # most characters of an entry


def modules_of(name: str, metadata: Mapping[str, str]) -> tuple[ModuleCall, ...]:
    """Return the calls of modules around a node, outermost first; empty if the file does not record them."""
    scopes, classes = _words(metadata.get(_SCOPES, "")), _words(metadata.get(_CLASSES, ""))
    if scopes and len(scopes) == len(classes):
        calls = zip(scopes[:-1], classes[:-1], strict=True)  # the last entry is the operation
        return tuple(ModuleCall(path, path, kind.rpartition(".")[2]) for path, kind in calls if path)
    return tuple(ModuleCall(path, path, own) for path, own in _of_slashes(name))


def _words(text: str) -> Sequence[str]:
    """Return the strings of a list in Python syntax; empty for any other text."""
    if len(text) > _LONGEST:
        return ()
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [printable(item) for item in items if isinstance(item, str)]


def _of_slashes(name: str) -> list[tuple[str, str]]:
    """Return the path and the own name of each module in a node name such as `/layer1/layer1.0/conv1/Conv`.

    The name of a module in a list begins with the list's name.
    """
    if not name.startswith("/") or len(name) > _LONGEST:
        return []
    modules: list[tuple[str, str]] = []
    path, before = "", ""
    for part in name.split("/")[1:-1]:
        own = printable(part)
        if before and own.startswith(f"{before}."):
            path = path[: len(path) - len(before)] + own
        else:
            path = f"{path}.{own}" if path else own
        before = own
        modules.append((path, "Sequential"))  # the class is not recorded: a block is named by its path
    return modules

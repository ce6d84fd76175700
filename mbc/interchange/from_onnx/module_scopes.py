"""The modules that a node was made in, as far as an exporter tells: torch's two do."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import cast

from mbc.interchange.program import ModuleCall
from mbc.interchange.pt2 import printable

_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
_LONGEST = 4000  # characters of an entry


def modules_of(name: str, metadata: Mapping[str, str]) -> tuple[ModuleCall, ...]:
    """The calls of modules around a node, outermost first; none where the file says nothing of them."""
    scopes, classes = _words(metadata.get(_SCOPES, "")), _words(metadata.get(_CLASSES, ""))
    if scopes and len(scopes) == len(classes):
        calls = zip(scopes[:-1], classes[:-1], strict=True)  # the last one is the operation
        return tuple(ModuleCall(path, path, kind.rpartition(".")[2]) for path, kind in calls if path)
    return tuple(ModuleCall(path, path, own) for path, own in _of_slashes(name))


def _words(text: str) -> Sequence[str]:
    """A list of strings as Python writes it."""
    if len(text) > _LONGEST:
        return ()
    try:
        found: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    items = cast("list[object]", found) if isinstance(found, list) else []
    return [printable(item) for item in items if isinstance(item, str)]


def _of_slashes(name: str) -> list[tuple[str, str]]:
    """`/layer1/layer1.0/conv1/Conv`: paths and own names of the modules. A module of a list is named with the list's
    name in front of it."""
    if not name.startswith("/") or len(name) > _LONGEST:
        return []
    found: list[tuple[str, str]] = []
    path, before = "", ""
    for part in name.split("/")[1:-1]:
        own = printable(part)
        if before and own.startswith(f"{before}."):
            path = path[: len(path) - len(before)] + own
        else:
            path = f"{path}.{own}" if path else own
        before = own
        found.append((path, "Sequential"))  # no class is told: a block is named by its path
    return found

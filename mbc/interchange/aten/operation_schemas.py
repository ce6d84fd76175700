"""Schemas of ATen operations, as PyTorch publishes them: parameters, their defaults, and which tensors share memory.

The table `mbc/data/aten_schemas.txt` holds one schema on each line; `benchmarks/aten_schemas.py` writes it. Alias
annotations are those of PyTorch's `native_functions.yaml`: a result `Tensor(a)` is a view of the argument `Tensor(a)`,
and an argument `Tensor(a!)` is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mbc.interchange.program import Argument, Opaque
from mbc.resources import data_text

# Operations that give all elements in their order, in another shape; and the arguments that state the shape.
COPYING_RESHAPES = frozenset(
    f"aten.{name}" for name in ("reshape.default", "reshape_as.default", "flatten.using_ints", "ravel.default")
)
RESHAPES = COPYING_RESHAPES | {
    f"aten.{name}"
    for name in (
        "view.default", "view_as.default", "unflatten.int", "unsqueeze.default", "squeeze.default", "squeeze.dim",
        "squeeze.dims",
    )
}  # fmt: skip
SHAPE_ARGUMENTS = ("size", "shape", "dim", "sizes", "start_dim", "end_dim", "other")

_ALIAS = re.compile(r"\((\w+)(!?)(?: -> \*)?\)")
_NAME = re.compile(r"(\w+)(?:\.(\w+))?\(")


class Required:
    """The mark of a parameter without a default."""


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operation; `alias` names the memory that it shares with results, or is empty."""

    name: str
    type: str
    default: Argument | Required
    alias: str
    is_written: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema: the parameters in order, and for each result the name of the memory that it shares, or an empty text.

    With `is_list`, the last result stands for a list of any length.
    """

    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]
    is_list: bool

    @property
    def written(self) -> tuple[Parameter, ...]:
        """The parameters that the operation writes."""
        return tuple(parameter for parameter in self.parameters if parameter.is_written)

    def viewed(self, result: int) -> Parameter | None:
        """Return the parameter that a result is a view of; None if the result has memory of its own."""
        alias = self.results[min(result, len(self.results) - 1)] if self.results else ""
        return next((p for p in self.parameters if alias and p.alias == alias), None)


def schema_of(target: str) -> Schema | None:
    """Return the schema of an operation such as `aten.add_.Tensor`; None if the table has none."""
    return _table().get(target)


@cache
def out_of_place(target: str) -> str:
    """Return the operation that returns a new tensor in place of an in-place one, such as `aten.relu.default`.

    For `aten.relu_.default` this is `aten.relu.default`. The returned overload has equal parameters, but may have
    another name. Other operations are returned unchanged.
    """
    name, _, overload = target.removeprefix("aten.").rpartition(".")
    own = schema_of(target)
    if not target.startswith("aten.") or not name.endswith("_") or name.endswith("__"):
        return target
    same = f"aten.{name[:-1]}.{overload}"
    if own is None or same in _table():
        return same
    wanted = [(p.name, p.type) for p in own.parameters]
    others = (t for t in _table() if t.rpartition(".")[0] == f"aten.{name[:-1]}")
    return next((t for t in others if [(p.name, p.type) for p in _table()[t].parameters] == wanted), same)


@cache
def _table() -> Mapping[str, Schema]:
    return dict(map(_parsed, data_text("aten_schemas.txt").splitlines()))


def _parsed(line: str) -> tuple[str, Schema]:
    """Return the target and the schema of a line such as `add.Tensor(Tensor self, Tensor other) -> Tensor`."""
    match = _NAME.match(line)
    assert match is not None
    body, _, results = line[match.end() :].rpartition(" -> ")
    parameters = tuple(_parameter(text) for text in _split(body.rpartition(")")[0]) if text != "*")
    listed = _split(results[1:-1]) if results.startswith("(") else (results,)
    schema = Schema(parameters, tuple(_alias(text)[0] for text in listed if text), results.endswith("[]"))
    return f"aten.{match[1]}.{match[2] or 'default'}", schema


def _parameter(text: str) -> Parameter:
    declaration, equals, default = text.partition("=")
    kind, _, name = declaration.rpartition(" ")
    alias, is_written = _alias(kind)
    return Parameter(name, _ALIAS.sub("", kind), _default(default, kind) if equals else REQUIRED, alias, is_written)


def _alias(text: str) -> tuple[str, bool]:
    match = _ALIAS.search(text)
    return (match[1], match[2] == "!") if match is not None else ("", False)


def _default(text: str, kind: str) -> Argument:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return Opaque(text)
    if isinstance(value, list):
        return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _split(text: str) -> tuple[str, ...]:
    """Return the parts of a list at its commas, except commas within brackets."""
    parts, depth, start = list[str](), 0, 0
    for place, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return (*parts, text[start:].strip()) if text.strip() else ()

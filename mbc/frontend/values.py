"""The values of expressions while a network is expanded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from mbc.frontend import ast
from mbc.frontend.names import Scope
from mbc.ir.types import TensorType
from mbc.ops.base import Layer, Setting
from mbc.source import Span


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the network, with the place and the path of the layer that computes it."""

    value: str
    type: TensorType
    span: Span
    path: str


@dataclass(frozen=True, slots=True)
class Losses:
    """A linear combination of losses: (scalar value, weight)."""

    terms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class WordValue:
    """A word that settings accept, such as `he` or `bf16`."""

    text: str


@dataclass(frozen=True, slots=True)
class Bytes:
    """An amount of memory."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Text:
    """Quoted text."""

    text: str


@dataclass(slots=True, eq=False)
class Written:
    """A layer or block as the source writes it in one place, with its settings.

    If it is applied twice, both share its parameters.

    `scope` is the scope of that place. The first application claims `path` there, from `label`, else from `bound` (the
    name to which it was bound), else from its kind and count. Only these three fields change.
    """

    of: Layer | ast.Block
    settings: dict[str, Setting]
    arguments: dict[str, Result]
    scope: Scope
    span: Span
    label: ast.Word | None = None
    bound: ast.Word | None = None
    path: str | None = None


Result = int | float | bool | tuple["Result", ...] | Tensor | Losses | WordValue | Bytes | Text | Written


def is_number(result: Result) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are not."""
    return isinstance(result, int | float) and not isinstance(result, bool)


def describe(result: Result) -> str:
    """Return a description of a value for messages."""
    if isinstance(result, bool):
        return "true" if result else "false"
    if isinstance(result, int | float):
        return f"the number {result}"
    if isinstance(result, tuple):
        if len(result) <= 6 and all(is_number(item) for item in result):
            return f"the tuple ({', '.join(map(str, result))}{',' if len(result) == 1 else ''})"
        return f"a tuple of {len(result)}"
    if isinstance(result, Tensor):
        return f"a tensor {result.type}"
    if isinstance(result, Losses):
        return "a loss"
    if isinstance(result, WordValue):
        return f"the word `{result.text}`"
    if isinstance(result, Bytes):
        return f"a size of {result.size_bytes} bytes"
    if isinstance(result, Text):
        return f'the text "{result.text}"'
    return f"the {'block' if isinstance(result.of, ast.Block) else 'layer'} `{result.of.name}`"

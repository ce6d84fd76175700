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
    """A layer or block as written in one place, with its settings. If it is applied twice, it shares its parameters.

    `scope` is the scope of that place. The first application claims `path` there, from `label`, else from `bound` (the
    name to which it was bound), else from its kind and count. Only these three fields change.
    """

    of: Layer | ast.Block
    settings: dict[str, Setting]
    arguments: dict[str, Worth]
    scope: Scope
    span: Span
    label: ast.Word | None = None
    bound: ast.Word | None = None
    path: str | None = None


Worth = int | float | bool | tuple["Worth", ...] | Tensor | Losses | WordValue | Bytes | Text | Written


def is_number(worth: Worth) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are not."""
    return isinstance(worth, int | float) and not isinstance(worth, bool)


def describe(worth: Worth) -> str:
    """Return a description of a value for messages."""
    if isinstance(worth, bool):
        return "true" if worth else "false"
    if isinstance(worth, int | float):
        return f"the number {worth}"
    if isinstance(worth, tuple):
        if len(worth) <= 6 and all(is_number(item) for item in worth):
            return f"the tuple ({', '.join(map(str, worth))}{',' if len(worth) == 1 else ''})"
        return f"a tuple of {len(worth)}"
    if isinstance(worth, Tensor):
        return f"a tensor {worth.type}"
    if isinstance(worth, Losses):
        return "a loss"
    if isinstance(worth, WordValue):
        return f"the word `{worth.text}`"
    if isinstance(worth, Bytes):
        return f"a size of {worth.size_bytes} bytes"
    if isinstance(worth, Text):
        return f'the text "{worth.text}"'
    return f"the {'block' if isinstance(worth.of, ast.Block) else 'layer'} `{worth.of.name}`"

"""Paths of layers, and which names are bound where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mbc.errors import MbcError
from mbc.source import Span

if TYPE_CHECKING:
    from mbc.frontend.values import Worth


class Scope:
    """Where paths are claimed: the network, one expansion of a block, or one turn of a loop.

    A path is the scope's own path and a component that is unique in the scope: a label, the name that a layer was
    bound to, or a kind and its count (from 0) in this scope.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._taken: dict[str, Span] = {}
        self._counts: dict[str, int] = {}

    def claim(self, component: str, span: Span) -> str:
        """The path of something that has a name of its own."""
        if component in self._taken:
            first = self._taken[component]
            raise MbcError(
                "MBC013",
                f"the name `{component}` is taken: it was given at line {first.line}, column {first.column}",
                "give each of the two a label of its own (`conv(64, 3) @name`): parameters are saved under it",
                span,
            )
        self._taken[component] = span
        return f"{self._path}.{component}" if self._path else component

    def count(self, kind: str, span: Span) -> str:
        """The path of the next `kind` of this scope."""
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return self.claim(f"{kind}{number}", span)


class Frame:
    """Names and what they are worth. A loop's frame has a parent: a name bound there is carried, others are local."""

    def __init__(self, scope: Scope, parent: Frame | None = None) -> None:
        self.scope = scope
        self._parent = parent
        self._names: dict[str, Worth] = {}

    @property
    def outermost(self) -> bool:
        """Whether this is the frame of a network or block, not of a loop."""
        return self._parent is None

    def get(self, name: str) -> Worth | None:
        frame: Frame | None = self
        while frame is not None:
            if name in frame._names:
                return frame._names[name]
            frame = frame._parent
        return None

    def bind(self, name: str, worth: Worth) -> None:
        """Bind the name where it is already bound, else here."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame._names:
                frame._names[name] = worth
                return
            frame = frame._parent
        self._names[name] = worth

    def bind_here(self, name: str, worth: Worth) -> None:
        """Bind the name in this frame, whatever it means outside."""
        self._names[name] = worth

    def names(self) -> list[str]:
        """Every name that is bound."""
        outer = self._parent.names() if self._parent is not None else []
        return [*outer, *self._names]

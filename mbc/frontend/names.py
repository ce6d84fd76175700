"""Paths of layers."""

from __future__ import annotations

from mbc.errors import MbcError
from mbc.source import Span


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

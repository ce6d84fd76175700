"""Paths of layers."""

from __future__ import annotations

from collections.abc import Callable

from mbc.errors import MbcError
from mbc.source import Span


class Scope:
    """A scope in which paths are claimed: the network, one expansion of a block, or one iteration of a loop.

    A path is the scope's own path and a component that is unique in the scope: a label, the name to which a layer was
    bound, or a kind and its count (from 0) in this scope. A label may have several components (`layer1.0`). Then no
    other path of the scope may be a prefix of it (`layer1`), because its layers could have the same paths.

    Nothing is saved under the counted name of a layer without parameters (`l10`, the first l1). A label may replace it.
    """

    def __init__(self, path: str) -> None:
        """Begin without names; `path` is that of the scope."""
        self._path = path
        self._taken: dict[str, Span] = {}
        self._inside: dict[str, str] = {}  # by prefix such as `layer1`: a component that begins with it
        self._counts: dict[str, int] = {}
        self._yielding: set[str] = set()  # counted names of layers

    def claim(self, component: str, span: Span, has_states: Callable[[str], bool] | None = None) -> str:
        """Return the path of a layer or block that has a name of its own.

        Args:
            component: The name, unique in this scope.
            span: Its place in the source.
            has_states: Returns whether parameters are saved at a path; None if no counted name may be replaced.

        Raises:
            MbcError: MBC013 if the name is taken.
        """
        parts = component.split(".")
        outer = [".".join(parts[:count]) for count in range(1, len(parts))]
        for name in (component, *outer):
            if has_states is not None and name in self._yielding and not has_states(self._at(name)):
                self._yielding.remove(name)
                del self._taken[name]
        taken = next((c for c in (component, *outer) if c in self._taken), self._inside.get(component))
        if taken is not None:
            first = self._taken[taken]
            remedy = "give each of the two its own label (`conv(64, 3) @name`): parameters are saved under this name"
            if taken != component:
                remedy = f"neither of `{taken}` and `{component}` may be inside the other: give one another label"
            raise MbcError(
                "MBC013",
                f"the name `{taken}` is taken: it was given at line {first.line}, column {first.column}",
                remedy,
                span,
            )
        self._taken[component] = span
        self._inside.update(dict.fromkeys(outer, component))
        return self._at(component)

    def count(self, kind: str, span: Span, yields: bool = False) -> str:
        """Return the path of the next `kind` of this scope.

        Args:
            kind: Kind of the layer.
            span: Its place in the source.
            yields: Whether a later label may replace the path.
        """
        number = self._counts.get(kind, 0)
        while f"{kind}{number}" in self._taken or f"{kind}{number}" in self._inside:
            number += 1
        self._counts[kind] = number + 1
        if yields:
            self._yielding.add(f"{kind}{number}")
        return self.claim(f"{kind}{number}", span)

    def _at(self, component: str) -> str:
        return f"{self._path}.{component}" if self._path else component

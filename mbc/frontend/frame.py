"""Names and the values to which they are bound."""

from __future__ import annotations

from mbc.frontend.names import Scope
from mbc.frontend.values import Result


class Frame:
    """Names and their values.

    The frame of a loop has a parent: a name that is bound there keeps its value after the loop; other names are local.
    """

    def __init__(self, scope: Scope, parent: Frame | None = None) -> None:
        """Begin without names."""
        self.scope = scope
        self._parent = parent
        self._names: dict[str, Result] = {}

    @property
    def outermost(self) -> bool:
        """True for the frame of a network or block, False for that of a loop."""
        return self._parent is None

    def get(self, name: str) -> Result | None:
        """Return the value of a name; None if the name is not bound."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame._names:
                return frame._names[name]
            frame = frame._parent
        return None

    def bind(self, name: str, result: Result) -> None:
        """Bind the name in the frame where it is already bound, otherwise in this frame."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame._names:
                frame._names[name] = result
                return
            frame = frame._parent
        self._names[name] = result

    def bind_here(self, name: str, result: Result) -> None:
        """Bind the name in this frame, also if it is bound outside."""
        self._names[name] = result

    def names(self) -> list[str]:
        """Return every name that is bound."""
        outer = self._parent.names() if self._parent is not None else []
        return [*outer, *self._names]

"""Which names are bound where, and to what."""

from __future__ import annotations

from mbc.frontend.names import Scope
from mbc.frontend.values import Worth


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

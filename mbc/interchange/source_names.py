"""Unused names for a source."""

from __future__ import annotations

import keyword
import re
from functools import cache

from mbc.frontend.functions import FUNCTIONS
from mbc.ops import LAYERS
from mbc.resources import folder

LONGEST = 48


@cache
def reserved() -> frozenset[str]:
    """Return the names that the language uses."""
    grammar = (folder("grammar") / "mbc.lark").read_text(encoding="utf-8")
    words = re.findall(r'"([a-z]+)"', grammar)
    of_settings = [word for layer in LAYERS.values() for p in layer.parameters for word in p.words]
    return frozenset((*words, *of_settings, *FUNCTIONS, *LAYERS))


FRESH = ("y", "z", "s", "t", "u", "v", "w")  # names of values of a body, in this order


@cache
def of_bodies() -> frozenset[str]:
    """Return the names that values and parameters of a body have, without their numbers."""
    of_settings = (p.name for layer in LAYERS.values() for p in layer.parameters)
    return frozenset(("x", "act", "image", "target", "logits", "prediction", "batch", *FRESH, *of_settings))


class Names:
    """The names of a source that are not used yet."""

    def __init__(self) -> None:
        """Reserve the names of the language."""
        self._taken = set(reserved())

    def of_block(self, wanted: str) -> str:
        """Return an unused name for a block, which is also no name of a value or parameter of a body."""
        return self.free(f"{wanted}_block" if wanted in of_bodies() else wanted)

    def free(self, wanted: str) -> str:
        """Return `wanted` as an unused name; a number is appended if the name is used."""
        name = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:LONGEST] or "net"
        name = f"_{name}" if name[0].isdigit() else name
        if keyword.iskeyword(name) or keyword.issoftkeyword(name):
            name = f"{name}_net"
        free = next(n for n in (name, *(f"{name}{i}" for i in range(2, 10_000))) if n not in self._taken)
        self._taken.add(free)
        return free

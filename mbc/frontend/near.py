"""The known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What other frameworks call things, where the letters alone lead elsewhere.
_ELSEWHERE = {
    "batchnorm": "bn", "batch_norm": "bn", "batchnorm2d": "bn", "dense": "linear", "fc": "linear", "swish": "silu",
}  # fmt: skip


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The nearest of `known`, or None where nothing is near. Case counts for little."""
    by_lower = {name.lower(): name for name in sorted(known)}
    meant = _ELSEWHERE.get(word.lower(), word.lower())
    found = difflib.get_close_matches(meant, list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest(word: str, known: Iterable[str], what: str) -> str:
    """A remedy: the nearest name, else the list of the known ones (`what` says what they are)."""
    names = sorted(known)
    if not names:
        return f"there are no {what} here"
    found = nearest(word, names)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"the {what} are: {', '.join(names)}"

"""The known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mbc.frontend.pytorch import Place, answer


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The nearest of `known`, or None where nothing is near. Case counts for little."""
    by_lower = {name.lower(): name for name in sorted(known)}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest(word: str, known: Iterable[str], what: str, *places: Place) -> str:
    """A remedy: what PyTorch's name of these `places` is here, else the nearest name, else the list of the known ones
    (`what` says what they are)."""
    told = answer(word, *places)
    if told is not None:
        return told.remedy
    names = sorted(known)
    if not names:
        return f"there are no {what} here"
    found = nearest(word, names)
    if found is not None:
        return f"did you mean `{found}`?"
    return f"the {what} are: {', '.join(names)}"

"""Suggestions for misspelt names: the most similar known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mbc.frontend.pytorch import Place, answer


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the nearest of `names`, or None if none is near. Case counts for little."""
    by_lower = {name.lower(): name for name in sorted(names)}
    matches = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def suggest(word: str, names: Iterable[str], what: str, *places: Place) -> str:
    """Return a remedy for an unknown name.

    The remedy is the equivalent of PyTorch's name in these `places`, else the nearest name, else the list of all names.

    Args:
        word: The unknown name.
        names: The names that could stand in its place.
        what: Noun for these names.
        places: The contexts of the name.
    """
    equivalent = answer(word, *places)
    if equivalent is not None:
        return equivalent.remedy
    candidates = sorted(names)
    if not candidates:
        return f"there are no {what} here"
    near = nearest(word, candidates)
    if near is not None:
        return f"did you mean `{near}`?"
    return f"the {what} are: {', '.join(candidates)}"

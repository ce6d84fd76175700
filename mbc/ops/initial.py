"""Names of weight initialisers in the language."""

from __future__ import annotations

from mbc.ir.graph import Initializer

INITIALIZERS = ("he", "he_uniform", "xavier", "xavier_uniform", "zero")


def initializer(word: str, fan_in: int, fan_out: int) -> Initializer:
    """Return the initializer that a setting `init` names."""
    return Initializer("constant") if word == "zero" else Initializer(word, fan_in=fan_in, fan_out=fan_out)

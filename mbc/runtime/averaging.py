"""Moving averages that take the place of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from mbc.errors import MbcError

Array = NDArray[Any]


def check_averages(averages: Mapping[str, str], network: str) -> None:
    """Raise an error unless a network keeps moving averages.

    Raises:
        MbcError: MBC211 if it keeps none.
    """
    if not averages:
        raise MbcError(
            "MBC211",
            f"network '{network}' keeps no moving averages of its weights",
            "add ema to its train section, as in train { ema = 0.9999 }, and compile it again",
        )


def with_averages(arrays: Mapping[str, Array], averages: Mapping[str, str]) -> dict[str, Array]:
    """Return the states to load, with averages for those weights that come without: they start as the weights."""
    started = {average: arrays[w] for w, average in averages.items() if w in arrays and average not in arrays}
    return {**arrays, **started}

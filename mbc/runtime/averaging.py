"""Moving averages in the place of the weights that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from mbc.errors import MbcError

Array = NDArray[Any]


def check_averages(averages: Mapping[str, str], network: str) -> None:
    """MBC211 where a network keeps none."""
    if not averages:
        raise MbcError(
            "MBC211",
            f"network '{network}' keeps no moving averages of its weights",
            "add ema to its train section, as in train { ema = 0.9999 }, and compile it again",
        )


def with_averages(arrays: Mapping[str, Array], averages: Mapping[str, str]) -> dict[str, Array]:
    """States to be loaded, and of weights that come without their averages these, too: they begin anew from them."""
    begun = {average: arrays[w] for w, average in averages.items() if w in arrays and average not in arrays}
    return {**arrays, **begun}

"""The largest number that something holds for, several numbers being tried at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

Answers = Callable[[Sequence[int]], Generator[bool]]


def largest(answers: Answers, width: Callable[[], int], start: int, finest: int = 1) -> int:
    """The largest count that is answered with yes, all below it being so and none above it; 0 where none is.

    By doubling from `start`, then between a yes and a no until they are `finest` apart. `answers` are those of up to
    `width` ascending counts, of which none is waited for behind the first no.
    """
    low, high = 0, 0  # a high of 0 is not known yet
    while not high or high - low > finest:
        tries = _between(low, high, width()) if high else [max(start, 2 * low) << i for i in range(width())]
        with closing(answers(tries)) as told:
            for count, yes in zip(tries, told, strict=True):
                if not yes:
                    high = count
                    break
                low = count
    return low


def _between(low: int, high: int, width: int) -> list[int]:
    """Up to `width` counts, evenly."""
    count = min(width, high - low - 1)
    return [low + (high - low) * (i + 1) // (count + 1) for i in range(count)]

"""Times of micro-batch sizes that were not measured, interpolated between the nearest measured sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from mbc.ir.types import Layout
from mbc.kernels.base import Candidate

# A number of rows and the candidates measured for it: an item of `Profile.family`.
Size = tuple[int, Sequence[Candidate]]


def candidates_at(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> tuple[Candidate, ...]:
    """Return the candidates for `rows`: those measured, else interpolated ones, fastest first.

    There are none beyond the smallest and the largest size: nothing is extrapolated. `family` must be sorted by size.
    """
    measured = family.get(rows)
    if measured is not None:
        return measured
    sizes = list(family)
    place = bisect_left(sizes, rows)
    if place in (0, len(sizes)):
        return ()
    low, high = sizes[place - 1], sizes[place]
    return between((low, family[low]), (high, family[high]), rows)


def between(low: Size, high: Size, rows: int) -> tuple[Candidate, ...]:
    """Return the candidates that both sizes have, for a number of rows between them, fastest first, as not measured.

    Times are linear in the rows. The workspace is the larger of the two, which may be too much but never too little
    (engines change their tiling in steps). A property holds if both have it.

    Raises:
        ValueError: `rows` is not between the two sizes.
    """
    (low_rows, smaller), (high_rows, larger) = low, high
    if not low_rows < rows < high_rows:
        raise ValueError(f"{rows} rows are not between {low_rows} and {high_rows}")
    share = (rows - low_rows) / (high_rows - low_rows)
    by_variant = {c.variant: c for c in smaller}
    pairs = ((by_variant[key], b) for b in larger if (key := b.variant) in by_variant)
    return tuple(sorted((_mixed(a, b, share) for a, b in pairs), key=rank))


def rank(candidate: Candidate) -> tuple[float, int, str, tuple[tuple[str, int], ...], tuple[Layout, ...]]:
    """Return a sorting key: fastest first, with further fields that make the order unique."""
    c = candidate
    return (c.time_us, c.workspace_bytes, c.provider, c.settings, c.layouts)


def _mixed(a: Candidate, b: Candidate, share: float) -> Candidate:
    adding_us = 0.0
    if a.accumulate_us or b.accumulate_us:
        adding_us = _linear(a.accumulate_us or a.time_us, b.accumulate_us or b.time_us, share)
    return Candidate(
        a.provider,
        a.name,
        a.settings,
        a.layouts,
        max(a.workspace_bytes, b.workspace_bytes),
        _linear(a.time_us, b.time_us, share),
        False,
        a.deterministic and b.deterministic,
        a.accumulates and b.accumulates,
        adding_us,
    )


def _linear(a: float, b: float, share: float) -> float:
    return a + (b - a) * share

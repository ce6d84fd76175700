"""Estimates for numbers of rows that were not measured, from measurements at other sizes.

A measured time is multiplied by the ratio of two estimates (`mbc.kernels.calibration`): estimates predict how a
kernel's time changes with its rows better than how fast it is. Both are compared with measurements at fewer rows in
`benchmarks/results/decisions/scaled.json`, whole steps in
`benchmarks/results/decisions/other_batches.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.kernels.base import Candidate, Variant
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.providers import LISTED_BY_CUDNN
from mbc.profile.interpolate import Size, rank

MOST_TIMES = 16  # largest ratio of the rows of two sizes for which times are scaled
BETWEEN_TIMES = (
    8  # up to this ratio of the two sizes, times between them are as good as interpolated ones (decision 070)
)


def larger_size(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> Size | None:
    """Return the smallest measured size if `rows` is smaller, but not by too much; else None.

    `family` must be sorted by size.
    """
    smallest = next(iter(family), 0)
    return (smallest, family[smallest]) if rows < smallest <= MOST_TIMES * rows else None


def nearest_sizes(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> tuple[Size | None, Size | None]:
    """Return the nearest smaller and the nearest larger size with a usable kernel; None for one too far away."""
    sizes = [
        size
        for size, candidates in family.items()
        if candidates and rows <= MOST_TIMES * size and size <= MOST_TIMES * rows
    ]
    low = max((size for size in sizes if size < rows), default=0)
    high = min((size for size in sizes if size > rows), default=0)
    return (low, family[low]) if low else None, (high, family[high]) if high else None


def larger_sizes(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> Iterable[Size]:
    """Yield every measured size from which times of `rows` may be scaled, the smallest first."""
    return ((size, candidates) for size, candidates in family.items() if rows < size <= MOST_TIMES * rows)


def octave(times: float) -> int:
    """Return the smallest power of two that is at least the ratio `times` of two sizes; it groups errors."""
    return 1 << (math.ceil(times) - 1).bit_length()


def scaled(larger: Size, rows: int, there: Sequence[Candidate], here: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the measurements of a larger size scaled to fewer rows, fastest first, as not measured.

    A time decreases as its estimate does, but not by more than the rows do. A kernel must be offered at both sizes and
    gets the workspace with which it is offered for `rows`. Kernels that only cuDNN lists use the estimates in the same
    layouts and keep their workspace. That may be too much and is rarely too little: engines change their tiling in
    steps.

    Args:
        larger: The larger size and its measured candidates.
        rows: Number of rows to scale to.
        there: Candidates that providers offer at the larger size, with estimates.
        here: Candidates that providers offer for `rows`, with estimates.

    Raises:
        ValueError: `rows` is not less than the larger size.
    """
    larger_rows, measured = larger
    if not rows < larger_rows:
        raise ValueError(f"{rows} rows are not fewer than {larger_rows}")
    before, after = _by_kernel(there), _by_kernel(here)
    results: list[Candidate] = []
    for candidate in measured:
        key = _offered_as(candidate)
        if key not in before or key not in after:
            continue
        share = min(1.0, max(rows / larger_rows, after[key].time_us / before[key].time_us))
        sized = candidate if candidate.provider in LISTED_BY_CUDNN else after[key]
        results.append(
            replace(
                candidate,
                workspace_bytes=sized.workspace_bytes,
                time_us=share * candidate.time_us,
                accumulate_us=share * candidate.accumulate_us,
                measured=False,
            )
        )
    return tuple(sorted(results, key=rank))


def resized(
    low: Size | None, high: Size | None, rows: int, modelled: Callable[[int], Iterable[Candidate]]
) -> tuple[Candidate, ...]:
    """Return the candidates for a whole mini-batch of `rows`, from the nearest measured sizes, as not measured.

    They are sorted, fastest first. The ratio of measured to estimated times is interpolated between the two sizes on a
    logarithmic scale of rows; with one size, its ratio is used. No time changes by more than the rows do. A kernel that
    only cuDNN lists must be measured at the larger size, whose workspace it keeps; others get the workspace with which
    they are offered. The result is empty if the fastest kernel of the smaller size is listed only by cuDNN and there is
    no larger size: other kernels must not replace it.

    Args:
        low: The nearest smaller size, if any.
        high: The nearest larger size, if any.
        rows: Rows of the mini-batch.
        modelled: Returns the candidates that providers offer for a number of rows, with estimates.
    """
    fastest = min(low[1], key=rank) if low else None
    if high is None and (fastest is None or fastest.provider in LISTED_BY_CUDNN):
        return ()
    here = _by_kernel(modelled(rows))
    sides = [
        _Side(size, {c.variant: c for c in candidates}, _by_kernel(modelled(size)))
        for size, candidates in filter(None, (low, high))
    ]
    results: list[Candidate] = []
    for kernel, candidate in {key: c for side in sides for key, c in side.measured.items()}.items():
        offered, listed = _offered_as(candidate), candidate.provider in LISTED_BY_CUDNN
        having = [side for side in sides if kernel in side.measured and offered in side.modelled]
        if offered not in here or not having or (listed and having[-1].size < rows):
            continue
        candidates = [side.measured[kernel] for side in having]
        estimates_us = [side.modelled[offered].time_us for side in having]
        time_us = _resized_us([side.size for side in having], candidates, estimates_us, rows, here[offered].time_us)
        sized = max(candidates, key=lambda c: c.workspace_bytes) if listed else here[offered]
        results.append(
            replace(
                candidate,
                workspace_bytes=sized.workspace_bytes,
                time_us=time_us,
                accumulate_us=max(c.accumulate_us / c.time_us for c in candidates) * time_us,
                deterministic=all(c.deterministic for c in candidates),
                accumulates=all(c.accumulates for c in candidates),
                measured=False,
            )
        )
    return tuple(sorted(results, key=rank))


@dataclass(frozen=True, slots=True)
class _Side:
    """Measured candidates of a size, and those that providers offer for it."""

    size: int
    measured: Mapping[Variant, Candidate]
    modelled: Mapping[Variant, Candidate]


def _resized_us(
    sizes: Sequence[int], measured: Sequence[Candidate], estimates_us: Sequence[float], rows: int, estimate_us: float
) -> float:
    """Return a kernel's time for `rows`, from its times at one or two `sizes` and the estimates of all."""
    ratios = [c.time_us / us for c, us in zip(measured, estimates_us, strict=True)]
    if len(sizes) == 1:
        bounds_us = [measured[0].time_us, measured[0].time_us * rows / sizes[0]]
        ratio = ratios[0]
    else:
        bounds_us = [c.time_us for c in measured]
        share = math.log(rows / sizes[0]) / math.log(sizes[1] / sizes[0])
        ratio = ratios[0] ** (1 - share) * ratios[1] ** share
    return min(max(bounds_us), max(min(bounds_us), ratio * estimate_us))


def _by_kernel(offered: Iterable[Candidate]) -> Mapping[Variant, Candidate]:
    """Return the offers by kernel; of a kernel with several workspaces the largest, which the fastest kernels use."""
    by_kernel: dict[Variant, Candidate] = {}
    for candidate in offered:
        key = _offered_as(candidate)
        if key not in by_kernel or by_kernel[key].workspace_bytes < candidate.workspace_bytes:
            by_kernel[key] = candidate
    return by_kernel


def _offered_as(candidate: Candidate) -> Variant:
    """Return the key of a kernel among the offers.

    For kernels that only cuDNN lists, it is the key of the candidate that is offered in their place.
    """
    if candidate.provider in LISTED_BY_CUDNN:
        return (CUDNN.name, candidate.name, (), candidate.layouts)
    return candidate.variant

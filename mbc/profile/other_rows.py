"""Times of rows that were not measured, from other sizes: what was measured there, times what estimates
(`mbc.kernels.calibration`) say that these rows take of it.

Estimates know how a kernel's time changes with its rows better than how fast it is. Both are
compared with measurements at fewer rows in `benchmarks/results/decisions/scaled.json`, whole steps in
`benchmarks/results/decisions/other_batches.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mbc.kernels import LISTED_BY_CUDNN
from mbc.kernels.base import Candidate, Variant
from mbc.kernels.cudnn import CUDNN
from mbc.profile.interpolate import Size, rank

MOST_TIMES = 16  # as many rows a size may have from which times are scaled
BETWEEN_TIMES = 8  # apart at most two sizes are between which times are as good as interpolated ones (decision 070)


def larger_size(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> Size | None:
    """The smallest size that was measured where `rows` are fewer; None where they are not, or by too much. `family` is
    sorted by size."""
    smallest = next(iter(family), 0)
    return (smallest, family[smallest]) if rows < smallest <= MOST_TIMES * rows else None


def nearest_sizes(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> tuple[Size | None, Size | None]:
    """The nearest smaller and the nearest larger size of which some kernel is known, neither too far away."""
    known = [
        size for size, found in family.items() if found and rows <= MOST_TIMES * size and size <= MOST_TIMES * rows
    ]
    low = max((size for size in known if size < rows), default=0)
    high = min((size for size in known if size > rows), default=0)
    return (low, family[low]) if low else None, (high, family[high]) if high else None


def larger_sizes(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> Iterable[Size]:
    """Every measured size from which times of `rows` may be scaled, the smallest first."""
    return ((size, found) for size, found in family.items() if rows < size <= MOST_TIMES * rows)


def octave(times: float) -> int:
    """How many times as large a size is, as the power of two that is no less: what errors are told apart by."""
    return 1 << (math.ceil(times) - 1).bit_length()


def scaled(larger: Size, rows: int, there: Sequence[Candidate], here: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """What was measured at a larger size for fewer rows, fastest first and marked as not measured.

    `there` and `here`: what providers offer at that size and for `rows`, with their estimates. A time falls as these
    do, never by more than the rows do. What its provider offers there has to be offered here, too, and takes the
    workspace that it is offered with. What only cuDNN can list goes by estimates in the same layouts and keeps its
    workspace, which may be too much and is seldom too little: engines change their tiling in steps.
    """
    larger_rows, measured = larger
    if not rows < larger_rows:
        raise ValueError(f"{rows} rows are not fewer than {larger_rows}")
    before, after = _by_kernel(there), _by_kernel(here)
    found: list[Candidate] = []
    for candidate in measured:
        key = _offered_as(candidate)
        if key not in before or key not in after:
            continue
        share = min(1.0, max(rows / larger_rows, after[key].time_us / before[key].time_us))
        sized = candidate if candidate.provider in LISTED_BY_CUDNN else after[key]
        found.append(
            replace(
                candidate,
                workspace_bytes=sized.workspace_bytes,
                time_us=share * candidate.time_us,
                accumulate_us=share * candidate.accumulate_us,
                measured=False,
            )
        )
    return tuple(sorted(found, key=rank))


def resized(
    low: Size | None, high: Size | None, rows: int, modelled: Callable[[int], Iterable[Candidate]]
) -> tuple[Candidate, ...]:
    """What was measured at the nearest smaller and the nearest larger size, for a whole mini-batch of `rows`, fastest
    first and marked as not measured. `modelled`: what providers offer for a number of rows, with their estimates.

    Measured times over estimates go evenly from one size to the other on a logarithmic scale of rows; those of a single
    size are taken as they are there. No time changes by more than the rows do. A kernel that only cuDNN can list has to
    be known of the larger size, whose workspace it keeps; others take the workspace that they are offered with. None
    where such a kernel is the fastest of the smaller size, and there is no larger one: others must not stand in for it.
    """
    fastest = min(low[1], key=rank) if low else None
    if high is None and (fastest is None or fastest.provider in LISTED_BY_CUDNN):
        return ()
    here = _by_kernel(modelled(rows))
    sides = [
        _Side(size, {c.variant: c for c in known}, _by_kernel(modelled(size)))
        for size, known in filter(None, (low, high))
    ]
    found: list[Candidate] = []
    for kernel, candidate in {key: c for side in sides for key, c in side.known.items()}.items():
        offered, listed = _offered_as(candidate), candidate.provider in LISTED_BY_CUDNN
        having = [side for side in sides if kernel in side.known and offered in side.modelled]
        if offered not in here or not having or (listed and having[-1].size < rows):
            continue
        known = [side.known[kernel] for side in having]
        estimates_us = [side.modelled[offered].time_us for side in having]
        time_us = _resized_us([side.size for side in having], known, estimates_us, rows, here[offered].time_us)
        sized = max(known, key=lambda c: c.workspace_bytes) if listed else here[offered]
        found.append(
            replace(
                candidate,
                workspace_bytes=sized.workspace_bytes,
                time_us=time_us,
                accumulate_us=max(c.accumulate_us / c.time_us for c in known) * time_us,
                deterministic=all(c.deterministic for c in known),
                accumulates=all(c.accumulates for c in known),
                measured=False,
            )
        )
    return tuple(sorted(found, key=rank))


@dataclass(frozen=True, slots=True)
class _Side:
    """What was measured at a size, and what providers offer for it."""

    size: int
    known: Mapping[Variant, Candidate]
    modelled: Mapping[Variant, Candidate]


def _resized_us(
    sizes: Sequence[int], known: Sequence[Candidate], estimates_us: Sequence[float], rows: int, estimate_us: float
) -> float:
    """A kernel's time for `rows`, from its times at one or two `sizes` and the estimates of all."""
    ratios = [c.time_us / us for c, us in zip(known, estimates_us, strict=True)]
    if len(sizes) == 1:
        bounds_us = [known[0].time_us, known[0].time_us * rows / sizes[0]]
        ratio = ratios[0]
    else:
        bounds_us = [c.time_us for c in known]
        share = math.log(rows / sizes[0]) / math.log(sizes[1] / sizes[0])
        ratio = ratios[0] ** (1 - share) * ratios[1] ** share
    return min(max(bounds_us), max(min(bounds_us), ratio * estimate_us))


def _by_kernel(offered: Iterable[Candidate]) -> Mapping[Variant, Candidate]:
    """Of a kernel that is offered with more or less workspace the one with most: it is what the fastest ones take."""
    found: dict[Variant, Candidate] = {}
    for candidate in offered:
        key = _offered_as(candidate)
        if key not in found or found[key].workspace_bytes < candidate.workspace_bytes:
            found[key] = candidate
    return found


def _offered_as(candidate: Candidate) -> Variant:
    """What tells a kernel from others; where only cuDNN can list them, what it has in common with what is offered in
    their place."""
    if candidate.provider in LISTED_BY_CUDNN:
        return (CUDNN.name, candidate.name, (), candidate.layouts)
    return candidate.variant

"""Times of fewer rows than were measured, from a larger size: what was measured there, times what estimates
(`mbc.kernels.calibration`) say that fewer rows take of it.

Estimates know how a kernel's time falls with its rows better than how fast it is. `benchmarks/scaled.py` compares both
with what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mbc.ir.types import Layout
from mbc.kernels import LISTED_BY_CUDNN
from mbc.kernels.base import Candidate
from mbc.kernels.cudnn import CUDNN
from mbc.profile.interpolate import Size, rank

MOST_TIMES = 16  # as many rows a size may have from which times are scaled

_Kernel = tuple[str, str, tuple[tuple[str, int], ...], tuple[Layout, ...]]


def larger_size(family: Mapping[int, tuple[Candidate, ...]], rows: int) -> Size | None:
    """The smallest size that was measured where `rows` are fewer; None where they are not, or by too much. `family` is
    sorted by size."""
    smallest = next(iter(family), 0)
    return (smallest, family[smallest]) if rows < smallest <= MOST_TIMES * rows else None


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


def _by_kernel(offered: Iterable[Candidate]) -> Mapping[_Kernel, Candidate]:
    """Of a kernel that is offered with more or less workspace the one with most: it is what the fastest ones take."""
    found: dict[_Kernel, Candidate] = {}
    for candidate in offered:
        key = _offered_as(candidate)
        if key not in found or found[key].workspace_bytes < candidate.workspace_bytes:
            found[key] = candidate
    return found


def _offered_as(candidate: Candidate) -> _Kernel:
    """What tells a kernel from others; where only cuDNN can list them, what it has in common with what is offered in
    their place."""
    if candidate.provider in LISTED_BY_CUDNN:
        return (CUDNN.name, candidate.name, (), candidate.layouts)
    return (candidate.provider, candidate.name, candidate.settings, candidate.layouts)

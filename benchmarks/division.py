"""The best way to divide one operation by a profile: as mbc's menu says, and as trying all divisions says.

The brute force shares no code with `mbc.optimize.candidates.pareto`: it goes through every way to write the mini-batch
as a sum of the sizes that can be called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from record import ROOT  # puts mbc on the path

from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request
from mbc.optimize.candidates.pareto import MicroBatch, ParetoFront, Point, pareto_front
from mbc.profile.model import Profile

assert ROOT
Offers = Mapping[tuple[Layout, ...], Mapping[int, Sequence[Candidate]]]  # by layouts, then by rows


def offers(profile: Profile, requests: Mapping[int, Request], providers: tuple[str, ...] = ()) -> Offers:
    """What was measured for the slices of one operation, by layouts; of these providers (none: all)."""
    found: dict[tuple[Layout, ...], dict[int, list[Candidate]]] = {}
    for rows, request in requests.items():
        for candidate in profile.candidates(request):
            if candidate.measured and (not providers or candidate.provider in providers):
                found.setdefault(candidate.layouts, {}).setdefault(rows, []).append(candidate)
    return found


def undivided(found: Offers, rows: int, limit_bytes: int) -> Point | None:
    """The fastest single call within the limit."""
    within = (c for sizes in found.values() for c in sizes.get(rows, ()) if c.workspace_bytes <= limit_bytes)
    best = min(within, key=lambda c: (c.time_us, c.workspace_bytes), default=None)
    return best and Point(best.workspace_bytes, best.time_us, (MicroBatch(rows, best),))


def menus(found: Offers, rows: int, sums: bool) -> tuple[ParetoFront, ...]:
    """mbc's own fronts, one a combination of layouts."""
    return tuple(pareto_front(sizes, rows, sums) for sizes in found.values())


def divided(fronts: Sequence[ParetoFront], limit_bytes: int) -> Point | None:
    """The fastest point within the limit."""
    within = (point for front in fronts for point in front if point.workspace_bytes <= limit_bytes)
    return min(within, key=lambda point: point.time_us, default=None)


def brute_force_us(found: Offers, rows: int, sums: bool, limit_bytes: int) -> float:
    """The least time of all divisions within the limit, each call at its fastest; infinite where there is none."""
    return min((_layout_us(sizes, rows, sums, limit_bytes) for sizes in found.values()), default=math.inf)


def _layout_us(offered: Mapping[int, Sequence[Candidate]], rows: int, sums: bool, limit_bytes: int) -> float:
    sizes = tuple(sorted(offered, reverse=True))
    # The least time of a call of each size: of one that overwrites, and of one that follows another.
    first, further = (np.full(len(sizes), np.inf) for _ in range(2))
    for place, size in enumerate(sizes):
        for candidate in offered[size]:
            if candidate.workspace_bytes > limit_bytes:
                continue
            first[place] = min(first[place], candidate.time_us)
            if not sums:
                further[place] = min(further[place], candidate.time_us)
            elif candidate.accumulates:
                further[place] = min(further[place], candidate.accumulate_us or candidate.time_us)
    return _least_us(rows, sizes, tuple(first.tolist()), tuple(further.tolist()), sums)


@cache
def _least_us(
    rows: int, sizes: tuple[int, ...], firsts: tuple[float, ...], furthers: tuple[float, ...], sums: bool
) -> float:
    """Over all partitions. Many limits admit the same calls: asked once."""
    first, further = np.array(firsts), np.array(furthers)
    counts = partitions(rows, sizes)
    if not len(counts):
        return math.inf
    known = np.isfinite(further)
    times = counts @ np.where(known, further, 0.0)
    impossible = counts @ ~known  # calls that cannot follow
    if not sums:
        return float(np.where(impossible == 0, times, np.inf).min())
    # One call comes first and overwrites: whichever saves most, or the one that cannot follow.
    saved = first - np.where(known, further, 0.0)
    leads = (counts > 0) & (impossible[:, None] == np.where(known, 0, 1))
    return float((times + np.where(leads, saved, np.inf).min(axis=1)).min())


@cache
def partitions(rows: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Every way to write `rows` as a sum of sizes (descending): one line a way, how often each size occurs.

    Of 256 and all powers of two there are 692,004.
    """
    if not sizes:
        return np.zeros((1 if rows == 0 else 0, 0), np.int16)
    size, *smaller = sizes
    parts: list[np.ndarray] = []
    for count in range(rows // size + 1):
        rest = partitions(rows - count * size, tuple(smaller))
        parts.append(np.hstack([np.full((len(rest), 1), count, np.int16), rest]))
    return np.vstack(parts)

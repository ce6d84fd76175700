"""Differences between two profiles: requests, candidates, and their times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from mbc.profile.edit import candidate_key
from mbc.profile.model import Measurement, Profile

TOLERANCE = 0.05  # share by which a time may differ from one run to the next


@dataclass(frozen=True, slots=True)
class TimeChange:
    """One candidate of one request (given by its signature) whose times differ."""

    signature: str
    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        """Second time over first."""
        return self.after.time_us / self.before.time_us


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of second to first times of the candidates that both profiles timed by replays."""

    count: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """Differences of two profiles.

    `changes` are in order of decreasing size. `only_*_candidates` count candidates of requests that both profiles have.
    """

    only_before: tuple[str, ...]  # signatures of requests
    only_after: tuple[str, ...]
    only_before_candidates: int
    only_after_candidates: int
    refused_before: int  # candidates that only the first profile refuses
    refused_after: int
    changes: tuple[TimeChange, ...]
    ratios: Ratios | None  # None if the profiles have no timed candidate in common


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    """Compare two profiles of any machines; times of candidates that ran only once are not compared."""
    changes: list[TimeChange] = []
    ratios: list[float] = []
    only_before = only_after = refused_before = refused_after = 0
    old_keys, new_keys = (frozenset({*p.measurements, *p.extents}) for p in (before, after))
    for key in sorted(old_keys & new_keys):
        old, new = ({candidate_key(m): m for m in p.measurements.get(key, ())} for p in (before, after))
        only_before += len(old.keys() - new.keys())
        only_after += len(new.keys() - old.keys())
        for same in sorted(old.keys() & new.keys()):
            a, b = old[same], new[same]
            refused_before += bool(a.refused) and not b.refused
            refused_after += bool(b.refused) and not a.refused
            if a.refused or b.refused or a.dominated or b.dominated or not a.time_us:
                continue
            change = TimeChange(key, a, b)
            ratios.append(change.ratio)
            if abs(change.ratio - 1) > TOLERANCE:
                changes.append(change)
    changes.sort(key=lambda c: -max(c.ratio, 1 / max(c.ratio, 1e-9)))
    return ProfileDiff(
        tuple(sorted(old_keys - new_keys)),
        tuple(sorted(new_keys - old_keys)),
        only_before,
        only_after,
        refused_before,
        refused_after,
        tuple(changes),
        _ratios(ratios),
    )


def _ratios(ratios: list[float]) -> Ratios | None:
    if not ratios:
        return None
    tenths = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 9
    return Ratios(len(ratios), statistics.median(ratios), tenths[0], tenths[-1])

"""What differs between two profiles: requests, candidates, and their times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from mbc.profile.edit import candidate_key
from mbc.profile.model import Measurement, Profile

TOLERANCE = 0.05  # share by which a time may differ from one run to the next


@dataclass(frozen=True, slots=True)
class TimeChange:
    """One candidate of one request (by its signature) whose times differ."""

    signature: str
    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        return self.after.time_us / self.before.time_us


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of the times of what both profiles measured with care, second over first."""

    count: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """`changes` come with the largest first. `only_*_candidates` are of requests that both have."""

    only_before: tuple[str, ...]  # signatures of requests
    only_after: tuple[str, ...]
    only_before_candidates: int
    only_after_candidates: int
    refused_before: int  # candidates that only this one refuses
    refused_after: int
    changes: tuple[TimeChange, ...]
    ratios: Ratios | None  # None where they have nothing in common


def diff_profiles(before: Profile, after: Profile) -> ProfileDiff:
    """Compare two profiles, of whatever machines. Times of what was run once only are not compared."""
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


def _ratios(found: list[float]) -> Ratios | None:
    if not found:
        return None
    tenths = statistics.quantiles(found, n=10, method="inclusive") if len(found) > 1 else [found[0]] * 9
    return Ratios(len(found), statistics.median(found), tenths[0], tenths[-1])

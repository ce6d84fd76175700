"""Measured times over times derived from other sizes: interpolated between two sizes, or scaled from a larger size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import PROVIDERS
from mbc.profile.interpolate import between
from mbc.profile.model import Profile
from mbc.profile.other_rows import MOST_TIMES, scaled
from mbc.profile.signature import read_signature, rows_of, signature, with_rows


def interpolated(profile: Profile) -> list[float]:
    """Return measured over interpolated times of sizes between two measured sizes."""
    families: dict[str, dict[int, tuple[Candidate, ...]]] = defaultdict(dict)
    for key in profile.measurements:
        request = read_signature(key)
        families[signature(with_rows(request, 0))][rows_of(request)] = profile.candidates(request)
    ratios: list[float] = []
    for family in families.values():
        sizes = sorted(rows for rows, candidates in family.items() if candidates)
        for low, rows, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
            guesses = between((low, family[low]), (high, family[high]), rows)
            times_us = {c.variant: c.time_us for c in family[rows]}
            guess = next((g for g in guesses if g.variant in times_us), None)
            if guess is not None:
                ratios.append(times_us[guess.variant] / guess.time_us)
    return ratios


@dataclass(frozen=True)
class ScaledTime:
    """A measured size scaled from a larger size, for the kernel of one provider that seems fastest.

    Attributes:
        ratio: Measured over scaled time.
        times: Rows of the larger size over rows of the smaller one.
    """

    request: Request
    provider: str
    times: float
    ratio: float


def scaled_times(profile: Profile, device: DeviceSpec, most_times: float = MOST_TIMES) -> Iterator[ScaledTime]:
    """Yield each size, scaled from every larger size that has at most `most_times` as many rows."""

    @cache
    def offered(request: Request) -> tuple[Candidate, ...]:
        return tuple(c for p in PROVIDERS for c in p.candidates(request, device))

    for family in dict.fromkeys(with_rows(read_signature(key), 0) for key in profile.measurements):
        sizes = {
            rows: measured
            for rows, candidates in profile.family(family).items()
            if (measured := tuple(c for c in candidates if c.measured))
        }
        for rows, larger in product(sizes, sizes):
            if not rows < larger <= most_times * rows:
                continue
            request = with_rows(family, rows)
            times_us = {c.variant: c.time_us for c in sizes[rows]}
            guesses = scaled((larger, sizes[larger]), rows, offered(with_rows(family, larger)), offered(request))
            first: dict[str, Candidate] = {}
            for guess in guesses:
                if guess.variant in times_us:
                    first.setdefault(guess.provider, guess)
            for provider, guess in first.items():
                yield ScaledTime(request, provider, larger / rows, times_us[guess.variant] / guess.time_us)

"""Times of a micro-batch or a mini-batch scaled from other sizes of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Provider, Request, Variant
from mbc.kernels.calibration import INTERPOLATED, UNCOMPARED, Spread, calibration
from mbc.kernels.cuda import OWN
from mbc.optimize import effort
from mbc.optimize.candidates.user_rules import Rules
from mbc.plan.model import Kernel
from mbc.profile.model import Profile
from mbc.profile.scale import BETWEEN_TIMES, larger_size, larger_sizes, nearest_sizes, octave, resized, scaled
from mbc.profile.signature import rows_of, signature, with_rows


@dataclass(frozen=True, slots=True)
class ScaledCandidate:
    """A candidate whose time is scaled from a size of so many times the rows, or the rows from so many times that;
    `between`: from one of each."""

    times: float
    candidate: Candidate
    between: bool = False


RematKernels = frozenset[str]  # names of kernels
NO_REMAT_KERNELS = RematKernels()


@dataclass
class OtherSizes:
    """Measured sizes of a profile other than that of a request. `providers`, also those that may not be used, model
    how times change with the rows. `batch`: rows of a whole mini-batch; `rules`: of what may be used."""

    profile: Profile
    providers: tuple[Provider, ...]
    device: DeviceSpec
    batch: int
    precision: Precision
    rules: Rules
    _known: dict[Request, tuple[ScaledCandidate, ...]] = field(
        default_factory=dict[Request, tuple[ScaledCandidate, ...]]
    )
    _sized: dict[tuple[Request, RematKernels], tuple[ScaledCandidate, ...]] = field(
        default_factory=dict[tuple[Request, RematKernels], tuple[ScaledCandidate, ...]]
    )

    _remats: dict[Request, list[RematKernels]] = field(default_factory=dict[Request, list[RematKernels]])

    @cached_property
    def of_similar_gpu(self) -> OtherSizes | None:
        """The same of the similar GPU's profile, where there is one."""
        similar = self.profile.similar
        return None if similar is None else replace(self, profile=similar, _known={}, _sized={}, _remats={})

    def nearest(self, request: Request, remat_kernels: RematKernels = NO_REMAT_KERNELS) -> tuple[Candidate, ...]:
        """What the profile knows of a request and may be used, fastest first. For a whole mini-batch: what was measured
        at so many rows, and kernels of mbc's own that were measured later, at other sizes, where even the upper end of
        their range is faster than all of it; else times from the nearest smaller and larger sizes
        (`mbc.profile.scale.resized`). For a part of one only what both sizes have."""
        known = self.profile.family(request).get(rows_of(request))
        if rows_of(request) < self.batch:
            known = self.profile.candidates(request)
            return self.rules.admitted(known or (), self.precision, remat_kernels)
        scaled_ones = (sized.candidate for sized in self._of_mini_batch(request, remat_kernels))
        return (*scaled_ones, *self.rules.admitted(known or (), self.precision, remat_kernels))

    def later_on_similar_gpu(
        self, request: Request, remat_kernels: RematKernels = NO_REMAT_KERNELS
    ) -> tuple[Candidate, ...]:
        """For a mini-batch that was measured here: kernels of mbc's own that were not, or in earlier versions only, and
        that the similar GPU's profile has of a later date, where even the upper end of their range is faster than all
        that is known here."""
        similar, rows = self.of_similar_gpu, rows_of(request)
        if similar is None or similar.profile.scaling is None:
            return ()
        known = self.rules.admitted(self.profile.candidates(request) or (), self.precision, remat_kernels)
        before = self._date(request, rows)
        if not known or not before or similar._date(request, rows)[: len(before)] <= before:
            return ()
        tried, tried_there = (
            {m.candidate().variant for m in profile.measurements.get(signature(request), ())}
            for profile in (self.profile, similar.profile)
        )
        most_us = min(c.time_us for c in known) / similar.profile.scaling.spread(self.precision).high
        theirs = self.rules.admitted(similar.profile.candidates(request) or (), self.precision, remat_kernels)
        new = tried_there - tried  # what the other one knows of earlier versions only is no news
        return tuple(c for c in theirs if c.provider == OWN.name and c.variant in new and c.time_us < most_us)

    def came_later(self, request: Request, kernel: Kernel) -> bool:
        """Whether a kernel's time is from another size, or from a similar GPU, measured later than this mini-batch
        was."""
        known = self.profile.family(request).get(rows_of(request))
        return bool(known) and any(
            is_of(kernel, candidate)
            for remat_kernels in (NO_REMAT_KERNELS, *self._remats.get(request, ()))
            for candidate in (
                *(sized.candidate for sized in self._of_mini_batch(request, remat_kernels)),
                *self.later_on_similar_gpu(request, remat_kernels),
            )
        )

    def is_near(self, request: Request) -> bool:
        """Whether a whole mini-batch of this size was measured, or one of no more than a few times the rows."""
        rows = rows_of(request)
        most, family = effort.NEAR_TIMES, self.profile.family(request)
        return any(found and rows / most <= size <= most * rows for size, found in family.items())

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """For fewer rows than were measured: times scaled from the nearest size. For rows that were measured: only
        kernels of mbc's own that were measured later, at another size, where even the upper end of their prediction
        interval is faster than all known candidates."""
        return tuple(scaled_candidate.candidate for scaled_candidate in self._all(request))

    def spread(self, request: Request, kernel: Kernel) -> Spread | None:
        """The error spread of a kernel's time; None where it is not scaled from another size."""
        for scaled_candidate in (*self._all(request), *self._of_all_remats(request)):
            if is_of(kernel, scaled_candidate.candidate):
                return _spread_of(scaled_candidate)
        return None

    def _of_all_remats(self, request: Request) -> Iterator[ScaledCandidate]:
        """Whatever kernels recompute the outputs."""
        for remat_kernels in (NO_REMAT_KERNELS, *self._remats.get(request, ())):
            yield from self._of_mini_batch(request, remat_kernels)

    def _of_mini_batch(self, request: Request, remat_kernels: RematKernels) -> tuple[ScaledCandidate, ...]:
        key = request, remat_kernels
        known = self._sized.get(key)
        if known is None:
            known = self._sized[key] = tuple(self._resized(request, remat_kernels))
            if remat_kernels:
                self._remats.setdefault(request, []).append(remat_kernels)
        return known

    def _resized(self, request: Request, remat_kernels: RematKernels) -> Iterator[ScaledCandidate]:
        rows = rows_of(request)
        # Admitted at once: what may not run must not stand in for what may.
        family = {
            size: self.rules.admitted(found, self.precision, remat_kernels)
            for size, found in self.profile.family(request).items()
        }
        known = family.pop(rows, None)
        if known is None:
            yield from self._between(request, family)
        elif known:
            tried, fastest_us = self._tried(request, rows), min(c.time_us for c in known)
            later = {
                size: tuple(c for c in found if c.provider == OWN.name and c.variant not in tried)
                for size, found in family.items()
                if self._is_later(request, size, rows)
            }
            for sized in self._between(request, later):
                _, high = calibration().factors(_spread_of(sized), self.device)
                if high * sized.candidate.time_us < fastest_us:
                    yield sized

    def _between(self, request: Request, family: Mapping[int, tuple[Candidate, ...]]) -> Iterator[ScaledCandidate]:
        """Candidates of the nearest sizes of a family."""
        rows = rows_of(request)
        low, high = nearest_sizes(family, rows)
        found = resized(low, high, rows, lambda size: self._offered(with_rows(request, size)))
        sides = [(size, {c.variant for c in known}) for size, known in (low or (0, ()), high or (0, ()))]
        for candidate in found:
            sizes = [size for size, known in sides if candidate.variant in known]
            times = max(max(size / rows, rows / size) for size in sizes)
            yield ScaledCandidate(times, candidate, len(sizes) > 1 and sizes[1] <= BETWEEN_TIMES * sizes[0])

    def _all(self, request: Request) -> tuple[ScaledCandidate, ...]:
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = tuple(self._look_up(request))
        return known

    def _look_up(self, request: Request) -> Iterator[ScaledCandidate]:
        family, rows = self.profile.family(request), rows_of(request)
        nearest = larger_size(family, rows)
        if nearest is None:
            yield from self._newer(request, rows, family.get(rows, ()))
            return
        size, measured = nearest
        found = self._scaled(request, size, measured)
        yield from (ScaledCandidate(size / rows, candidate) for candidate in found)
        yield from self._newer(request, size, found)

    def _newer(self, request: Request, size: int, known: Sequence[Candidate]) -> Iterator[ScaledCandidate]:
        """Candidates of sizes that were measured later, in addition to those `known` from one size."""
        if not known:
            return
        family, rows = self.profile.family(request), rows_of(request)
        fastest_us = min(c.time_us for c in known)
        seen = self._tried(request, size)
        for larger, measured in larger_sizes(family, rows):
            new = [c for c in measured if c.measured and c.provider == OWN.name and c.variant not in seen]
            if larger <= size or not new or not self._is_later(request, larger, size):
                continue
            seen.update(c.variant for c in new)
            _, high = calibration().factors(_spread(OWN.name, larger / rows), self.device)
            found = self._scaled(request, larger, new)
            yield from (ScaledCandidate(larger / rows, c) for c in found if high * c.time_us < fastest_us)

    def _scaled(self, request: Request, size: int, measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
        there, here = (tuple(self._offered(r)) for r in (with_rows(request, size), request))
        return scaled((size, measured), rows_of(request), there, here)

    def _offered(self, request: Request) -> Iterable[Candidate]:
        return (c for provider in self.providers for c in provider.candidates(request, self.device))

    def _tried(self, request: Request, size: int) -> set[Variant]:
        """What was run at a size, also what was refused there."""
        here = with_rows(request, size)
        known = {c.variant for c in self.profile.family(request).get(size, ())}
        return known.union(m.candidate().variant for m in self.profile.measurements.get(signature(here), ()))

    def _is_later(self, request: Request, size: int, other: int) -> bool:
        """Whether one size was measured later than another one; not where that cannot be told."""
        date, before = (self._date(request, rows) for rows in (size, other))
        return bool(before) and date[: len(before)] > before

    def _date(self, request: Request, size: int) -> str:
        """The date of the measurement at a size, empty where that is not known."""
        key = signature(with_rows(request, size))
        outdated = self.profile.outdated.get(key)
        extent = self.profile.extents.get(key) or (outdated.extent if outdated else None)
        return extent.date if extent else ""


def is_of(kernel: Kernel, candidate: Candidate) -> bool:
    """Whether a kernel's time is that of a candidate."""
    return candidate.variant[:3] == (kernel.provider, kernel.name, kernel.settings) and kernel.time_us in (
        candidate.time_us,
        candidate.accumulate_us,
    )


def _spread_of(scaled_candidate: ScaledCandidate) -> Spread:
    if scaled_candidate.between:
        return calibration().spreads.get(INTERPOLATED, UNCOMPARED)
    return _spread(scaled_candidate.candidate.provider, scaled_candidate.times)


def _spread(provider: str, times: float) -> Spread:
    return calibration().scaled(provider, octave(times))

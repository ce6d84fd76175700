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
from mbc.profile.other_rows import BETWEEN_TIMES, larger_size, larger_sizes, nearest_sizes, octave, resized, scaled
from mbc.profile.signature import rows_of, signature, with_rows


@dataclass(frozen=True, slots=True)
class ScaledCandidate:
    """A candidate whose time is scaled from other sizes.

    Attributes:
        times: Ratio of the rows, the larger over the smaller.
        candidate: The candidate.
        between: Whether the time is interpolated between a smaller and a larger size.
    """

    times: float
    candidate: Candidate
    between: bool = False


RematKernels = frozenset[str]  # names of kernels
NO_REMAT_KERNELS = RematKernels()


@dataclass
class OtherSizes:
    """Measured sizes of a profile other than that of a request.

    Attributes:
        profile: The profile.
        providers: Providers that model how times change with the rows, including those that may not be used.
        device: The GPU.
        batch: Rows of a whole mini-batch.
        precision: Precision of the network.
        rules: The candidates that may be used.
    """

    profile: Profile
    providers: tuple[Provider, ...]
    device: DeviceSpec
    batch: int
    precision: Precision
    rules: Rules
    _scaled_by_request: dict[Request, tuple[ScaledCandidate, ...]] = field(
        default_factory=dict[Request, tuple[ScaledCandidate, ...]]
    )
    _sized: dict[tuple[Request, RematKernels], tuple[ScaledCandidate, ...]] = field(
        default_factory=dict[tuple[Request, RematKernels], tuple[ScaledCandidate, ...]]
    )

    _remats: dict[Request, list[RematKernels]] = field(default_factory=dict[Request, list[RematKernels]])

    @cached_property
    def of_similar_gpu(self) -> OtherSizes | None:
        """Other sizes of the similar GPU's profile; None if there is no similar GPU."""
        similar = self.profile.similar
        return None if similar is None else replace(self, profile=similar, _scaled_by_request={}, _sized={}, _remats={})

    def nearest(self, request: Request, remat_kernels: RematKernels = NO_REMAT_KERNELS) -> tuple[Candidate, ...]:
        """Return the candidates of a request that the profile has and that may be used, with their times.

        For a whole mini-batch that was measured: the measured candidates, preceded by mbc's own kernels that were
        measured later, at other sizes, if even the upper end of their prediction interval is faster than all others.
        For a mini-batch that was not measured: times from the nearest smaller and larger sizes
        (`mbc.profile.other_rows.resized`). For fewer rows than a mini-batch: only measurements at that size.
        """
        measured = self.profile.family(request).get(rows_of(request))
        if rows_of(request) < self.batch:
            measured = self.profile.candidates(request)
            return self.rules.admitted(measured or (), self.precision, remat_kernels)
        scaled_ones = (sized.candidate for sized in self._of_mini_batch(request, remat_kernels))
        return (*scaled_ones, *self.rules.admitted(measured or (), self.precision, remat_kernels))

    def later_on_similar_gpu(
        self, request: Request, remat_kernels: RematKernels = NO_REMAT_KERNELS
    ) -> tuple[Candidate, ...]:
        """Return kernels that only a similar GPU's profile has, for a mini-batch that was measured here.

        They are mbc's own kernels that were not measured here, or in earlier versions only. The similar GPU's
        measurement is of a later date, and even the upper end of the prediction interval is faster than all candidates
        here.
        """
        similar, rows = self.of_similar_gpu, rows_of(request)
        if similar is None or similar.profile.scaling is None:
            return ()
        ours = self.rules.admitted(self.profile.candidates(request) or (), self.precision, remat_kernels)
        before = self._date(request, rows)
        if not ours or not before or similar._date(request, rows)[: len(before)] <= before:
            return ()
        tried, tried_there = (
            {m.candidate().variant for m in profile.measurements.get(signature(request), ())}
            for profile in (self.profile, similar.profile)
        )
        most_us = min(c.time_us for c in ours) / similar.profile.scaling.spread(self.precision).high
        theirs = self.rules.admitted(similar.profile.candidates(request) or (), self.precision, remat_kernels)
        new = tried_there - tried  # measurements of older kernel versions on the other GPU do not count
        return tuple(c for c in theirs if c.provider == OWN.name and c.variant in new and c.time_us < most_us)

    def came_later(self, request: Request, kernel: Kernel) -> bool:
        """Return whether a time was measured later than this mini-batch: at another size or on a similar GPU."""
        measured = self.profile.family(request).get(rows_of(request))
        return bool(measured) and any(
            is_of(kernel, candidate)
            for remat_kernels in (NO_REMAT_KERNELS, *self._remats.get(request, ()))
            for candidate in (
                *(sized.candidate for sized in self._of_mini_batch(request, remat_kernels)),
                *self.later_on_similar_gpu(request, remat_kernels),
            )
        )

    def is_near(self, request: Request) -> bool:
        """Return whether this size was measured, or one within a factor of `effort.NEAR_TIMES` of its rows."""
        rows = rows_of(request)
        most, family = effort.NEAR_TIMES, self.profile.family(request)
        return any(candidates and rows / most <= size <= most * rows for size, candidates in family.items())

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """Return candidates with times scaled from larger sizes.

        For fewer rows than were measured: times scaled from the nearest size. For rows that were measured: only mbc's
        own kernels that were measured later, at another size, where even the upper end of their prediction interval is
        faster than all measured candidates.
        """
        return tuple(scaled_candidate.candidate for scaled_candidate in self._all(request))

    def spread(self, request: Request, kernel: Kernel) -> Spread | None:
        """Return the error spread of a kernel's time; None if the time is not scaled from another size."""
        for scaled_candidate in (*self._all(request), *self._of_all_remats(request)):
            if is_of(kernel, scaled_candidate.candidate):
                return _spread_of(scaled_candidate)
        return None

    def _of_all_remats(self, request: Request) -> Iterator[ScaledCandidate]:
        """Yield the candidates of a mini-batch for every set of kernels that recompute its outputs."""
        for remat_kernels in (NO_REMAT_KERNELS, *self._remats.get(request, ())):
            yield from self._of_mini_batch(request, remat_kernels)

    def _of_mini_batch(self, request: Request, remat_kernels: RematKernels) -> tuple[ScaledCandidate, ...]:
        key = request, remat_kernels
        sized = self._sized.get(key)
        if sized is None:
            sized = self._sized[key] = tuple(self._resized(request, remat_kernels))
            if remat_kernels:
                self._remats.setdefault(request, []).append(remat_kernels)
        return sized

    def _resized(self, request: Request, remat_kernels: RematKernels) -> Iterator[ScaledCandidate]:
        rows = rows_of(request)
        # Candidates are admitted before scaling: one that may not run must not stand in for one that may.
        family = {
            size: self.rules.admitted(candidates, self.precision, remat_kernels)
            for size, candidates in self.profile.family(request).items()
        }
        measured = family.pop(rows, None)
        if measured is None:
            yield from self._between(request, family)
        elif measured:
            tried, fastest_us = self._tried(request, rows), min(c.time_us for c in measured)
            later = {
                size: tuple(c for c in candidates if c.provider == OWN.name and c.variant not in tried)
                for size, candidates in family.items()
                if self._is_later(request, size, rows)
            }
            for sized in self._between(request, later):
                _, high = calibration().factors(_spread_of(sized), self.device)
                if high * sized.candidate.time_us < fastest_us:
                    yield sized

    def _between(self, request: Request, family: Mapping[int, tuple[Candidate, ...]]) -> Iterator[ScaledCandidate]:
        """Yield candidates of the nearest sizes of a family, with times for the rows of the request."""
        rows = rows_of(request)
        low, high = nearest_sizes(family, rows)
        candidates = resized(low, high, rows, lambda size: self._offered(with_rows(request, size)))
        sides = [(size, {c.variant for c in variants}) for size, variants in (low or (0, ()), high or (0, ()))]
        for candidate in candidates:
            sizes = [size for size, variants in sides if candidate.variant in variants]
            times = max(max(size / rows, rows / size) for size in sizes)
            yield ScaledCandidate(times, candidate, len(sizes) > 1 and sizes[1] <= BETWEEN_TIMES * sizes[0])

    def _all(self, request: Request) -> tuple[ScaledCandidate, ...]:
        scaled_ones = self._scaled_by_request.get(request)
        if scaled_ones is None:
            scaled_ones = self._scaled_by_request[request] = tuple(self._look_up(request))
        return scaled_ones

    def _look_up(self, request: Request) -> Iterator[ScaledCandidate]:
        family, rows = self.profile.family(request), rows_of(request)
        nearest = larger_size(family, rows)
        if nearest is None:
            yield from self._newer(request, rows, family.get(rows, ()))
            return
        size, measured = nearest
        scaled_ones = self._scaled(request, size, measured)
        yield from (ScaledCandidate(size / rows, candidate) for candidate in scaled_ones)
        yield from self._newer(request, size, scaled_ones)

    def _newer(self, request: Request, size: int, measured: Sequence[Candidate]) -> Iterator[ScaledCandidate]:
        """Yield candidates of sizes that were measured later, in addition to the `measured` ones of `size`."""
        if not measured:
            return
        family, rows = self.profile.family(request), rows_of(request)
        fastest_us = min(c.time_us for c in measured)
        seen = self._tried(request, size)
        for larger, larger_ones in larger_sizes(family, rows):
            new = [c for c in larger_ones if c.measured and c.provider == OWN.name and c.variant not in seen]
            if larger <= size or not new or not self._is_later(request, larger, size):
                continue
            seen.update(c.variant for c in new)
            _, high = calibration().factors(_spread(OWN.name, larger / rows), self.device)
            scaled_ones = self._scaled(request, larger, new)
            yield from (ScaledCandidate(larger / rows, c) for c in scaled_ones if high * c.time_us < fastest_us)

    def _scaled(self, request: Request, size: int, measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
        there, here = (tuple(self._offered(r)) for r in (with_rows(request, size), request))
        return scaled((size, measured), rows_of(request), there, here)

    def _offered(self, request: Request) -> Iterable[Candidate]:
        return (c for provider in self.providers for c in provider.candidates(request, self.device))

    def _tried(self, request: Request, size: int) -> set[Variant]:
        """Return the kernel variants that were run at a size, including those that were refused there."""
        here = with_rows(request, size)
        variants = {c.variant for c in self.profile.family(request).get(size, ())}
        return variants.union(m.candidate().variant for m in self.profile.measurements.get(signature(here), ()))

    def _is_later(self, request: Request, size: int, other: int) -> bool:
        """Return whether one size was measured later than another one; False if a date is missing."""
        date, before = (self._date(request, rows) for rows in (size, other))
        return bool(before) and date[: len(before)] > before

    def _date(self, request: Request, size: int) -> str:
        """Return the date of the measurement at a size; empty if the profile has none."""
        key = signature(with_rows(request, size))
        outdated = self.profile.outdated.get(key)
        extent = self.profile.extents.get(key) or (outdated.extent if outdated else None)
        return extent.date if extent else ""


def is_of(kernel: Kernel, candidate: Candidate) -> bool:
    """Return whether a kernel's time belongs to a candidate."""
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

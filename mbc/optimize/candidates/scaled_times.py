"""Times of a micro-batch scaled from larger batch sizes of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.calibration import Spread, calibration
from mbc.kernels.cuda import OWN
from mbc.plan.model import Kernel
from mbc.profile.model import Profile
from mbc.profile.scale import larger_size, larger_sizes, octave, scaled
from mbc.profile.signature import rows_of, signature, with_rows


@dataclass(frozen=True, slots=True)
class ScaledCandidate:
    """A candidate whose time is scaled from a larger size of so many rows."""

    size: int
    candidate: Candidate


@dataclass
class LargerSizes:
    """Measured sizes of a profile that are larger than a request. `providers`, also those that may not be used, model
    how times fall with the rows."""

    profile: Profile
    providers: tuple[Provider, ...]
    device: DeviceSpec
    _known: dict[Request, tuple[ScaledCandidate, ...]] = field(
        default_factory=dict[Request, tuple[ScaledCandidate, ...]]
    )

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """For fewer rows than were measured: times scaled from the nearest size. For rows that were measured: only
        kernels of mbc's own that were measured later, at another size, where even the upper end of their prediction
        interval is faster than all known candidates."""
        return tuple(scaled_candidate.candidate for scaled_candidate in self._all(request))

    def spread(self, request: Request, kernel: Kernel) -> Spread | None:
        """The error spread of a kernel's time; None where it is not scaled from a larger size."""
        wanted = (kernel.provider, kernel.name, kernel.settings)
        for scaled_candidate in self._all(request):
            c = scaled_candidate.candidate
            if (c.provider, c.name, c.settings) == wanted and kernel.time_us in (c.time_us, c.accumulate_us):
                return _spread(c.provider, scaled_candidate.size, rows_of(request))
        return None

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
        yield from (ScaledCandidate(size, candidate) for candidate in found)
        yield from self._newer(request, size, found)

    def _newer(self, request: Request, size: int, known: Sequence[Candidate]) -> Iterator[ScaledCandidate]:
        """Candidates of sizes that were measured later, in addition to those `known` from one size."""
        if not known or not (date := self._date(request, size)):
            return
        family, rows = self.profile.family(request), rows_of(request)
        fastest_us = min(c.time_us for c in known)
        seen = {_key(c) for c in family[size]}
        for larger, measured in larger_sizes(family, rows):
            new = [c for c in measured if c.measured and c.provider == OWN.name and _key(c) not in seen]
            if larger <= size or not new or self._date(request, larger) <= date:
                continue
            seen.update(map(_key, new))
            _, high = calibration().factors(_spread(OWN.name, larger, rows), self.device)
            found = self._scaled(request, larger, new)
            yield from (ScaledCandidate(larger, c) for c in found if high * c.time_us < fastest_us)

    def _scaled(self, request: Request, size: int, measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
        there, here = (tuple(self._offered(r)) for r in (with_rows(request, size), request))
        return scaled((size, measured), rows_of(request), there, here)

    def _offered(self, request: Request) -> Iterable[Candidate]:
        return (c for provider in self.providers for c in provider.candidates(request, self.device))

    def _date(self, request: Request, size: int) -> str:
        """The date of the measurement at a size, empty where that is not known."""
        extent = self.profile.extents.get(signature(with_rows(request, size)))
        return extent.date if extent else ""


def _spread(provider: str, size: int, rows: int) -> Spread:
    return calibration().scaled(provider, octave(size / rows))


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.provider, candidate.name, candidate.settings, candidate.layouts

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
class Told:
    """A candidate, and the rows of the larger size that it is from."""

    size: int
    candidate: Candidate


@dataclass
class LargerSizes:
    """`providers` say how times fall with the rows, also those that are not to be used."""

    profile: Profile
    providers: tuple[Provider, ...]
    device: DeviceSpec
    _told: dict[Request, tuple[Told, ...]] = field(default_factory=dict[Request, tuple[Told, ...]])

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """Of fewer rows than any that were measured: times scaled from the nearest size. Of rows that were measured:
        also those kernels of mbc's own that were written since and measured at another size, where even the upper end
        of their range is faster than all that was known."""
        return tuple(told.candidate for told in self._all(request))

    def spread(self, request: Request, kernel: Kernel) -> Spread | None:
        """How far the time of a kernel may be off; None where it is from no larger size."""
        wanted = (kernel.provider, kernel.name, kernel.settings)
        for told in self._all(request):
            c = told.candidate
            if (c.provider, c.name, c.settings) == wanted and kernel.time_us in (c.time_us, c.accumulate_us):
                return _spread(c.provider, told.size, rows_of(request))
        return None

    def _all(self, request: Request) -> tuple[Told, ...]:
        known = self._told.get(request)
        if known is None:
            known = self._told[request] = tuple(self._look_up(request))
        return known

    def _look_up(self, request: Request) -> Iterator[Told]:
        family, rows = self.profile.family(request), rows_of(request)
        nearest = larger_size(family, rows)
        if nearest is None:
            yield from self._newer(request, rows, family.get(rows, ()))
            return
        size, measured = nearest
        found = self._scaled(request, size, measured)
        yield from (Told(size, candidate) for candidate in found)
        yield from self._newer(request, size, found)

    def _newer(self, request: Request, size: int, known: Sequence[Candidate]) -> Iterator[Told]:
        """What sizes that were measured later tell beside what is `known` by a size."""
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
            yield from (Told(larger, c) for c in found if high * c.time_us < fastest_us)

    def _scaled(self, request: Request, size: int, measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
        there, here = (tuple(self._offered(r)) for r in (with_rows(request, size), request))
        return scaled((size, measured), rows_of(request), there, here)

    def _offered(self, request: Request) -> Iterable[Candidate]:
        return (c for provider in self.providers for c in provider.candidates(request, self.device))

    def _date(self, request: Request, size: int) -> str:
        """When it was measured at a size, empty where that is not known."""
        extent = self.profile.extents.get(signature(with_rows(request, size)))
        return extent.date if extent else ""


def _spread(provider: str, size: int, rows: int) -> Spread:
    return calibration().scaled(provider, octave(size / rows))


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.provider, candidate.name, candidate.settings, candidate.layouts

"""What a profile tells of a request by larger sizes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mbc.device.profile import Profile
from mbc.device.scale import larger_size, larger_sizes, octave, scaled
from mbc.device.signature import rows_of, signature, with_rows
from mbc.device.spec import DeviceSpec
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.calibration import Spread, calibration
from mbc.kernels.own import OWN
from mbc.plan.model import Kernel


@dataclass(frozen=True)
class LargerSizes:
    """`providers` say how times fall with the rows, also those that are not to be used."""

    profile: Profile
    providers: tuple[Provider, ...]
    device: DeviceSpec

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """Of a request of fewer rows than any that were measured what the nearest size tells, and what is newer."""
        larger = larger_size(self.profile.family(request), rows_of(request))
        if larger is None:
            return ()
        found = self._scaled(request, *larger)
        return (*found, *self._newer(request, larger[0], found))

    def newer(self, request: Request) -> tuple[Candidate, ...]:
        """Kernels of mbc's own that a larger size knows and this one does not, having been measured before: those that
        even at the upper end of their range are faster than all that was."""
        rows = rows_of(request)
        return self._newer(request, rows, self.profile.family(request).get(rows, ()))

    def _newer(self, request: Request, size: int, facts: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The same beside `facts`, which are of a size."""
        family, rows = self.profile.family(request), rows_of(request)
        if not facts or not (date := self._date(with_rows(request, size))):
            return ()
        fastest_us = min(c.time_us for c in facts)
        known = {_key(c) for c in family[size]}
        found: list[Candidate] = []
        for larger, measured in larger_sizes(family, rows):
            new = [c for c in measured if c.measured and c.provider == OWN.name and _key(c) not in known]
            if larger <= size or not new or self._date(with_rows(request, larger)) <= date:
                continue
            known.update(map(_key, new))
            _, high = calibration().factors(scaled_spread(OWN.name, larger, rows), self.device)
            found += [c for c in self._scaled(request, larger, new) if high * c.time_us < fastest_us]
        return tuple(found)

    def _scaled(self, request: Request, size: int, measured: Sequence[Candidate]) -> tuple[Candidate, ...]:
        there, here = (tuple(self._offered(r)) for r in (with_rows(request, size), request))
        return scaled((size, measured), rows_of(request), there, here)

    def _offered(self, request: Request) -> Iterator[Candidate]:
        return (c for provider in self.providers for c in provider.candidates(request, self.device))

    def _date(self, request: Request) -> str:
        extent = self.profile.extents.get(signature(request))
        return extent.date if extent else ""


def size_of(profile: Profile, request: Request, kernel: Kernel) -> int | None:
    """The larger size from which a kernel's time is; None where it is from no such."""
    family, rows = profile.family(request), rows_of(request)
    holding = [size for size, found in family.items() if any(_runs(c, kernel) for c in found)]
    larger = next((size for size, _ in larger_sizes(family, rows) if size in holding), None)
    if larger is None or rows in holding:
        return None
    sizes = list(family)
    place = sizes.index(larger)
    interpolated = rows not in family and place > 0 and sizes[place - 1] < rows and sizes[place - 1] in holding
    return None if interpolated else larger


def scaled_spread(provider: str, size: int, rows: int) -> Spread:
    """How far times of `rows` may be off that are from a larger size."""
    return calibration().scaled(provider, octave(size / rows))


def _runs(candidate: Candidate, kernel: Kernel) -> bool:
    return (candidate.provider, candidate.name, candidate.settings) == (kernel.provider, kernel.name, kernel.settings)


def _key(candidate: Candidate) -> tuple[object, ...]:
    return candidate.provider, candidate.name, candidate.settings, candidate.layouts

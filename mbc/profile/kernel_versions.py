"""Versions of mbc's own kernels: a profile's measurements of earlier versions count as estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.base import OwnKernel, layout_of
from mbc.ops.fused import SEPARATOR
from mbc.profile.model import WHOLE_EXTENT, Measurement, Outdated, Profile
from mbc.profile.rows import LazyMeasurements
from mbc.profile.schema import Kernel
from mbc.profile.signature import read_signature


def current(profile: Profile) -> Profile:
    """Return `profile` with the times of earlier kernel versions as estimates, until today's versions are measured.

    A request for which today's kernel was not measured yet counts as not measured, so that it will be.
    """
    held = LazyMeasurements.of(profile.measurements)
    changed: dict[str, tuple[Measurement, ...]] = {}
    outdated: dict[str, Outdated] = {}
    for key in held:
        if any(map(_may_differ, held.kernels(key))):
            changed[key] = tuple(_adding(m) for m in held[key] if not _outdated(m))
            names = {m.name for m in changed[key]}
            if rows := tuple(m for m in held[key] if _outdated(m) and m.name not in names):
                outdated[key] = Outdated(rows, profile.extents.get(key, WHOLE_EXTENT))
    if all(rows == held[key] for key, rows in changed.items()):
        return profile
    extents = {key: extent for key, extent in profile.extents.items() if key not in outdated}
    measurements = held.replaced(changed)
    return replace(profile, measurements=measurements, extents=extents, earlier=_Today(outdated), outdated=outdated)


class _Today(Mapping[str, tuple[Measurement, ...]]):
    """Times of earlier kernel versions as those of today's, by signature; computed when needed: a plan needs few."""

    def __init__(self, outdated: Mapping[str, Outdated]) -> None:
        self._outdated, self._held = outdated, dict[str, tuple[Measurement, ...]]()

    def __getitem__(self, key: str) -> tuple[Measurement, ...]:
        if key not in self._held:
            self._held[key] = tuple(today for m in self._outdated[key].rows for today in _of_today(key, m))
        return self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._outdated

    def __iter__(self) -> Iterator[str]:
        return iter(self._outdated)

    def __len__(self) -> int:
        return len(self._outdated)


@cache  # tens of thousands of measurements have few different kernels
def _may_differ(kernel: Kernel) -> bool:
    """Return whether today's kernel may be another version, or is known to accumulate."""
    provider, name, settings = kernel
    today = KERNELS.get(name) if provider == OWN.name else None
    return today is not None and (settings != today.settings or _adds(today))


def _outdated(measurement: Measurement) -> bool:
    kernel = KERNELS.get(measurement.name) if measurement.provider == OWN.name else None
    return kernel is not None and measurement.settings != kernel.settings


def _adds(kernel: OwnKernel) -> bool:
    return kernel.accumulates and SEPARATOR in kernel.kind


def _adding(measurement: Measurement) -> Measurement:
    """Return the measurement of a fused operation's kernel as one that can accumulate.

    These kernels were measured when they did not declare that they can; they take as long for it. For mbc's other
    accumulating kernels, accumulation was tried, and that result counts.
    """
    kernel = KERNELS.get(measurement.name) if measurement.provider == OWN.name else None
    can = kernel is not None and _adds(kernel) and not measurement.refused
    return replace(measurement, accumulates=True) if can and not measurement.accumulates else measurement


def _of_today(key: str, measurement: Measurement) -> tuple[Measurement, ...]:
    """Return today's kernel with the time of `measurement` and its own workspace; none if it would not run."""
    kernel = KERNELS[measurement.name]
    try:
        request = read_signature(key)
    except ValueError:  # this version of mbc does not have the operation
        return ()
    if measurement.refused or not kernel.runs(request) or measurement.layouts not in kernel.layouts(request):
        return ()
    workspace_bytes = kernel.workspace(request, layout_of(request, measurement.layouts))
    return (replace(measurement, settings=kernel.settings, workspace_bytes=workspace_bytes),)

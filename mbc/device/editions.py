"""What a profile says of mbc's own kernels as they were before they were rewritten."""

from __future__ import annotations

from dataclasses import replace

from mbc.device.profile import Measurement, Profile
from mbc.kernels.own import KERNELS, OWN


def current(profile: Profile) -> Profile:
    """`profile` without the times of earlier editions of kernels: they, and the workspace that was needed, say nothing
    of today's. A request of which today's kernel was not measured yet counts as not measured, so that it will be."""
    found = {key: tuple(m for m in rows if not _outdated(m)) for key, rows in profile.measurements.items()}
    renewed = {
        key
        for key, rows in profile.measurements.items()
        if not {m.name for m in rows if _outdated(m)}.issubset(m.name for m in found[key])
    }
    if all(len(found[key]) == len(rows) for key, rows in profile.measurements.items()):
        return profile
    extents = {key: extent for key, extent in profile.extents.items() if key not in renewed}
    return replace(profile, measurements={key: rows for key, rows in found.items() if rows}, extents=extents)


def _outdated(measurement: Measurement) -> bool:
    kernel = KERNELS.get(measurement.name) if measurement.provider == OWN.name else None
    return kernel is not None and measurement.settings != kernel.settings

"""Estimates for a part of a GPU, with fewer multiprocessors, from the profile of the whole GPU."""

from __future__ import annotations

from dataclasses import replace

from mbc.profile.model import Measurement, Profile


def completed(own: Profile | None, whole: Profile, slower: float) -> Profile:
    """Return `own`, the profile of the part, completed with times of the whole GPU as estimates.

    Beyond the gap between two launches an estimate is `slower` times the time of the whole GPU. This is an upper bound
    for kernels that wait for memory, and for small ones.
    """
    base = replace(whole, measurements={}, extents={}, earlier={}, outdated={}) if own is None else own
    gap_us = whole.constants.get("graph_gap_us", 0.0)

    def slowed(m: Measurement) -> Measurement:
        return replace(m, time_us=_slowed(m.time_us), accumulate_us=_slowed(m.accumulate_us))

    def _slowed(time_us: float) -> float:
        return min(time_us, gap_us) + max(0.0, time_us - gap_us) * slower

    derived = {
        key: tuple(slowed(m) for m in measurements if not m.refused)
        for key, measurements in {**whole.earlier, **whole.measurements}.items()
        if key not in base.extents and key not in base.measurements
    }
    return replace(base, earlier={**derived, **base.earlier})

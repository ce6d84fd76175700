"""Merges profiles, and reduces a profile to the part that a planner can use."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mbc.errors import MbcError
from mbc.hardware.collective_times import CollectiveSlowdown, CollectiveTime
from mbc.kernels.cuda import emulates_fp32
from mbc.profile.model import LEFT_TO_ESTIMATE, WHOLE_EXTENT, Extent, Measurement, Outdated, Profile
from mbc.profile.paths import COMPRESSED
from mbc.profile.signature import read_signature, rows_of
from mbc.profile.writer import ProfileWriter

_Row = TypeVar("_Row", CollectiveTime, CollectiveSlowdown)
# Identifies a candidate of a request.
CandidateKey = tuple[str, str, tuple[tuple[str, int], ...], tuple[str, ...]]


def merged(first: Profile, second: Profile, newer_wins: bool = True) -> Profile:
    """Return the union of two profiles of one machine.

    Of the same candidate the newer measurement counts; of two with the same time, that of `first`. The extent of a
    request is the wider one; if both leave something out, both notes stay. Constants, overheads and collectives are
    those of `first`, if it has them. Times of earlier kernel versions stay until today's are measured.

    Args:
        first: A profile.
        second: Another profile of a machine like that of `first`.
        newer_wins: If false, the measurement of `first` always counts.

    Raises:
        MbcError: MBC076, the machines differ.
    """
    if not first.identity.alike(second.identity):
        raise MbcError(
            "MBC076",
            f"'{first.source}' was measured on {first.identity}, '{second.source}' on {second.identity}",
            "merge profiles of one GPU and one cuDNN: times of two machines are never mixed",
        )
    measurements: dict[str, tuple[Measurement, ...]] = {}
    extents: dict[str, Extent] = {}
    outdated: dict[str, Outdated] = {}
    sources = (first, second)
    for key in dict.fromkeys(key for p in sources for key in (*p.extents, *p.measurements, *p.outdated)):
        sides = [p for p in sources if key in p.extents or key in p.measurements or key in p.outdated]
        if newer_wins:
            sides.sort(key=lambda p: _extent(p, key).date or p.identity.date, reverse=True)
        measurements[key] = _union([p.measurements.get(key, ()) for p in sides])
        up_to_date = [p for p in sides if key not in p.earlier]
        before = [p.outdated[key].rows for p in sides if key in p.outdated]
        if not up_to_date and (rows := _unmeasured(before, measurements[key])):
            outdated[key] = Outdated(rows, _wider([_extent(p, key) for p in sides]))
        elif up_to_date or before:  # today's version of every kernel was measured, in one profile or the other
            extents[key] = _wider([_extent(p, key) for p in up_to_date or sides])
    earlier = {
        key: _unmeasured([p.earlier.get(key, ()) for p in sources], measurements.get(key, ()))
        for key in {**second.earlier, **first.earlier}
        if key not in extents
    }
    overheads = {(o.what, o.subject): o for o in (*second.overheads, *first.overheads)}
    identity = replace(first.identity, date=min(first.identity.date, second.identity.date))
    return Profile(
        identity,
        {key: candidates for key, candidates in measurements.items() if candidates},
        tuple(overheads.values()),
        f"{first.source} and {second.source}",
        extents,
        {**second.constants, **first.constants},
        first.stale or second.stale,
        earlier,
        outdated,
        _first_of(first.collectives + second.collectives),
        _first_of(first.collective_slowdowns + second.collective_slowdowns),
        left_to_estimate=(first.left_to_estimate | second.left_to_estimate).difference(
            extents, measurements, first.earlier, second.earlier
        ),
    )


def _unmeasured(
    best_first: Iterable[Iterable[Measurement]], measured: Iterable[Measurement]
) -> tuple[Measurement, ...]:
    """Return each candidate once, except those of kernels that are in `measured`."""
    names = {m.name for m in measured}
    return tuple(m for m in _union(best_first) if m.name not in names)


def _first_of(rows: tuple[_Row, ...]) -> tuple[_Row, ...]:
    """Return the first row of each key, in the order of a file."""
    by_key = {row.key: row for row in reversed(rows)}
    return tuple(by_key[key] for key in sorted(by_key))


def candidate_key(m: Measurement) -> CandidateKey:
    """Return the key that distinguishes the candidates of one request."""
    return (m.provider, m.name, m.settings, tuple(map(str, m.layouts)))


def _extent(profile: Profile, key: str) -> Extent:
    outdated = profile.outdated.get(key)
    return profile.extents.get(key, outdated.extent if outdated else WHOLE_EXTENT)


def _union(best_first: Iterable[Iterable[Measurement]]) -> tuple[Measurement, ...]:
    """Return each candidate once."""
    union: dict[CandidateKey, Measurement] = {}
    for measurements in best_first:
        for measurement in measurements:
            older = union.get(key := candidate_key(measurement))
            # A time by replays is better than that of a dominated candidate, which ran only once, whatever their dates.
            if older is None or (older.dominated and not measurement.dominated and not measurement.refused):
                union[key] = measurement
    return tuple(union.values())


def _wider(best_first: list[Extent]) -> Extent:
    limit = max(e.workspace_limit_bytes for e in best_first)
    widest = [e for e in best_first if e.workspace_limit_bytes == limit]
    widest = [e for e in widest if not e.micro_batches_only] or widest
    words = dict.fromkeys(e.left_out for e in widest if e.left_out)
    return Extent(limit, "; ".join(words), best_first[0].date, widest[0].micro_batches_only)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a whole profile, and replace the file at `path` atomically.

    A name that ends in `COMPRESSED` gives a compressed file, with the same bytes each time on one machine.

    Raises:
        MbcError: MBC072, the file cannot be written.
    """
    part = path.parent / f".{path.name}.part"
    try:
        part.unlink(missing_ok=True)
        with ProfileWriter(part, profile.identity) as writer, writer.all_at_once():
            for key in sorted({*profile.extents, *profile.measurements, *profile.outdated}):
                outdated = profile.outdated.get(key)
                rows = (*profile.measurements.get(key, ()), *(outdated.rows if outdated else ()))
                writer.record_signature(key, _rows(key), rows, _extent(profile, key))
            for key in sorted(profile.left_to_estimate.difference(profile.extents, profile.measurements)):
                writer.record_signature(key, _rows(key), (), Extent(0, LEFT_TO_ESTIMATE, profile.identity.date))
            for overhead in profile.overheads:
                writer.record_overhead(overhead)
            for name, value in sorted(profile.constants.items()):
                writer.record_constant(name, value)
            writer.record_collectives(profile.collectives, profile.collective_slowdowns)
        if path.suffix == COMPRESSED:
            part.write_bytes(gzip.compress(part.read_bytes(), mtime=0))
        part.replace(path)
    except OSError as error:
        raise MbcError(
            "MBC072", f"the profile '{path}' cannot be opened or written: {error}", "choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def shippable(profile: Profile) -> Profile:
    """Return the part of a profile that a planner can use.

    For each request and layouts these are the candidates that no other beats in time, accumulating time and workspace
    together. Deterministic ones compete only with each other, as do those that do not emulate fp32. Candidates that ran
    only once are left out. Measurements of earlier kernel versions are reduced likewise.
    """
    fronts = {key: _front(held) for key, held in profile.measurements.items()}
    outdated = {key: replace(held, rows=_front(held.rows)) for key, held in profile.outdated.items()}
    return replace(
        profile,
        measurements={key: front for key, front in fronts.items() if front},
        outdated={key: held for key, held in outdated.items() if held.rows},
    )


def ship(profile: Profile, path: Path) -> int:
    """Write the `shippable` part to a new file, and return the number of its candidates."""
    part = shippable(profile)
    write_profile(part, path)
    return sum(map(len, part.measurements.values())) + sum(len(held.rows) for held in part.outdated.values())


def _rows(key: str) -> int:
    try:
        return rows_of(read_signature(key))
    except ValueError:
        return 0  # this version of mbc does not have the operation


def _front(measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    usable = [m for m in measurements if not m.refused and not m.dominated]
    usable.sort(key=lambda m: (m.time_us, m.workspace_bytes, m.settings))
    kept: list[Measurement] = []
    for m in usable:
        if not any(_beats(k, m) for k in kept):
            kept.append(m)
    return tuple(kept)


def _beats(a: Measurement, b: Measurement) -> bool:
    """Return whether `a`, which is at least as fast, leaves no reason to choose `b`."""
    adds = not b.accumulates or (a.accumulates and _adding_us(a) <= _adding_us(b))
    return (
        a.layouts == b.layouts
        and a.workspace_bytes <= b.workspace_bytes
        and a.deterministic >= b.deterministic
        and emulates_fp32(a.provider, a.name) <= emulates_fp32(b.provider, b.name)
        and adds
    )


def _adding_us(m: Measurement) -> float:
    return m.accumulate_us or m.time_us

"""Merges profiles, and extracts the part of one that a planner can use."""

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
from mbc.profile.schema import COMPRESSED
from mbc.profile.signature import read_signature, rows_of
from mbc.profile.writer import ProfileWriter

_Row = TypeVar("_Row", CollectiveTime, CollectiveSlowdown)
# What tells the candidates of one request apart.
CandidateKey = tuple[str, str, tuple[tuple[str, int], ...], tuple[str, ...]]


def merged(first: Profile, second: Profile, newer_wins: bool = True) -> Profile:
    """What either of two profiles of one machine holds; of the same candidate the newer measurement, or always that of
    `first`, which wins also where both are of one time. MBC076 where the machines are not alike.

    A request's extent is the wider one; where both were limited in words, both are said. Constants, overheads and
    collectives are those of `first`, where it has them. Times of earlier versions of kernels stay until today's are
    measured.
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
        known = [p for p in sides if key not in p.earlier]
        before = [p.outdated[key].rows for p in sides if key in p.outdated]
        if not known and (rows := _unmeasured(before, measurements[key])):
            outdated[key] = Outdated(rows, _wider([_extent(p, key) for p in sides]))
        elif known or before:  # of all kernels today's were measured, on one side or the other
            extents[key] = _wider([_extent(p, key) for p in known or sides])
    earlier = {
        key: _unmeasured([p.earlier.get(key, ()) for p in sources], measurements.get(key, ()))
        for key in {**second.earlier, **first.earlier}
        if key not in extents
    }
    overheads = {(o.what, o.subject): o for o in (*second.overheads, *first.overheads)}
    identity = replace(first.identity, date=min(first.identity.date, second.identity.date))
    return Profile(
        identity,
        {key: found for key, found in measurements.items() if found},
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
    """Each candidate once, but those of kernels that are `measured`."""
    names = {m.name for m in measured}
    return tuple(m for m in _union(best_first) if m.name not in names)


def _first_of(rows: tuple[_Row, ...]) -> tuple[_Row, ...]:
    """The first of those alike, in the order that a file has them in."""
    found = {row.key: row for row in reversed(rows)}
    return tuple(found[key] for key in sorted(found))


def candidate_key(m: Measurement) -> CandidateKey:
    return (m.provider, m.name, m.settings, tuple(map(str, m.layouts)))


def _extent(profile: Profile, key: str) -> Extent:
    outdated = profile.outdated.get(key)
    return profile.extents.get(key, outdated.extent if outdated else WHOLE_EXTENT)


def _union(best_first: Iterable[Iterable[Measurement]]) -> tuple[Measurement, ...]:
    """Each candidate once."""
    found: dict[CandidateKey, Measurement] = {}
    for known in best_first:
        for measurement in known:
            older = found.get(key := candidate_key(measurement))
            # Run once for being slow is worth less than measured with care, whichever came first.
            if older is None or (older.dominated and not measurement.dominated and not measurement.refused):
                found[key] = measurement
    return tuple(found.values())


def _wider(best_first: list[Extent]) -> Extent:
    limit = max(e.workspace_limit_bytes for e in best_first)
    widest = [e for e in best_first if e.workspace_limit_bytes == limit]
    widest = [e for e in widest if not e.micro_batches_only] or widest
    words = dict.fromkeys(e.left_out for e in widest if e.left_out)
    return Extent(limit, "; ".join(words), best_first[0].date, widest[0].micro_batches_only)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a whole profile, replacing what is at `path` in one stroke; packed where its name ends in `COMPRESSED`, in
    the same bytes each time on one machine. MBC072 where that cannot be."""
    part = path.parent / f".{path.name}.part"
    try:
        part.unlink(missing_ok=True)
        with ProfileWriter(part, profile.identity) as writer, writer.all_at_once():
            for key in sorted({*profile.extents, *profile.measurements, *profile.outdated}):
                outdated = profile.outdated.get(key)
                found = (*profile.measurements.get(key, ()), *(outdated.rows if outdated else ()))
                writer.record_signature(key, _rows(key), found, _extent(profile, key))
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
    """What a planner can use of a profile: of each request and layouts the candidates that no other beats in time,
    time when adding and workspace together (deterministic ones among themselves, and those that do not emulate fp32).
    Those run once only stay out. Of earlier versions of kernels the same."""
    fronts = {key: _front(found) for key, found in profile.measurements.items()}
    outdated = {key: replace(found, rows=_front(found.rows)) for key, found in profile.outdated.items()}
    return replace(
        profile,
        measurements={key: front for key, front in fronts.items() if front},
        outdated={key: found for key, found in outdated.items() if found.rows},
    )


def ship(profile: Profile, path: Path) -> int:
    """Write what is `shippable` to a new file. Returns how many candidates were kept."""
    part = shippable(profile)
    write_profile(part, path)
    return sum(map(len, part.measurements.values())) + sum(len(found.rows) for found in part.outdated.values())


def _rows(key: str) -> int:
    try:
        return rows_of(read_signature(key))
    except ValueError:
        return 0  # of an operation that this version of mbc does not have


def _front(found: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    usable = [m for m in found if not m.refused and not m.dominated]
    usable.sort(key=lambda m: (m.time_us, m.workspace_bytes, m.settings))
    kept: list[Measurement] = []
    for m in usable:
        if not any(_beats(k, m) for k in kept):
            kept.append(m)
    return tuple(kept)


def _beats(a: Measurement, b: Measurement) -> bool:
    """Whether `a`, which is as fast, leaves nothing that `b` would be chosen for."""
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

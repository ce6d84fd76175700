"""The output of `mbc profile list` and `mbc profile diff`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mbc.plan.summary import settings_words
from mbc.profile.model import Identity, Measurement, Profile, version_text
from mbc.profile.profile_diff import TOLERANCE, ProfileDiff, Ratios
from mbc.profile.signature import described, read_signature
from mbc.report.columns import DEFAULT_WIDTH, Column, render
from mbc.units import show_size, show_time

_MOST_REASONS = 8
_COUNTS = ("requests", "usable", "dominated", "refused")


@dataclass(frozen=True, slots=True)
class KindContents:
    """The contents of a profile for one kind of operation in one precision; `requests` counts operations and sizes."""

    kind: str
    precision: str
    requests: int
    usable: int  # candidates
    dominated: int  # of these, run only once
    refused: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a profile; `refusals` and `left_out` count each reason, with its numbers removed."""

    source: str
    identity: Identity
    size_bytes: int
    kinds: tuple[KindContents, ...]
    refusals: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, int], ...]
    overhead_bytes: int
    constants: dict[str, float]
    collectives: tuple[tuple[str, int, int], ...]  # "2 ranks over nvlink", number of times and of slow-downs


def contents(profile: Profile, size_bytes: int) -> Contents:
    """Count the contents of a profile, whose file has `size_bytes`."""
    kinds: dict[tuple[str, str], list[tuple[Measurement, ...]]] = {}
    for key in {*profile.measurements, *profile.extents}:
        try:
            request = read_signature(key)
            kind, precision = request.kind, str(request.precision)
        except ValueError:
            kind, precision = "(unknown to this version)", ""
        kinds.setdefault((kind, precision), []).append(profile.measurements.get(key, ()))
    rows = [
        KindContents(
            kind,
            precision,
            len(counts),
            sum(not m.refused for each in counts for m in each),
            sum(m.dominated for each in counts for m in each),
            sum(bool(m.refused) for each in counts for m in each),
        )
        for (kind, precision), counts in sorted(kinds.items())
    ]
    refusals = (m.refused for each in profile.measurements.values() for m in each if m.refused)
    words = (part for extent in profile.extents.values() for part in extent.left_out.split("; ") if part)
    return Contents(
        profile.source,
        profile.identity,
        size_bytes,
        tuple(rows),
        _counted(refusals),
        _counted(words),
        profile.overhead_bytes,
        dict(profile.constants),
        _collectives(profile),
    )


def _collectives(profile: Profile) -> tuple[tuple[str, int, int], ...]:
    times, slowdowns = (
        Counter(f"{row.ranks} ranks over {row.link}" for row in rows)
        for rows in (profile.collectives, profile.collective_slowdowns)
    )
    return tuple((between, times[between], slowdowns[between]) for between in sorted(times | slowdowns))


def _counted(reasons: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Count each reason, the most frequent first; numbers are removed, so that like reasons are counted together."""
    counts = Counter(re.sub(r"(?<![A-Za-z0-9])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?", "#", reason) for reason in reasons)
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def contents_text(profile: Contents, width: int = DEFAULT_WIDTH) -> str:
    """Format the identity of a profile, a table by kind, and the reasons why kernels are not usable."""
    i = profile.identity
    lines = [
        f"{profile.source} ({show_size(profile.size_bytes)})",
        f"{i}, {i.architecture}, driver {i.driver}, begun {i.date}",
        f"clocks: multiprocessors {i.sm_clock_mhz} MHz, memory {i.memory_clock_mhz} MHz",
    ]
    if profile.overhead_bytes:
        lines.append(f"a step takes {show_size(profile.overhead_bytes)} outside its arena")
    lines += [f"{name} {value:.3g}" for name, value in sorted(profile.constants.items())]
    lines += [f"collectives: {t} times, {s} slow-downs ({between})" for between, t, s in profile.collectives]
    columns = (
        Column("kind", shrinks=True, least=12),
        Column("precision"),
        Column("operations and sizes", right=True),
        Column("usable kernels", right=True),
        Column("run once", right=True),
        Column("refused", right=True),
    )
    whole = KindContents("all", "", *(sum(getattr(k, name) for k in profile.kinds) for name in _COUNTS))
    rows = [
        (k.kind, k.precision, f"{k.requests:,}", f"{k.usable:,}", f"{k.dominated:,}", f"{k.refused:,}")
        for k in (*profile.kinds, whole)
    ]
    lines += ["", render(columns, rows, width)]
    lines += _reasons("refused, because", profile.refusals, width)
    lines += _reasons("left out", profile.left_out, width)
    return "\n".join(lines)


def _reasons(title: str, reasons: Sequence[tuple[str, int]], width: int) -> list[str]:
    if not reasons:
        return []
    rows = [(reason, f"{count:,}") for reason, count in reasons[:_MOST_REASONS]]
    further = reasons[_MOST_REASONS:]
    if further:
        rows.append((f"… and {len(further)} other reasons", f"{sum(count for _, count in further):,}"))
    return ["", render((Column(title, shrinks=True, least=20), Column("times", right=True)), rows, width)]


def profile_diff_text(
    before: Profile, after: Profile, diff: ProfileDiff, width: int = DEFAULT_WIDTH, limit: int = 20
) -> str:
    """Format the differences of two profiles.

    These are their identities, the entries that only one has, a comparison of times, and the `limit` largest changes.
    """
    parts = [_identities(before, after)]
    counts = (
        ("operations and sizes only here", len(diff.only_before), len(diff.only_after)),
        ("kernels only here, of operations that both have", diff.only_before_candidates, diff.only_after_candidates),
        ("kernels refused only here", diff.refused_before, diff.refused_after),
    )
    rows = [(title, f"{a:,}", f"{b:,}") for title, a, b in counts if a or b]
    if rows:
        parts.append(render((Column(""), Column("first", right=True), Column("second", right=True)), rows, width))
    parts.append(_ratios(diff.ratios, len(diff.changes)))
    if diff.changes:
        columns = (
            Column("operation", shrinks=True, least=20),
            Column("kernel", shrinks=True, least=12),
            Column("layout"),
            Column("first", right=True),
            Column("second", right=True),
            Column("second / first", right=True),
        )
        cells = [
            (
                _operation(c.signature),
                _kernel(c.before),
                str(c.before.layouts[0]),
                show_time(c.before.time_us),
                show_time(c.after.time_us),
                f"{c.ratio:.3f}",
            )
            for c in diff.changes[:limit]
        ]
        parts.append(render(columns, cells, width))
        if len(diff.changes) > limit:
            parts.append(f"… and {len(diff.changes) - limit} smaller changes (--limit)")
    return "\n\n".join(parts)


def _identities(before: Profile, after: Profile) -> str:
    a, b = before.identity, after.identity
    lines = [f"first   {before.source}", f"second  {after.source}"]
    if a.alike(b):
        lines.append(f"both of {a}")
    else:
        lines += [f"first of {a}", f"second of {b}: another machine, so the ratios compare the machines"]
    if a.driver != b.driver or a.cudnn != b.cudnn:
        lines.append(f"drivers {a.driver} and {b.driver}, cuDNN {version_text(a.cudnn)} and {version_text(b.cudnn)}")
    return "\n".join(lines)


def _ratios(ratios: Ratios | None, changed: int) -> str:
    if ratios is None:
        return "they have no times in common"
    return (
        f"second / first of the {ratios.count:,} times that both have: median {ratios.median:.3f}, 10 % under "
        f"{ratios.p10:.3f}, 10 % over {ratios.p90:.3f}; {changed:,} differ by more than {TOLERANCE:.0%}"
    )


def _operation(signature: str) -> str:
    try:
        return described(read_signature(signature))
    except ValueError:
        return signature


def _kernel(m: Measurement) -> str:
    return " ".join([m.provider, *settings_words(m.settings)])


def profile_diff_document(diff: ProfileDiff) -> dict[str, Any]:
    """Return all differences of two profiles for scripts."""
    changes = [
        {
            "signature": c.signature,
            "provider": c.before.provider,
            "name": c.before.name,
            "settings": dict(c.before.settings),
            "layouts": [str(layout) for layout in c.before.layouts],
            "before_us": c.before.time_us,
            "after_us": c.after.time_us,
            "ratio": c.ratio,
        }
        for c in diff.changes
    ]
    return {
        "only_before": list(diff.only_before),
        "only_after": list(diff.only_after),
        "only_before_candidates": diff.only_before_candidates,
        "only_after_candidates": diff.only_after_candidates,
        "refused_before": diff.refused_before,
        "refused_after": diff.refused_after,
        "changes": changes,
        "ratios": None if diff.ratios is None else asdict(diff.ratios),
    }

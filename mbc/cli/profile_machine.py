"""Measurements of links and collectives between the GPUs of a machine, by `mbc profile --gpu all`.

Each kind is measured separately. If one fails, the others are measured nevertheless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbc.errors import MbcError
from mbc.progress import StatusLine
from mbc.units import show_duration

if TYPE_CHECKING:
    from mbc.profile.model import Profile

Gpus = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of measurement.

    Attributes:
        what: Plural noun for messages.
        is_measured: Whether a profile has it for these GPUs.
        measure: Measure it into the profile at a path, and report progress by the callback; return the result as words
            and as figures for scripts.
    """

    what: str
    is_measured: Callable[[Profile, Gpus], bool]
    measure: Callable[[Gpus, Path, Callable[[str], None]], tuple[str, dict[str, Any]]]


@dataclass
class Outcome:
    """The results of all parts.

    Attributes:
        lines: A line for each part that was measured.
        figures: The results of the measured parts, for scripts.
        failures: Errors of the other parts.
    """

    lines: list[str] = field(default_factory=list[str])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    failures: list[MbcError] = field(default_factory=list[MbcError])


def missing(path: Path, gpus: Gpus) -> tuple[Part, ...]:
    """Return the parts that the profile at `path` does not have."""
    from mbc.profile.read_profile import read_profile

    if len(gpus) < 2:
        return ()
    profile = read_profile(path) if path.exists() else None
    return tuple(part for part in PARTS if profile is None or not part.is_measured(profile, gpus))


def measure(parts: Sequence[Part], gpus: Gpus, path: Path) -> Outcome:
    """Measure parts into the profile at `path`, and note each part that fails."""
    began_s, line, outcome = time.monotonic(), StatusLine(), Outcome()

    def tell(text: str) -> None:
        line.line(f"{time.monotonic() - began_s:5.1f} s  {text}")

    for part in parts:
        part_began_s = time.monotonic()
        try:
            words, figures = part.measure(gpus, path, tell)
        except MbcError as error:
            outcome.failures.append(error)
            line.line(f"note: {part.what} were not measured: {error.message}")
        else:
            outcome.lines.append(f"{path}: {words} measured in {show_duration(time.monotonic() - part_began_s)}")
            outcome.figures |= figures
    return outcome


def all_parts(gpus: Gpus) -> Iterator[Part]:
    """Yield all parts; for one GPU, yield only the part whose error says that two GPUs are needed."""
    yield from PARTS if len(gpus) > 1 else PARTS[:1]


def _knows_collectives(profile: Profile, gpus: Gpus) -> bool:
    from mbc.kernels.nccl import BY_COPIES
    from mbc.measure.collective_fleet import link_of
    from mbc.measure.collective_timing import MAX_CTAS

    measured = {t.max_ctas for t in profile.collectives if (t.ranks, t.link) == (len(gpus), link_of(gpus))}
    return measured >= {*MAX_CTAS} - {BY_COPIES}  # copies between peers, which not all machines have


def _collectives(gpus: Gpus, path: Path, tell: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    from mbc.measure.collective_fleet import measure_collectives

    measured = measure_collectives(gpus, path, tell)
    rows = {"times": measured.times, "slowdowns": measured.slowdowns, "overheads": measured.overheads}
    words = (
        f"{len(measured.times)} times of collectives between {len(gpus)} GPUs and {len(measured.slowdowns)} slow-downs"
    )
    return words, {name: [asdict(row) for row in of] for name, of in rows.items()}


def _knows_peer_link(profile: Profile, gpus: Gpus) -> bool:
    from mbc.hardware.transfers import measured_peer_link

    return measured_peer_link(profile.constants) is not None


def _peer_link(gpus: Gpus, path: Path, tell: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    from mbc.measure.peer_fleet import measure_peer_link

    return "copies between two GPUs", {"peer_link": asdict(measure_peer_link(gpus, path, tell))}


def _knows_host_sharing(profile: Profile, gpus: Gpus) -> bool:
    from mbc.hardware.host_sharing import measured_sharing

    return {rates.gpus for rates in measured_sharing(profile.constants)} >= {*range(1, len(gpus) + 1)}


def _host_sharing(gpus: Gpus, path: Path, tell: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    from mbc.measure.host_fleet import measure_host_sharing

    rates = measure_host_sharing(gpus, path, tell)
    return f"copies of 1 to {len(gpus)} GPUs with the host", {"host_sharing": [asdict(rates) for rates in rates]}


PARTS = (
    Part("collectives", _knows_collectives, _collectives),
    Part("copies between GPUs", _knows_peer_link, _peer_link),
    Part("copies of several GPUs with the host", _knows_host_sharing, _host_sharing),
)

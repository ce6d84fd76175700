"""Decides which smaller micro-batch sizes of a measured operation need no measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mbc.ir.types import Layout
from mbc.measure.offers import Offer, Offered
from mbc.profile.model import Measurement

HOPELESS = 3.0  # a candidate is dominated above this multiple of the best time with no more workspace
HOPELESS_SIZES = 2  # a candidate dominated at so many sizes is not tried at smaller ones
HOPELESS_AT_ONCE = 10.0  # above this multiple of the best time, one size is enough

Layouts = tuple[Layout, ...]


def key_of(m: Measurement) -> tuple[object, ...]:
    """Return the key that identifies a candidate at every size, like `Offer.key`."""
    return m.provider, m.name, m.settings, m.layouts


@dataclass
class Ladder:
    """The measured sizes of one operation, largest first."""

    _steps: list[tuple[int, tuple[Measurement, ...]]] = field(default_factory=list[tuple[int, tuple[Measurement, ...]]])
    _closed: set[Layouts] = field(default_factory=set[Layouts])
    _far: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])

    def add(self, rows: int, measured: tuple[Measurement, ...]) -> None:
        """Add the measurements of the next smaller size."""
        usable = tuple(m for m in measured if not m.refused)
        for layouts in {m.layouts for m in usable}:
            if self._nothing_gains(rows, [m for m in usable if m.layouts == layouts]):
                self._closed.add(layouts)
        for m in (m for m in usable if m.dominated):
            best_us = min(other.time_us for other in usable if other.workspace_bytes <= m.workspace_bytes)
            if m.time_us > HOPELESS_AT_ONCE * best_us:
                self._far.add(key_of(m))
        self._steps.append((rows, measured))

    def _nothing_gains(self, rows: int, here: Sequence[Measurement]) -> bool:
        """Return whether this size gains nothing over a larger one.

        That is so if a larger size has a deterministic candidate of the same layouts with at most the workspace of the
        leanest candidate here, and at most the time per row of the fastest here.
        """
        per_row_us = min(m.time_us for m in here) / rows
        least_bytes = min(m.workspace_bytes for m in here)
        return any(
            m.layouts == here[0].layouts
            and not m.refused
            and m.deterministic
            and m.workspace_bytes <= least_bytes
            and m.time_us / larger <= per_row_us
            for larger, step in self._steps
            for m in step
        )

    @property
    def closed(self) -> bool:
        """True if smaller sizes cannot improve any division, in any layout of the last measured size.

        A size at which nothing could be measured does not count.
        """
        usable = ({m.layouts for m in step if not m.refused} for _, step in reversed(self._steps))
        last = next((layouts for layouts in usable if layouts), None)
        return last is not None and last <= self._closed

    @property
    def tried(self) -> frozenset[tuple[object, ...]]:
        """Keys of the candidates that ran at some size."""
        return frozenset(key_of(m) for _, step in self._steps for m in step)

    def promising(self, offered: Offered) -> tuple[Offered, list[str]]:
        """Return the offers that may gain something at the next size, and notes on those left out."""
        hopeless = self._hopeless()
        everything = (*offered.offers, *offered.spare)
        least_bytes = min((o.candidate.workspace_bytes for o in everything if o.key not in hopeless), default=1 << 62)
        slow = closed = 0

        def keep(offer: Offer) -> bool:
            nonlocal slow, closed
            if offer.candidate.layouts in self._closed:
                closed += 1
                return False
            if offer.key in hopeless and offer.candidate.workspace_bytes >= least_bytes:
                slow += 1
                return False
            return True

        kept = replace(
            offered,
            offers=tuple(o for o in offered.offers if keep(o)),
            spare=tuple(o for o in offered.spare if keep(o)),
        )
        notes: list[str] = []
        if slow:
            notes.append(f"{slow} candidates that were dominated at larger sizes")
        if closed:
            notes.append(f"{closed} candidates in layouts that gain nothing from smaller sizes")
        return kept, notes

    def _hopeless(self) -> frozenset[tuple[object, ...]]:
        dominated = [{key_of(m) for m in step if m.dominated} for _, step in self._steps[-HOPELESS_SIZES:]]
        at_all = dominated[0] & dominated[1] if len(dominated) == HOPELESS_SIZES else set[tuple[object, ...]]()
        return frozenset(at_all | self._far)

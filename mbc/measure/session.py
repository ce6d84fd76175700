"""Measures one request: runs every offer once, times those that are not dominated, and the best of them twice."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate
from mbc.measure.gpu import DoesNotFit
from mbc.measure.offers import Offer, Offered
from mbc.measure.protocols import Attempt, Place
from mbc.measure.size_ladder import HOPELESS, HOPELESS_AT_ONCE, key_of
from mbc.profile.model import Measurement

GPU_FAILED = "the GPU failed when it ran"
TIMED_US = 1500.0  # duration of the replays of one candidate
RETIMED_US = 4000.0  # duration of the replays of the best two, at the end
NOISE_US = 20.0  # shorter times of single runs in a graph are imprecise
LEAST_SKIPPED_US = 2000.0  # a candidate that takes less time is not skipped
SLACK_BYTES = 64 << 10  # a skipped candidate may need less workspace than its rival by this much
EAGER_NOISE_US = 50.0  # shorter times of single runs outside a graph are imprecise
BEHIND = 1.25  # above this multiple of a candidate that is better in every respect, few replays suffice
BEST = 2
MOST_RETIMINGS = 3
UNSTEADY_MEDIAN, UNSTEADY_SPREAD = 0.05, 0.10  # shares by which a time may change or spread


class Session:
    """The measurement of one request: every offer runs once, those not dominated are timed, the best of them twice."""

    def __init__(
        self, before: Iterable[Measurement], tried: Collection[object] = (), layouts_differ: bool = False
    ) -> None:
        """Start from the measurements of earlier sessions.

        Args:
            before: Measurements of an earlier session.
            tried: Keys of the candidates that ran at larger sizes.
            layouts_differ: Candidates of other layouts do different work, as in a conversion, and so dominate none.
        """
        self._tried = tried
        self._layouts_differ = layouts_differ
        self._skipped = 0
        self._before = tuple(before)
        self._attempts: list[Attempt] = []
        self._measured: dict[int, Measurement] = {}  # by place among the attempts
        self._trying: Offer | None = None
        self.notes: list[str] = []
        self.unsteady = False

    def measurements(self) -> tuple[Measurement, ...]:
        """Return earlier measurements that were not repeated, then the new ones.

        If the GPU failed, the candidate that was being tried is refused, and those not yet timed are missing.
        """
        new = {key_of(m): m for m in self.new()}
        return (*(m for m in self._before if key_of(m) not in new), *new.values())

    def new(self) -> list[Measurement]:
        """Return the measurements of this session."""
        new = [self._measured[i] for i in sorted(self._measured)]
        if self._trying is not None:
            new.append(_measurement(Attempt(self._trying, 0.0, -1.0, GPU_FAILED)))
        return new

    def measure(self, place: Place, offered: Offered) -> None:
        """Run and time the offers; `notes` and `unsteady` are set."""
        for offer in offered.offers:
            self._attempt(place, offer)
        best_us = min((run.time_us for run in self._runs()), default=math.inf)
        near = [o for o in offered.spare if o.candidate.time_us <= HOPELESS * best_us]
        if len(near) < len(offered.spare):
            count = len(offered.spare) - len(near)
            self.notes.append(f"{count} of mbc's own kernels, estimated at over {HOPELESS:g} times the best")
        for offer in near:
            self._attempt(place, offer)
        if self._skipped:
            self.notes.append(
                f"{self._skipped} candidates that took over {HOPELESS_AT_ONCE:g} times the best for few rows"
            )
        ran = [(a.once_us, number) for number, a in enumerate(self._attempts) if not a.refused]
        for _, number in sorted(ran):
            self._time(place, number)
        self._retime_best(place)

    def _attempt(self, place: Place, offer: Offer) -> None:
        self._trying = offer
        hopeless_us = max(EAGER_NOISE_US, self._bar_us(offer.candidate))
        try:
            attempt = place.attempt(offer, hopeless_us, math.inf if offer.key in self._tried else self._skip_us(offer))
        except DoesNotFit as error:
            self._trying = None
            self.notes.append(f"{offer.candidate.provider} {offer.candidate.name}: {error}")
            return
        self._trying = None
        if attempt.skipped:
            self._skipped += 1
            return
        self._attempts.append(attempt)
        if attempt.refused:
            self._measured[len(self._attempts) - 1] = _measurement(attempt)

    def _runs(self) -> Iterator[_Ran]:
        """Yield all runs of this and earlier sessions."""
        for attempt in self._attempts:
            if not attempt.refused:
                c = attempt.offer.candidate
                yield _Ran(attempt.once_us, c.workspace_bytes, c.deterministic, c.layouts)
        for m in self._before:
            if not m.refused:
                yield _Ran(m.time_us, m.workspace_bytes, m.deterministic, m.layouts)

    def _bar_us(self, candidate: Candidate) -> float:
        """Return the time beyond which a candidate is dominated by another one that needs no more workspace."""
        runs = (
            run.time_us
            for run in self._runs()
            if run.workspace_bytes <= candidate.workspace_bytes
            and (run.layouts == candidate.layouts or not self._layouts_differ)
        )
        return max(NOISE_US, HOPELESS * min(runs, default=math.inf))

    def _skip_us(self, offer: Offer) -> float:
        """Return the time beyond which a candidate is not run: far above the time of one with hardly more workspace.

        The time of the candidate is estimated from few rows.
        """
        c = offer.candidate
        most_bytes = c.workspace_bytes + SLACK_BYTES
        alike = (r for r in self._runs() if r.workspace_bytes <= most_bytes and r.deterministic >= c.deterministic)
        return max(LEAST_SKIPPED_US, HOPELESS_AT_ONCE * min((r.time_us for r in alike), default=math.inf))

    def _time(self, place: Place, number: int) -> None:
        attempt = self._attempts[number]
        candidate = attempt.offer.candidate
        if attempt.hopeless or attempt.once_us > self._bar_us(candidate):
            # Accumulation is not tried either.
            once = replace(_measurement(attempt), time_us=attempt.once_us, dominated=True, accumulates=False)
            self._measured[number] = once
            return
        worse = self._is_worse(attempt)
        self._trying = attempt.offer
        adds = candidate.accumulates and place.adds(attempt)
        self._replay(place, number, 0.0 if worse else TIMED_US)
        if adds and not self._measured[number].refused:
            adding_us = 0.0 if worse else self._adding_us(place, attempt)
            self._measured[number] = replace(self._measured[number], accumulates=True, accumulate_us=adding_us)
        self._trying = None

    def _is_worse(self, attempt: Attempt) -> bool:
        """Return whether a timed candidate is better in every respect, so that few replays suffice."""
        c = attempt.offer.candidate
        return any(
            attempt.once_us > BEHIND * m.time_us
            and m.workspace_bytes <= c.workspace_bytes
            and m.layouts == c.layouts
            and m.deterministic >= c.deterministic
            and m.accumulates >= c.accumulates
            for m in self._measured.values()
            if not m.refused and not m.dominated
        )

    def _replay(self, place: Place, number: int, budget_us: float) -> None:
        attempt = self._attempts[number]
        untimed = self._measured.get(number, replace(_measurement(attempt), accumulates=False))
        self._trying = attempt.offer
        try:
            times = place.time(attempt, budget_us)
        except MbcError as error:
            self._measured[number] = replace(untimed, time_us=0.0, spread_us=0.0, refused=str(error).splitlines()[0])
        else:
            self._measured[number] = replace(untimed, time_us=times.median_us, spread_us=times.spread_us)
        self._trying = None

    def _adding_us(self, place: Place, attempt: Attempt) -> float:
        self._trying = attempt.offer
        try:
            return place.time(attempt, TIMED_US, accumulate=True).median_us
        except MbcError:
            return 0.0

    def _retime_best(self, place: Place) -> None:
        """Measure the times of the best candidates again until two times agree."""
        timed = [(m.time_us, i) for i, m in self._measured.items() if not m.refused and not m.dominated]
        for _, number in sorted(timed)[:BEST]:
            for _ in range(MOST_RETIMINGS):
                before_us = self._measured[number].time_us
                self._replay(place, number, RETIMED_US)
                now = self._measured[number]
                if now.refused or _steady(before_us, now):
                    break
            else:
                self.unsteady = True


class _Ran(NamedTuple):
    time_us: float
    workspace_bytes: int
    deterministic: bool
    layouts: tuple[Layout, ...]


def _steady(before_us: float, now: Measurement) -> bool:
    moved = abs(now.time_us - before_us) / max(before_us, 1e-9)
    return moved <= UNSTEADY_MEDIAN and now.spread_us <= UNSTEADY_SPREAD * now.time_us


def _measurement(attempt: Attempt) -> Measurement:
    c = attempt.offer.candidate
    return Measurement(
        c.provider,
        c.name,
        c.settings,
        c.layouts,
        c.workspace_bytes,
        0.0,
        0.0,
        c.deterministic,
        c.accumulates,
        attempt.offer.notes,
        attempt.error,
        attempt.refused,
    )

"""Measuring: which candidates compute the requests of a plan rightly, and how fast. Bounded and resumable.

What is not measured, and why that loses nothing or little:
  a candidate that takes over three times as long as another one with no more workspace is run once only ("dominated");
  one that is dominated at two sizes is not tried at smaller ones, unless it needs less workspace than all others there;
  sizes end, a layout at a time, where a larger size has a candidate with no more workspace and no more time per row
  than anything at this one: no division gains by still smaller slices. That assumes that neither time per row nor the
  least workspace gets better again further down;
  mbc's own convolutions and linear layers, where their estimate does not come near what a library's kernel takes.
Each request's extent says which of these it met.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from mbc.device.bench import Attempt, GpuFailed, Place, Stand, Workbench
from mbc.device.gpu import DoesNotFit, Gpu
from mbc.device.ladder import HOPELESS, Ladder, key_of
from mbc.device.need import Need
from mbc.device.offers import Offer, Offered
from mbc.device.profile import Extent, Measurement, Profile
from mbc.device.profile_file import ProfileWriter, read_profile
from mbc.device.signature import signature
from mbc.device.workbench import Bench, identity
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.kernels.base import Request

__all__ = ["DEFAULT_LIMIT_BYTES", "Summary", "identity", "measure", "measure_on"]

DEFAULT_LIMIT_BYTES = 8 << 30  # of workspace: far beyond what brings anything
TIMED_US = 1500.0  # of replays of one candidate
RETIMED_US = 4000.0  # of the best two, at the end
NOISE_US = 20.0  # single runs shorter than this tell little
UNSTEADY_MEDIAN, UNSTEADY_SPREAD = 0.05, 0.10  # shares by which a time may move or spread
MOST_RETIMINGS = 3
BEST = 2

Progress = Callable[[int, int, Request, float | None], None]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of `measure` did with the requests: measured, known before, found not worth measuring, or left when
    the time was over. `unsteady`: signatures whose best times would not settle, as when another process uses the GPU.
    """

    measured: int = 0
    known: int = 0
    left: int = 0
    candidates: int = 0
    refused: int = 0
    dominated: int = 0
    failures: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    ruled_out: int = 0
    interrupted: bool = False

    @property
    def warning(self) -> str:
        """What a user should know of the times, empty where all is well."""
        if not self.unsteady:
            return ""
        return (
            f"the times of {len(self.unsteady)} operations would not settle: another process may be using the GPU; "
            "measure again when it is free"
        )


def _silent(done: int, total: int, request: Request, seconds_left: float | None) -> None:
    pass


def measure(
    gpu: Gpu,
    needs: Sequence[Need],
    path: Path,
    measure_for_s: float = math.inf,
    workspace_limit_bytes: int = DEFAULT_LIMIT_BYTES,
    progress: Progress = _silent,
    again: bool = False,
) -> Summary:
    """Measure into the profile at `path` what it lacks of `needs`, those of most weight first, each from its largest
    request to smaller ones, and stop when the time is over.

    Every request is written when it is done: a later run goes on where this one stopped, whatever stopped it. What was
    measured under a lower limit of workspace is completed. `again`: measure all anew. Ctrl-C ends the run like the end
    of its time and is told in the summary. An operation that fails is told there and does not stop the others; MBC088
    where the GPU itself fails.
    """
    with Bench(gpu) as bench:
        return measure_on(bench, needs, path, measure_for_s, workspace_limit_bytes, progress, again)


def measure_on(
    bench: Workbench,
    needs: Sequence[Need],
    path: Path,
    measure_for_s: float = math.inf,
    workspace_limit_bytes: int = DEFAULT_LIMIT_BYTES,
    progress: Progress = _silent,
    again: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """`measure` on any workbench."""
    with ProfileWriter(path, bench.identity()) as writer:
        held = read_profile(path)
        if again:
            held = Profile(held.identity, {}, constants=held.constants)
        run = _Run(bench, writer, held, workspace_limit_bytes, progress, clock, clock() + measure_for_s)
        return run.all(sorted(needs, key=lambda need: -need.weight_us))


class _OutOfTime(Exception):
    pass


@dataclass
class _Run:
    bench: Workbench
    writer: ProfileWriter
    held: Profile
    limit_bytes: int
    progress: Progress
    clock: Callable[[], float]
    deadline_s: float
    summary: Summary = field(default_factory=Summary)
    total: int = 0
    started_s: float = 0.0

    def all(self, needs: Sequence[Need]) -> Summary:
        wanted = {signature(r): r for need in needs for r in need.requests}
        known = sum(self._known(key) for key in wanted)
        self.total = len(wanted) - known
        self.summary = replace(self.summary, known=known)
        try:
            if self.total and self.clock() < self.deadline_s:
                self._prepare(next(iter(wanted.values())).precision)
            self.started_s = self.clock()
            seen: set[str] = set()
            for need in needs:
                self._need(need, seen)
        except _OutOfTime:
            pass
        except KeyboardInterrupt:
            self.summary = replace(self.summary, interrupted=True)
        return replace(self.summary, left=self.total - self._done())

    def _done(self) -> int:
        return self.summary.measured + self.summary.ruled_out + len(self.summary.failures)

    def _known(self, key: str) -> bool:
        extent = self.held.extents.get(key)
        return extent is not None and extent.workspace_limit_bytes >= self.limit_bytes

    def _prepare(self, precision: Precision) -> None:
        self.bench.warm(precision)
        self.writer.record_constant("graph_gap_us", self.bench.graph_gap_us(precision))

    def _need(self, need: Need, seen: set[str]) -> None:
        """All sizes of one operation. Its operands are put on the GPU when the first of them is to be measured."""
        ladder = Ladder()
        stand: Stand | None = None
        sizes = [(r, signature(r)) for r in need.requests]
        with ExitStack() as stack:
            for place, (request, key) in enumerate(sizes):
                if self._known(key):
                    ladder.add(_rows(request), self.held.measurements.get(key, ()))
                    continue
                if key in seen:
                    continue  # measured in this run, as a size of another operation
                if ladder.closed:
                    rest = [k for _, k in sizes[place:] if not self._known(k) and k not in seen]
                    seen.update(rest)
                    self.summary = replace(self.summary, ruled_out=self.summary.ruled_out + len(rest))
                    return
                seen.add(key)
                self._tell(request)
                try:
                    stand = stand or stack.enter_context(self.bench.open(need))
                    self._request(stand, request, ladder, last=place + 1 == len(sizes))
                except (MbcError, DoesNotFit) as error:
                    if isinstance(error, MbcError) and error.code == "MBC088":
                        raise
                    self._failed(key, str(error))

    def _failed(self, key: str, why: str) -> None:
        self.summary = replace(self.summary, failures=(*self.summary.failures, f"{key}: {why}"))

    def _tell(self, request: Request) -> None:
        now = self.clock()
        if now > self.deadline_s:
            raise _OutOfTime
        done = self._done()
        left_s = (now - self.started_s) / done * (self.total - done) if done else None
        self.progress(done, self.total, request, left_s)

    def _request(self, stand: Stand, request: Request, ladder: Ladder, last: bool) -> None:
        """Measure one request and write what was found."""
        key = signature(request)
        before = self.held.measurements.get(key, ())
        extent = self.held.extents.get(key)
        measured_bytes = extent.workspace_limit_bytes if extent else -1
        offered = self.bench.offers(request, self.limit_bytes)
        wanted, notes = ladder.worth(_beyond(offered, measured_bytes))
        session = _Session(request, before)
        failure = ""
        try:
            if wanted.offers or wanted.spare:
                with stand.at(request, (*wanted.offers, *wanted.spare)) as there:
                    session.measure(there, wanted)
        except GpuFailed as error:
            failure = str(error)
        found = session.found()
        ladder.add(_rows(request), found)
        left_out = [*offered.left_out, *notes, *session.notes]
        if ladder.closed and not last:
            left_out.append(f"sizes under {_rows(request)}: nothing here is faster per row than a larger size")
        self.writer.record(request, found, Extent(self.limit_bytes, "; ".join(left_out)))
        new = session.new()
        self.summary = replace(
            self.summary,
            measured=self.summary.measured + 1,
            candidates=self.summary.candidates + sum(not m.refused for m in new),
            refused=self.summary.refused + sum(bool(m.refused) for m in new),
            dominated=self.summary.dominated + sum(m.dominated for m in new),
            unsteady=(*self.summary.unsteady, key) if session.unsteady else self.summary.unsteady,
        )
        if failure:
            raise MbcError(
                "MBC088",
                f"the GPU failed while {request.kind} was measured: {failure}",
                "run the same command again: what is measured is kept, and the kernel at fault is passed over",
            )


def _rows(request: Request) -> int:
    return request.inputs[0].shape[0]


def _beyond(offered: Offered, workspace_bytes: int) -> Offered:
    """Without what needs no more workspace than that."""
    return replace(
        offered,
        offers=tuple(o for o in offered.offers if o.candidate.workspace_bytes > workspace_bytes),
        spare=tuple(o for o in offered.spare if o.candidate.workspace_bytes > workspace_bytes),
    )


class _Session:
    """One request: every offer is run once, those that are not dominated are timed, the best of them again."""

    def __init__(self, request: Request, before: Iterable[Measurement]) -> None:
        self._request = request
        self._before = tuple(before)
        self._attempts: list[Attempt] = []
        self._measured: dict[int, Measurement] = {}  # by place among the attempts
        self._trying: Offer | None = None
        self.notes: list[str] = []
        self.unsteady = False

    def found(self) -> tuple[Measurement, ...]:
        """What was known before and was not measured anew, then what was. Where the GPU failed, that which was being
        tried is refused, and what was not timed yet is left out."""
        new = {key_of(m): m for m in self.new()}
        return (*(m for m in self._before if key_of(m) not in new), *new.values())

    def new(self) -> list[Measurement]:
        """Measured in this session."""
        new = [self._measured[i] for i in sorted(self._measured)]
        if self._trying is not None:
            new.append(_measurement(Attempt(self._trying, 0.0, -1.0, "the GPU failed when it ran")))
        return new

    def measure(self, place: Place, offered: Offered) -> None:
        for offer in offered.offers:
            self._attempt(place, offer)
        best_us = min((us for us, _ in self._runs()), default=math.inf)
        near = [o for o in offered.spare if o.candidate.time_us <= HOPELESS * best_us]
        if len(near) < len(offered.spare):
            count = len(offered.spare) - len(near)
            self.notes.append(f"{count} of mbc's own kernels, estimated at over {HOPELESS:g} times the best")
        for offer in near:
            self._attempt(place, offer)
        for number, attempt in enumerate(self._attempts):
            if not attempt.refused:
                self._time(place, number, attempt)
        self._settle(place)

    def _attempt(self, place: Place, offer: Offer) -> None:
        self._trying = offer
        try:
            attempt = place.attempt(offer)
        except DoesNotFit as error:
            self._trying = None
            self.notes.append(f"{offer.candidate.provider} {offer.candidate.name}: {error}")
            return
        self._trying = None
        self._attempts.append(attempt)
        if attempt.refused:
            self._measured[len(self._attempts) - 1] = _measurement(attempt)

    def _runs(self) -> list[tuple[float, int]]:
        """(time, workspace) of everything that ran, now or in an earlier run."""
        now = [(a.once_us, a.offer.candidate.workspace_bytes) for a in self._attempts if not a.refused]
        return now + [(m.time_us, m.workspace_bytes) for m in self._before if not m.refused]

    def _time(self, place: Place, number: int, attempt: Attempt) -> None:
        workspace_bytes = attempt.offer.candidate.workspace_bytes
        bar_us = HOPELESS * min(us for us, needed in self._runs() if needed <= workspace_bytes)
        if attempt.once_us > max(bar_us, NOISE_US):
            self._measured[number] = replace(_measurement(attempt), time_us=attempt.once_us, dominated=True)
        else:
            self._retime(place, number, TIMED_US)

    def _retime(self, place: Place, number: int, budget_us: float) -> None:
        attempt = self._attempts[number]
        self._trying = attempt.offer
        try:
            timing = place.time(attempt, budget_us)
        except MbcError as error:
            self._measured[number] = _measurement(replace(attempt, refused=str(error).splitlines()[0]))
        else:
            self._measured[number] = replace(
                _measurement(attempt),
                time_us=timing.times.median_us,
                spread_us=timing.times.spread_us,
                accumulate_us=timing.accumulate_us,
            )
        self._trying = None

    def _settle(self, place: Place) -> None:
        """Time the best again until two times agree."""
        timed = [(m.time_us, i) for i, m in self._measured.items() if not m.refused and not m.dominated]
        for _, number in sorted(timed)[:BEST]:
            for _ in range(MOST_RETIMINGS):
                before_us = self._measured[number].time_us
                self._retime(place, number, RETIMED_US)
                now = self._measured[number]
                if now.refused or _steady(before_us, now):
                    break
            else:
                self.unsteady = True


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

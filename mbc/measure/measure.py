"""Measures which candidates compute the requests of a plan correctly, and how fast; with a time limit, and resumably.

These measurements are left out, because that loses nothing or little:

* A candidate that takes over three times as long as another with no more workspace runs only once ("dominated").
* A candidate that another beats in every respect is timed by few replays.
* A candidate that was dominated at the two sizes before, or by a factor of ten at any larger size, is not tried at
  smaller sizes, unless it needs less workspace than all others there.
* In a layout, sizes end where a larger size has a candidate with no more workspace and no more time per row than any
  candidate of the current size: no division gains from still smaller slices. This assumes that neither the time per row
  nor the least workspace improves again at smaller sizes.
* A candidate that would take over ten times as long, according to a run on few rows, is not run on all rows.
* mbc's own convolutions and linear layers are not run where their estimate is far above the time of a library's kernel.
* For one step without a budget, only requests that can decide its plan are measured (`decide`); the others are
  estimated.

The extent of each request says which of these cases occurred.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from mbc.errors import MbcError
from mbc.hardware.transfers import link_constants, measured_link
from mbc.ir.types import Precision
from mbc.kernels.base import Request
from mbc.measure.gpu import DoesNotFit, Gpu
from mbc.measure.need import MOST_WORKSPACE_BYTES, Decision, Need
from mbc.measure.offers import Offer, Offered
from mbc.measure.protocols import GpuFailed, Harness, Workbench
from mbc.measure.session import GPU_FAILED, Session
from mbc.measure.size_ladder import Ladder, key_of
from mbc.measure.workbench import Bench, identity
from mbc.ops.fused import Fused
from mbc.profile.model import LEFT_TO_ESTIMATE, Extent, Measurement, Profile
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import rows_of, signature
from mbc.profile.writer import ProfileWriter

__all__ = ["Summary", "identity", "measure", "measure_on"]

# Errors that would occur again: cuDNN, a library or the reference does not support the operation.
_LASTING = frozenset({"MBC079", "MBC086", "MBC087"})

Progress = Callable[[int, int, Request, float | None], None]
# Chooses the requests to measure next, given those that could not be measured and those missing, both by signature.
Decide = Callable[[Collection[str], Collection[str]], Decision]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of the requests in a run of `measure`, and of their candidates.

    Requests were measured now, measured before (`already_measured`), ruled out by larger sizes (`ruled_out`), or left
    when the time was over. `unsteady` are signatures whose best times did not settle, as when another process uses the
    GPU.
    """

    measured: int = 0
    already_measured: int = 0
    left: int = 0
    candidates: int = 0
    refused: int = 0
    dominated: int = 0
    failures: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    ruled_out: int = 0
    interrupted: bool = False
    link_failure: str = ""  # why copies between GPU and host were not measured; empty if they were, now or before

    @property
    def warning(self) -> str:
        """A warning about the times for the user, empty if there is nothing to warn of."""
        if not self.unsteady:
            return ""
        return (
            f"the times of {len(self.unsteady)} operations did not settle: another process may be using the GPU; "
            "measure again when it is free"
        )


def _silent(done: int, total: int, request: Request, seconds_left: float | None) -> None:
    pass


def measure(
    gpu: Gpu,
    needs: Sequence[Need],
    path: Path,
    measure_for_s: float = math.inf,
    workspace_limit_bytes: int = MOST_WORKSPACE_BYTES,
    progress: Progress = _silent,
    again: bool = False,
    link: bool = True,
    decide: Decide | None = None,
    outdated: frozenset[str] = frozenset(),
) -> Summary:
    """Measure the requests of `needs` that the profile at `path` lacks, in order of decreasing weight.

    All undivided requests come first, then the micro-batches of each operation from large to small. Every request is
    written when it is done, so that a later run continues where this one stopped. Requests that were measured under a
    lower limit of workspace are completed. Ctrl-C ends the run as the end of the time does. An operation that fails is
    listed in the summary and does not stop the others; if it would fail again, its extent says why, and later runs skip
    it.

    Args:
        gpu: The GPU.
        needs: Operations with their sizes and weights.
        path: The profile.
        measure_for_s: Longest time in seconds.
        workspace_limit_bytes: Largest workspace of a candidate.
        progress: Called before each request with the number done, the total, the request, and the seconds left.
        again: Measure everything anew.
        link: Also measure copies between GPU and host, if the profile lacks them.
        decide: Chooses those undivided requests that can decide a plan, in order; the others are estimated.
        outdated: Signatures of requests that are completed whatever the profile says; older measurements stay.

    Raises:
        MbcError: MBC088, the GPU failed.
    """
    with Bench(gpu) as bench:
        bench.expect([need.undivided for need in needs if isinstance(need.undivided.attributes, Fused)])
        return measure_on(
            bench, needs, path, measure_for_s, workspace_limit_bytes, progress, again, link, decide=decide,
            outdated=outdated,
        )  # fmt: skip


def measure_on(
    bench: Workbench,
    needs: Sequence[Need],
    path: Path,
    measure_for_s: float = math.inf,
    workspace_limit_bytes: int = MOST_WORKSPACE_BYTES,
    progress: Progress = _silent,
    again: bool = False,
    link: bool = True,
    clock: Callable[[], float] = time.monotonic,
    decide: Decide | None = None,
    outdated: frozenset[str] = frozenset(),
) -> Summary:
    """Measure on any workbench; see `measure`."""
    with ProfileWriter(path, bench.identity()) as writer:
        held = read_profile(path)
        if again:
            held = Profile(held.identity, {}, constants=held.constants)
        held = replace(held, extents={key: e for key, e in held.extents.items() if key not in outdated})
        wants_link = link and (again or measured_link(held.constants) is None)
        run = _Run(bench, writer, held, workspace_limit_bytes, progress, clock, clock() + measure_for_s, wants_link)
        return run.all(sorted(needs, key=lambda need: -need.weight_us), decide)


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
    wants_link: bool
    summary: Summary = field(default_factory=Summary)
    total: int = 0
    started_s: float = 0.0
    wholes: frozenset[str] = frozenset()  # signatures of requests that run an operation undivided
    # Measurements of this run, by signature.
    results: dict[str, tuple[Measurement, ...]] = field(default_factory=dict[str, tuple[Measurement, ...]])

    def all(self, needs: Sequence[Need], decide: Decide | None = None) -> Summary:
        wanted = {signature(r): r for need in needs for r in need.requests}
        self.wholes = frozenset(signature(need.undivided) for need in needs if need.whole)
        already_measured = sum(self._known(key) for key in wanted)
        self.total = len(wanted) - already_measured
        self.summary = replace(self.summary, already_measured=already_measured)
        try:
            if wanted and (self.total or self.wants_link) and self.clock() < self.deadline_s:
                self._prepare(next(iter(wanted.values())).precision)
            self.started_s = self.clock()
            if decide is not None:
                self._decisive({signature(need.undivided): need for need in needs if need.whole}, decide)
                return self._ended()
            seen: set[str] = set()
            # Every operation undivided first: if memory suffices a plan needs nothing else.
            for need in needs:
                if need.whole:
                    self._need(need, seen, sizes=1)
            for need in needs:
                self._need(need, seen, sizes=len(need.requests))
        except _OutOfTime:
            pass
        except KeyboardInterrupt:
            self.summary = replace(self.summary, interrupted=True)
        return self._ended()

    def _ended(self) -> Summary:
        return replace(self.summary, left=self.total - self._done())

    def _decisive(self, needs: Mapping[str, Need], decide: Decide) -> None:
        """Measure the undivided `needs` (by signature) that `decide` chooses, until it chooses none.

        Requests that are then not measured are left to their estimates. A plan that compares such an estimate with
        measurements is better than a plan that knows only some of its alternatives.
        """
        missing = dict.fromkeys(key for key in needs if not self._known(key))
        pending, seen = tuple(missing), set[str]()
        try:
            while pending:
                failed = seen - self.results.keys()
                pending = decide(failed, missing).requests
                self.total = self._done() + len(pending)
                for key in pending:
                    self._need(needs[key], seen, sizes=1)
                    missing.pop(key, None)  # a first decision may be older than the measurements
        finally:
            self._leave_to_estimate(needs[key].undivided for key in missing)

    def _leave_to_estimate(self, requests: Iterable[Request]) -> None:
        held = {*self.held.extents, *self.held.measurements, *self.held.earlier}
        with self.writer.all_at_once():
            for request in requests:
                if signature(request) not in held:
                    self.writer.record(request, (), Extent(0, LEFT_TO_ESTIMATE))

    def _done(self) -> int:
        return self.summary.measured + self.summary.ruled_out + len(self.summary.failures)

    def _known(self, key: str) -> bool:
        extent = self.held.extents.get(key)
        return extent is not None and extent.covers(self.limit_bytes, key in self.wholes)

    def _prepare(self, precision: Precision) -> None:
        self.bench.warm(precision)
        if self.total:
            self.writer.record_constant("graph_gap_us", self.bench.graph_gap_us(precision))
        if self.wants_link:
            self._link(precision)

    def _link(self, precision: Precision) -> None:
        try:
            constants = link_constants(self.bench.host_link(precision))
        except (MbcError, DoesNotFit) as error:
            self.summary = replace(self.summary, link_failure=str(error))
        else:
            for name, value in constants.items():
                self.writer.record_constant(name, value)

    def _need(self, need: Need, seen: set[str], sizes: int) -> None:
        """Measure the first `sizes` requests of one operation; the first that is measured allocates the operands."""
        ladder = Ladder()
        for rows, measured in need.larger:
            ladder.add(rows, measured)
        harness: Harness | None = None
        requests = [(r, signature(r)) for r in need.requests]
        with ExitStack() as stack:
            for place, (request, key) in enumerate(requests[:sizes]):
                if self._known(key):
                    ladder.add(rows_of(request), self.held.measurements.get(key, ()))
                    continue
                if key in seen:
                    if key in self.results:
                        ladder.add(rows_of(request), self.results[key])
                    continue
                if ladder.closed:
                    # Requests that another operation runs undivided are measured there in any case.
                    there = seen | self.wholes
                    rest = [k for _, k in requests[place:] if not self._known(k) and k not in there]
                    seen.update(rest)
                    self.summary = replace(self.summary, ruled_out=self.summary.ruled_out + len(rest))
                    return
                seen.add(key)
                self._tell(request)
                try:
                    harness = harness or stack.enter_context(self.bench.open(need))
                    self._request(harness, request, ladder, last=place + 1 == len(requests))
                except (MbcError, DoesNotFit) as error:
                    if isinstance(error, MbcError) and error.code == "MBC088":
                        raise
                    self._failed(request, error)

    def _failed(self, request: Request, error: MbcError | DoesNotFit) -> None:
        """Note in the summary that a request could not be measured, and in the profile too if it would fail again.

        Otherwise each compilation would try again.
        """
        key = signature(request)
        if isinstance(error, DoesNotFit) or error.code in _LASTING:
            reason = str(error).splitlines()[0].replace(";", ",")
            measured = self.held.measurements.get(key, ())
            self.writer.record(request, measured, Extent(self.limit_bytes, f"could not be measured: {reason}"))
        self.summary = replace(self.summary, failures=(*self.summary.failures, f"{key}: {error}"))

    def _tell(self, request: Request) -> None:
        now = self.clock()
        if now > self.deadline_s:
            raise _OutOfTime
        done = self._done()
        left_s = (now - self.started_s) / done * (self.total - done) if done else None
        self.progress(done, self.total, request, left_s)

    def _request(self, harness: Harness, request: Request, ladder: Ladder, last: bool) -> None:
        """Measure one request and write its results."""
        key = signature(request)
        before = self.held.measurements.get(key, ())
        extent = self.held.extents.get(key)
        whole = key in self.wholes
        # Candidates that were left out of a micro-batch may be within any limit of workspace.
        measured_bytes = extent.workspace_limit_bytes if extent and not (whole and extent.micro_batches_only) else -1
        offered = self.bench.offers(request, self.limit_bytes)
        passed = {key_of(m) for m in before if m.refused == GPU_FAILED or measured_bytes < 0}
        wanted, notes = (Ladder() if whole else ladder).promising(_in_turn(_new(offered, measured_bytes, passed)))
        session = Session(before, ladder.tried, layouts_differ=request.kind == "convert")
        failure = ""
        try:
            if wanted.offers or wanted.spare:
                with harness.at(request, (*wanted.offers, *wanted.spare)) as there:
                    session.measure(there, wanted)
        except GpuFailed as error:
            failure = str(error)
        results = session.measurements()
        ladder.add(rows_of(request), results)
        self.results[key] = results
        left_out = [*offered.left_out, *notes, *session.notes]
        if ladder.closed and not last:
            left_out.append(f"sizes under {rows_of(request)}: nothing here is faster per row than a larger size")
        # If the GPU failed, the next run measures the rest of this request.
        reached_bytes = measured_bytes if failure else self.limit_bytes
        self.writer.record(request, results, Extent(reached_bytes, "; ".join(left_out), micro_batches_only=bool(notes)))
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
                "run the same command again: it keeps the measurements and skips the kernel that failed",
            )


def _new(offered: Offered, workspace_bytes: int, passed: Collection[object]) -> Offered:
    """Return the offers that need more than `workspace_bytes` of workspace and whose key is not in `passed`."""

    def new(offers: Iterable[Offer]) -> tuple[Offer, ...]:
        beyond = (o for o in offers if o.candidate.workspace_bytes > workspace_bytes)
        return tuple(o for o in beyond if o.key not in passed)

    return replace(offered, offers=new(offered.offers), spare=new(offered.spare))


def _in_turn(offered: Offered) -> Offered:
    """Return the offers with the first of every provider and layout at the start, so that slow ones show early."""
    places: Counter[tuple[object, ...]] = Counter()
    placed: list[tuple[int, Offer]] = []
    for offer in offered.offers:
        group = (offer.candidate.provider, offer.candidate.layouts)
        placed.append((places[group], offer))
        places[group] += 1
    return replace(offered, offers=tuple(offer for _, offer in sorted(placed, key=lambda pair: pair[0])))

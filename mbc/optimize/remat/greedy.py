"""Choose for every gap between two uses of a value whether it is kept, made again or sent to the host.

First as much goes to the host as its link can carry unseen, what is slowest to make again first. Then, where most is
taken, the gap that costs least time for its bytes is made again, until everything fits; how much is taken is found
from the rewritten program, and the choice goes on from there. What proves not to be needed is kept after all. What was
found so is then improved (`mbc.optimize.remat.local_search`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.transfers import HostLink
from mbc.ir.graph import Operation, TrainingGraph
from mbc.optimize.remat.apply_decisions import Decisions, in_launch_order, rewrite
from mbc.optimize.remat.coalesce_copies import coalesce_copies
from mbc.optimize.remat.exhaustive import fastest_first
from mbc.optimize.remat.fused_remat import FusedRematRuns
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger
from mbc.optimize.remat.local_search import Found, drop_offloads, improve, keep_after_all, squeeze
from mbc.optimize.remat.offload import Offloader
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.remat.segment_remat import cut_into_segments
from mbc.optimize.remat.undo_log import Leaner
from mbc.optimize.schedule.depth_first_micro_batches import Division
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import in_place, taken_over, works_in_place
from mbc.optimize.schedule.liveness import live_of
from mbc.optimize.schedule.regions import Run, runs_of

# Values of less than this part of the room are always kept.
SMALL_PART = 1 / 20_000
MOST_ROUNDS = 40
SEGMENT_PARTS = (1.0, 0.7, 0.5, 0.4, 0.3)  # of the room: segments that are tried
SEGMENT_ROUNDS = 3  # of choosing gap by gap where these do not fit
MOST_IMPROVING = 200  # rounds that improve what was found
WORSE_ROUNDS = 10  # one after another that are no smaller than what was found
# Making things again for longer than so many whole steps leads nowhere.
MOST_AGAIN = 1.0
# Of what is made again, some proves not to be needed: where so many times as long as another step allows is too little.
WORTH_AGAIN = 1.5
NOTHING_BYTES = np.iinfo(np.int64).min  # taken where nothing can be done
# Trials of keeping a value after all, each of which looks at the whole program.
KEEP_WORK = 60_000_000


@dataclass(frozen=True, slots=True)
class Means:
    """What may be used to make room. `offload`: the part of what is too much that goes to the host at most.
    So many bytes of the optimizer's states (`states_bytes`) are at home there, and in the arena for `lead` times of
    their copy before they are needed, and after. `split`: whether large values may exist in micro-batches only;
    `division` is how, in this try."""

    recompute: bool
    offload: float
    host_bytes: int
    split: bool = False
    division: Division | None = None
    states_bytes: int = 0
    lead: float = 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """`live_bytes`: most bytes alive at once in the training program, runs of `leaner` with less workspace than in
    `draft`, which take `leaner_us` longer for it. `draft` has its final aliases. `sent`: the part of what was too much
    that goes to the host, over run `peak`; kernels wait for that of `forced`."""

    draft: Draft
    decisions: Decisions
    live_bytes: int
    sent: float = 0.0
    peak: int = 0
    forced: frozenset[int] = frozenset()
    leaner: tuple[tuple[int, Leaner], ...] = ()
    leaner_us: float = 0.0


Measured = tuple[Residency, NDArray[np.int64]]
Points = Mapping[tuple[str, ...], Sequence[tuple[int, float]]]


def choose_residency(
    graph: TrainingGraph,
    draft: Draft,
    link: HostLink,
    means: Means,
    available_bytes: int,
    known_us: float = math.inf,
    groups: Sequence[Operation] = (),
    work: int = 0,
    start: Residency | None = None,
    points: Points | None = None,
    fused_remat: FusedRematRuns | None = None,
    runs: Sequence[Run] = (),
) -> Residency:
    """The draft as it fits the room, or as little over it as was found. `draft` must not alias but by updates.

    `known_us`: a step that fits; one that would take much longer is given up. `work`: rounds that improve what fits,
    times the runs of the program. `start`: what was found for the same draft and as much room or more, to go on from.
    `points`: bytes of workspace and time of the other ways to run operations that are launched together, by their
    names. `fused_remat`: what can be made again along with other runs, whose operations are among `groups`.
    `runs`: of the training program, where some are repeated by other launches.
    """
    runs = tuple(runs) or runs_of(graph, draft, draft.train)
    chooser = Chooser(
        graph, draft, link, means, available_bytes, known_us, groups, points or {}, fused_remat or {}, runs
    )
    found = chooser.run(work, start)
    return replace(found, draft=in_launch_order(found.draft))


class Chooser:
    """What is decided of one draft, in its ledger and its sender, until it fits the room and for as little time as is
    found. Mutable. `runs`: of the training program."""

    def __init__(
        self,
        graph: TrainingGraph,
        draft: Draft,
        link: HostLink,
        means: Means,
        available_bytes: int,
        known_us: float,
        groups: Sequence[Operation],
        points: Points,
        fused_remat: FusedRematRuns,
        runs: Sequence[Run],
    ) -> None:
        self._works = works_in_place(graph, groups)
        self._draft = taken_over(draft, draft.infer, self._works)  # which nothing here changes
        self._link = link
        self._means = means
        self._available_bytes = available_bytes
        self.runs = runs
        self._small_bytes = int(available_bytes * SMALL_PART)
        self._in_place = tuple(in_place(draft, self.runs, self._works))
        self._fused_remat = fused_remat
        self.ledger = Ledger(draft, self.runs, self._small_bytes, self._in_place, self._fused_remat)
        self._persistent_bytes = persistent_bytes(draft)
        self.offloader = Offloader(draft, link, self.runs, self.ledger, means.host_bytes)
        self.price_perturbations: dict[int, float] = {}  # by what the price of a value counts more
        launches = draft.train.launches
        self._points = [points.get(launches[run.start].operations, ()) for run in self.runs]
        self._forbidden: set[tuple[int, int]] = set()  # values that are not to be made again before a run
        step_us = sum(run.time_us for run in self.runs)
        self.most_again_us = min(MOST_AGAIN * step_us, WORTH_AGAIN * (known_us - step_us))

    def run(self, work: int, start: Residency | None) -> Residency:
        best = self.measured()
        kept_over = best[1]
        if start is not None:
            self._go_on(start)
            best = self.measured()
        elif best[0].live_bytes > self._available_bytes:
            best = self._started(best)
        smallest, best = self._relieved(best, MOST_ROUNDS)
        limit_us = math.inf
        rounds = min(MOST_IMPROVING, work // len(self.runs))
        if best[0].live_bytes > self._available_bytes and rounds:
            found = squeeze(self, Found(*best, self.costs_us()), rounds)
            best = found.residency, found.over
            smallest = min(smallest, found.residency, key=lambda found: found.live_bytes)
        if best[0].live_bytes <= self._available_bytes:
            kept = self._keep_after_all(best)
            found = improve(self, Found(*kept, self.costs_us()), rounds)
            smallest, limit_us = self._with_coalesced_copies(found), found.costs_us
        if self._means.recompute and not smallest.decisions.offloads:
            ledger = Ledger(self._draft, self.runs, self._small_bytes, fused_remat=self._fused_remat)
            for decisions in fastest_first(ledger, kept_over, limit_us):
                proved = self.measure(decisions, {})[0]
                if proved.live_bytes <= self._available_bytes:
                    return proved
        return smallest

    def _relieved(self, best: Measured, rounds: int) -> tuple[Residency, Measured]:
        """What is smallest of what choosing gap by gap comes to, and what it ends with."""
        smallest = best[0]  # one round may take more than that before
        worse = 0
        for _ in range(rounds):
            residency, over = best
            if residency.live_bytes <= self._available_bytes or self._again_too_long() or worse >= WORSE_ROUNDS:
                break
            if not (self.relieve(over) or self._forbid_at(int(np.argmax(over)))):
                break
            self.offloader.schedule()
            best = self.measured()
            worse = 0 if best[0].live_bytes < smallest.live_bytes else worse + 1
            smallest = min(smallest, best[0], key=lambda found: found.live_bytes)
        return smallest, best

    def _started(self, kept: Measured) -> Measured:
        """Where to go on from: as much at the host as its link can carry, and then the segments that cost least once
        they fit; where choosing gap by gap could cost less than that, nothing yet."""
        if self._means.offload > 0:
            self.offloader.send_away(kept[1], self._means.offload, self._means.recompute)
        sent = self.measured()
        if not self._means.recompute:
            return sent
        found: list[tuple[float, Residency]] = []
        before = self.ledger.mark()
        peak, most_again_us = int(np.argmax(kept[1])), self.most_again_us
        for part in (*SEGMENT_PARTS, 0.0):
            if part:
                cut_into_segments(self.ledger, peak, int(part * self._available_bytes))
                self.offloader.schedule()
            best = self._relieved(self.measured(), SEGMENT_ROUNDS if part else MOST_ROUNDS)[1]
            if best[0].live_bytes <= self._available_bytes:
                residency, _ = self._keep_after_all(best)
                found.append((self.costs_us(), residency))
                self.most_again_us = min(self.most_again_us, WORTH_AGAIN * self.costs_us())
            elif not part and not found:
                return best
            self.ledger.undo(before)
            self.offloader.forced.clear()
            self._forbidden.clear()
        self.most_again_us = most_again_us
        self._go_on(min(found, key=lambda found: found[0])[1])
        return self.measured()

    def _go_on(self, start: Residency) -> None:
        self.ledger.undo(self.ledger.empty)
        for offload in start.decisions.offloads:
            self.ledger.offload(offload.buffer, offload.out, offload.back)
        for recompute in start.decisions.recomputes:
            self.ledger.repeat(recompute.buffer, recompute.before)
        for run, how in start.leaner:
            self.ledger.lean(run, how)
        self.offloader.sent, self.offloader.peak, self.offloader.forced = start.sent, start.peak, set(start.forced)

    def _again_too_long(self) -> bool:
        return self.ledger.again_us > self.most_again_us

    def costs_us(self) -> float:
        """What is made again, less workspace, and copies that kernels wait for."""
        ledger = self.ledger
        return (
            ledger.again_us + ledger.leaner_us() + sum(map(self.offloader.both_ways_us, sorted(self.offloader.forced)))
        )

    # What is taken

    def measured(self) -> Measured:
        """The program as decided, and by how much each run and what is made again before it exceed the room."""
        measured = self.measure(self.ledger.decisions(), self.ledger.leaner)
        self.ledger.measured()
        return measured

    def measure(self, decisions: Decisions, leaner: Mapping[int, Leaner]) -> Measured:
        rewritten = rewrite(self._draft, self.runs, decisions, self._link, self._fused_remat)
        draft = taken_over(rewritten.draft, rewritten.draft.train, self._works)
        live = live_of(draft.train, draft.buffers, frozenset(draft.persistent)) + self._persistent_bytes
        if leaner:
            less = {self._operations(run): how.less_bytes for run, how in leaner.items()}
            live -= np.array([less.get(launch.operations, 0) for launch in draft.train.launches])
        over = np.full(len(self.runs) + 1, -self._available_bytes, np.int64)
        np.maximum.at(over, np.array(rewritten.position), live - self._available_bytes)
        offloader = self.offloader
        return Residency(
            draft,
            decisions,
            int(live.max()),
            offloader.sent,
            offloader.peak,
            frozenset(offloader.forced),
            tuple(sorted(leaner.items())),
            self.ledger.leaner_us() if leaner else 0.0,
        ), over

    def _operations(self, run: int) -> tuple[str, ...]:
        return self._draft.train.launches[self.runs[run].start].operations

    # Until it fits

    def relieve(self, over: NDArray[np.int64]) -> bool:
        """Make room by the books at every run that exceeds it; whether anything could be done."""
        done = False
        hopeless = np.zeros(len(over), bool)
        while True:
            taken = np.where(hopeless, NOTHING_BYTES, over + self.ledger.delta_bytes)
            worst = int(np.argmax(taken))
            if taken[worst] <= 0 or self._again_too_long():
                return done
            if self._relieve_at(worst, over):
                done = True
            if over[worst] + self.ledger.delta_at(worst) > 0:
                hopeless[worst] = True

    def _relieve_at(self, position: int, over: NDArray[np.int64]) -> bool:
        ledger = self.ledger
        # A chain takes longest to look at, so that gaps stand there by what they cost at least at first.
        heap = self._least_prices(position)
        heapq.heapify(heap)
        done = False
        while heap and over[position] + ledger.delta_at(position) > 0 and not self._again_too_long():
            _, buffer, _ = heapq.heappop(heap)
            gap = ledger.gap(buffer, position)
            if gap is None:
                continue
            price = self._price(gap)
            if price == math.inf:
                continue
            if heap and price > heap[0][0]:
                heapq.heappush(heap, (price, buffer, gap.before))
                continue
            lacking_bytes = int(over[position]) + ledger.delta_at(position)
            if self._lean(position, lacking_bytes, price * max(ledger.size_bytes[buffer], lacking_bytes)):
                return True
            self._apply(gap)
            done = True
        lacking_bytes = int(over[position]) + ledger.delta_at(position)
        return (lacking_bytes > 0 and self._lean(position, lacking_bytes, math.inf)) or done

    def _lean(self, position: int, lacking_bytes: int, most_us: float) -> bool:
        """Run with so much less workspace, if that takes no longer than something else would."""
        if position >= len(self.runs) or not self._points[position]:
            return False
        ledger = self.ledger
        known = ledger.leaner.get(position, Leaner(0, 0.0))
        all_bytes = ledger.scratch_bytes(position) + known.less_bytes
        most_bytes = all_bytes - known.less_bytes - lacking_bytes
        fitting = [point for point in self._points[position] if point[0] <= most_bytes]
        if not fitting:
            return False
        workspace_bytes, time_us = max(fitting)
        more_us = max(0.0, time_us - self.runs[position].time_us)
        if (more_us - known.more_us) * ledger.times(position) * self.price_perturbations.get(
            -1 - position, 1.0
        ) > most_us:
            return False
        ledger.lean(position, Leaner(all_bytes - workspace_bytes, more_us))
        return True

    def _forbid_at(self, position: int) -> bool:
        """Where what is made again before a run is too much together, the largest of it has to come from elsewhere."""
        ledger = self.ledger
        found = [b for b in ledger.repeated_at(position) if (b, position) not in self._forbidden]
        if not found:
            return False
        largest = max(found, key=lambda b: (ledger.taken_by(b), b))
        self._forbidden.add((largest, position))
        ledger.drop(largest, position)
        return True

    def _price(self, gap: Gap) -> float:
        """Microseconds a byte of the cheaper way to have the bytes free at a run."""
        return self._a_byte(gap.buffer, min(self._recompute_us(gap), self._forced_us(gap)))

    def _least_prices(self, position: int) -> list[tuple[float, int, int]]:
        """The gaps over a run, as a price no more than `_price`, the value and where the gap ends."""
        found: list[tuple[float, int, int]] = []
        price_perturbations, sizes = self.price_perturbations, self.ledger.size_bytes
        for buffer, before, time_us in self.ledger.gaps(position):
            if self._means.offload > 0:
                time_us = min(time_us, self._copies_us(buffer))
            found.append((time_us * price_perturbations.get(buffer, 1.0) / sizes[buffer], buffer, before))
        return found

    def _a_byte(self, buffer: int, time_us: float) -> float:
        return time_us * self.price_perturbations.get(buffer, 1.0) / self.ledger.size_bytes[buffer]

    def _apply(self, gap: Gap) -> None:
        if self._recompute_us(gap) <= self._forced_us(gap):
            self.ledger.recompute(gap.buffer, gap.before)
        else:
            self.offloader.forced.add(gap.buffer)
            self.ledger.offload(gap.buffer, gap.after + 1, gap.before)

    def _recompute_us(self, gap: Gap) -> float:
        if not self._means.recompute or (gap.buffer, gap.before) in self._forbidden:
            return math.inf
        return self.ledger.chain(gap.buffer, gap.before)[0]

    def _forced_us(self, gap: Gap) -> float:
        """What an offload costs where kernels wait for it. A short copy is none, but where nothing else is left."""
        copies_us = self._copies_us(gap.buffer)
        if not self.offloader.worth_sending(gap.buffer) and self._recompute_us(gap) < math.inf:
            return math.inf
        return copies_us

    def _copies_us(self, buffer: int) -> float:
        """What sending a value takes, the queues of the copies taken to be free."""
        ledger = self.ledger
        if self._means.offload <= 0 or buffer in ledger.offloads:
            return math.inf
        if ledger.sent_bytes + ledger.size_bytes[buffer] > self._means.host_bytes:
            return math.inf
        return self.offloader.both_ways_us(buffer)

    # What is not needed

    def _keep_after_all(self, best: Measured) -> Measured:
        """Take decisions back, the most expensive first, where the books say that it fits without."""
        before = self.ledger.mark()
        keep_after_all(self, best[1], max(1, KEEP_WORK // len(self.runs)))
        drop_offloads(self, best[1])
        self.offloader.schedule()
        found = self.measure(self.ledger.decisions(), self.ledger.leaner)
        if found[0].live_bytes > self._available_bytes:
            self.ledger.undo(before)
            return best
        self.ledger.measured()
        return found

    def _with_coalesced_copies(self, found: Found) -> Residency:
        """What need not go to the host stays, and copies travel together, if that fits. That copies travel together is
        in the draft only: decisions are gone on from as they are."""
        if not found.residency.decisions.offloads:
            return found.residency
        self._go_on(found.residency)
        _, over = self.measured()
        drop_offloads(self, over)
        alone, over = self.measured()
        if alone.live_bytes > self._available_bytes:
            return found.residency
        coalesce_copies(self.offloader, self.ledger, over, self._available_bytes)
        together, _ = self.measured()
        if together.live_bytes > self._available_bytes:
            return alone
        return replace(alone, draft=together.draft, live_bytes=together.live_bytes)

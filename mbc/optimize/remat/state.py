"""What is decided of one draft while room is made, what that takes and costs, and making room at one run after another.

Greedy choice (`mbc.optimize.remat.greedy`) and local search (`mbc.optimize.remat.local_search`) both work on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.transfers import HostLink
from mbc.ir.graph import Operation, TrainingGraph
from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import Decisions, rewrite
from mbc.optimize.remat.fused_remat import FusedRematRuns
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger
from mbc.optimize.remat.offload import Offloader
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.remat.undo_log import Leaner
from mbc.optimize.schedule.depth_first_micro_batches import Division
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import in_place, taken_over, works_in_place
from mbc.optimize.schedule.liveness import live_of
from mbc.optimize.schedule.regions import Run

NOTHING_BYTES = np.iinfo(np.int64).min  # taken where nothing can be done


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


class RematState:
    """What is decided of one draft, in its ledger and its offloader, and the steps by which it changes: gap by gap
    where room is lacking. Mutable. `runs`: of the training program."""

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
        self.draft = taken_over(draft, draft.infer, self._works)  # which nothing here changes
        self._link = link
        self.means = means
        self.available_bytes = available_bytes
        self.runs = runs
        self.small_bytes = int(available_bytes * effort.ALWAYS_KEPT_SHARE)
        self._in_place = tuple(in_place(draft, self.runs, self._works))
        self.along = fused_remat
        self.ledger = Ledger(draft, self.runs, self.small_bytes, self._in_place, self.along)
        self._persistent_bytes = persistent_bytes(draft)
        self.offloader = Offloader(draft, link, self.runs, self.ledger, means.host_bytes)
        self.price_perturbations: dict[int, float] = {}  # by what the price of a value counts more
        launches = draft.train.launches
        self._points = [points.get(launches[run.start].operations, ()) for run in self.runs]
        self.forbidden: set[tuple[int, int]] = set()  # values that are not to be recomputed before a run
        step_us = sum(run.time_us for run in self.runs)
        self.most_again_us = min(
            effort.MAX_RECOMPUTED_STEPS * step_us, effort.RECOMPUTE_OVERSHOOT * (known_us - step_us)
        )

    def go_on(self, start: Residency) -> None:
        self.ledger.undo(self.ledger.empty)
        for offload in start.decisions.offloads:
            self.ledger.offload(offload.buffer, offload.out, offload.back)
        for recompute in start.decisions.recomputes:
            self.ledger.repeat(recompute.buffer, recompute.before)
        for run, how in start.leaner:
            self.ledger.lean(run, how)
        self.offloader.sent, self.offloader.peak, self.offloader.forced = start.sent, start.peak, set(start.forced)

    def again_too_long(self) -> bool:
        return self.ledger.again_us > self.most_again_us

    def costs_us(self) -> float:
        """What is recomputed, less workspace, and copies that kernels wait for."""
        ledger = self.ledger
        return (
            ledger.again_us + ledger.leaner_us() + sum(map(self.offloader.both_ways_us, sorted(self.offloader.forced)))
        )

    # What is taken

    def measured(self) -> Measured:
        """The program as decided, and by how much each run and what is recomputed before it exceed the room."""
        measured = self.measure(self.ledger.decisions(), self.ledger.leaner)
        self.ledger.measured()
        return measured

    def measure(self, decisions: Decisions, leaner: Mapping[int, Leaner]) -> Measured:
        rewritten = rewrite(self.draft, self.runs, decisions, self._link, self.along)
        draft = taken_over(rewritten.draft, rewritten.draft.train, self._works)
        live = live_of(draft.train, draft.buffers, frozenset(draft.persistent)) + self._persistent_bytes
        if leaner:
            less = {self._operations(run): how.less_bytes for run, how in leaner.items()}
            live -= np.array([less.get(launch.operations, 0) for launch in draft.train.launches])
        over = np.full(len(self.runs) + 1, -self.available_bytes, np.int64)
        np.maximum.at(over, np.array(rewritten.position), live - self.available_bytes)
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
        return self.draft.train.launches[self.runs[run].start].operations

    # Until it fits

    def relieve(self, over: NDArray[np.int64]) -> bool:
        """Make room by the books at every run that exceeds it; whether anything could be done."""
        done = False
        hopeless = np.zeros(len(over), bool)
        while True:
            taken = np.where(hopeless, NOTHING_BYTES, over + self.ledger.delta_bytes)
            worst = int(np.argmax(taken))
            if taken[worst] <= 0 or self.again_too_long():
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
        while heap and over[position] + ledger.delta_at(position) > 0 and not self.again_too_long():
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

    def forbid_at(self, position: int) -> bool:
        """Where what is recomputed before a run is too much together, the largest of it has to come from elsewhere."""
        ledger = self.ledger
        found = [b for b in ledger.repeated_at(position) if (b, position) not in self.forbidden]
        if not found:
            return False
        largest = max(found, key=lambda b: (ledger.taken_by(b), b))
        self.forbidden.add((largest, position))
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
            if self.means.offload > 0:
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
        if not self.means.recompute or (gap.buffer, gap.before) in self.forbidden:
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
        if self.means.offload <= 0 or buffer in ledger.offloads:
            return math.inf
        if ledger.sent_bytes + ledger.size_bytes[buffer] > self.means.host_bytes:
            return math.inf
        return self.offloader.both_ways_us(buffer)

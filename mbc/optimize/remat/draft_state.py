"""The decisions of one draft while bytes are freed: their live bytes and cost, and the step that frees bytes.

That step goes from one region that exceeds the available bytes to the next. Greedy choice (`mbc.optimize.remat.greedy`)
and local search (`mbc.optimize.remat.local_search`) both use it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.transfers import Links
from mbc.ir.graph import Operation, TrainingGraph
from mbc.optimize import effort
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.apply_decisions import Decisions, rewrite
from mbc.optimize.remat.fused_remat import FusedRematLaunch, FusedRematLaunches
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger
from mbc.optimize.remat.offload import Offloader
from mbc.optimize.remat.operand_peak import operand_peak_bytes
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.remat.undo_log import WorkspaceCut
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import in_place, in_place_operands, with_aliases
from mbc.optimize.schedule.liveness import live_of
from mbc.optimize.schedule.regions import Region, regions_of
from mbc.plan.cut import given_at_cut, is_cut

NOTHING_BYTES = np.iinfo(np.int64).min  # marks a region at which no more bytes can be freed


@dataclass(frozen=True, slots=True)
class Residency:
    """Decisions for every value of a draft.

    Attributes:
        draft: The draft with the decisions carried out, and with its final aliases.
        decisions: The decisions.
        live_bytes: Peak live bytes of the training program, with `workspace_cuts` applied.
        offloaded_share: Offloaded share of the excess bytes at region `peak`.
        peak: The region over which values are offloaded.
        stalling: Offloaded values whose copies kernels wait for.
        workspace_cuts: Regions that have less workspace than in `draft`.
        workspace_cuts_us: Time that these cuts add.
        least_bytes: A lower bound of `live_bytes` under any decisions.
        work: Work so far (`effort.NOT_FOUND_WORK`).
    """

    draft: Draft
    decisions: Decisions
    live_bytes: int
    offloaded_share: float = 0.0
    peak: int = 0
    stalling: frozenset[int] = frozenset()
    workspace_cuts: tuple[tuple[int, WorkspaceCut], ...] = ()
    workspace_cuts_us: float = 0.0
    least_bytes: int = 0
    work: int = field(default=0, compare=False)

    @property
    def resumed(self) -> object:
        """All fields that `RematState.resume` uses."""
        return self.decisions, self.offloaded_share, self.peak, self.stalling, self.workspace_cuts


Measured = tuple[Residency, NDArray[np.int64]]
Points = Mapping[tuple[str, ...], Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class RematTask:
    """A draft and the bytes that it may use.

    Attributes:
        graph: The training graph.
        draft: A draft whose only aliases are those of updates.
        links: Links that carry copies.
        techniques: Techniques that may be used.
        available_bytes: Bytes of the arena that the step may use.
        known_us: Time of a step that fits; a step that would take much longer is abandoned.
        groups: Fusion groups that the draft or `fused_remat` launches.
        points: Workspace in bytes and time of the other candidates of operations that are launched together, by their
            names.
        fused_remat: Fused rematerializations, whose operations are among `groups`.
        regions: Regions of the training program, where other launches recompute some; empty: computed from the draft.
    """

    graph: TrainingGraph
    draft: Draft
    links: Links
    techniques: AllowedTechniques
    available_bytes: int
    known_us: float = math.inf
    groups: Sequence[Operation] = ()
    points: Points = field(default_factory=dict[tuple[str, ...], Sequence[tuple[int, float]]])
    fused_remat: FusedRematLaunches = field(default_factory=dict[tuple[int, int], FusedRematLaunch])
    regions: tuple[Region, ...] = ()


class RematState:
    """The decisions of one draft, in its ledger and its offloader, and the steps that change them.

    Where bytes are lacking, decisions are made gap by gap. The object is mutable.
    """

    def __init__(self, task: RematTask) -> None:
        """Start without decisions."""
        draft = task.draft
        self._in_place_operands = in_place_operands(task.graph, task.groups)
        self.draft = with_aliases(draft, draft.infer, self._in_place_operands)  # inference has no decisions
        self._links = task.links
        self.techniques = task.techniques
        self.available_bytes = task.available_bytes
        self.regions = task.regions or regions_of(task.graph, draft, draft.train)
        self.small_bytes = int(task.available_bytes * effort.ALWAYS_KEPT_SHARE)
        self._in_place = tuple(in_place(draft, self.regions, self._in_place_operands))
        self.fused_remat = task.fused_remat
        # An input that is given where the program is cut cannot be moved before it is read: it is not there yet.
        late = given_at_cut(task.graph) if is_cut(task.graph) else ()
        given = (b for b in draft.train.entry if draft.buffers[b].value in late)
        fixed = replace(draft, persistent=(*draft.persistent, *given))
        self.ledger = Ledger(fixed, self.regions, self.small_bytes, self._in_place, self.fused_remat)
        self._persistent_bytes = persistent_bytes(draft)
        self.offloader = Offloader(draft, task.links, self.ledger, task.techniques)
        self.price_perturbations: dict[int, float] = {}  # factors of prices, by value
        self.work = 0  # in the unit of effort.NOT_FOUND_WORK
        launches = draft.train.launches
        self._smaller_workspaces = [task.points.get(launches[region.start].operations, ()) for region in self.regions]
        self.forbidden: set[tuple[int, int]] = set()  # values that are not to be recomputed before a region
        step_us = sum(region.time_us for region in self.regions)
        self.max_recompute_us = min(
            effort.MAX_RECOMPUTED_STEPS * step_us, effort.RECOMPUTE_OVERSHOOT * (task.known_us - step_us)
        )

    def resume(self, start: Residency) -> None:
        """Replace all decisions by those of `start`."""
        self.ledger.undo(self.ledger.empty)
        for offload in start.decisions.offloads:
            self.ledger.offload(offload.buffer, offload.out, offload.back, offload.space)
        for recompute in start.decisions.recomputes:
            self.ledger.recompute_value(recompute.buffer, recompute.before)
        for region, cut in start.workspace_cuts:
            self.ledger.cut_workspace(region, cut)
        self.offloader.offloaded_share, self.offloader.peak, self.offloader.stalling = (
            start.offloaded_share,
            start.peak,
            set(start.stalling),
        )

    def recompute_too_long(self) -> bool:
        """Return whether recomputations take longer than they may."""
        return self.ledger.recompute_us > self.max_recompute_us

    def costs_us(self) -> float:
        """Return the time that decisions add: recomputations, smaller workspaces, and copies that kernels wait for."""
        ledger = self.ledger
        return (
            ledger.recompute_us
            + ledger.workspace_cuts_us()
            + sum(map(self.offloader.round_trip_us, sorted(self.offloader.stalling)))
        )

    # Measuring live bytes

    def measured(self) -> Measured:
        """Return the program with the decisions of the ledger, and the excess bytes of each region.

        The excess of a region includes the recomputations before it.
        """
        measured = self.measure(self.ledger.decisions(), self.ledger.workspace_cuts)
        self.ledger.measured()
        return measured

    def measure(self, decisions: Decisions, workspace_cuts: Mapping[int, WorkspaceCut]) -> Measured:
        """Return the program with these decisions, and the excess bytes of each region."""
        rewritten = rewrite(self.draft, self.regions, decisions, self._links, self.fused_remat)
        draft = with_aliases(rewritten.draft, rewritten.draft.train, self._in_place_operands)
        self.work += len(draft.train.launches)
        live = live_of(draft.train, draft.buffers, frozenset(draft.persistent)) + self._persistent_bytes
        if workspace_cuts:
            less = {self._operations(region): cut.freed_bytes for region, cut in workspace_cuts.items()}
            live -= np.array([less.get(launch.operations, 0) for launch in draft.train.launches])
        excess_bytes = np.full(len(self.regions) + 1, -self.available_bytes, np.int64)
        np.maximum.at(excess_bytes, np.array(rewritten.position), live - self.available_bytes)
        offloader = self.offloader
        return Residency(
            draft,
            decisions,
            int(live.max()),
            offloader.offloaded_share,
            offloader.peak,
            frozenset(offloader.stalling),
            tuple(sorted(workspace_cuts.items())),
            self.ledger.workspace_cuts_us() if workspace_cuts else 0.0,
            self.least_bytes,
        ), excess_bytes

    def _operations(self, region: int) -> tuple[str, ...]:
        return self.draft.train.launches[self.regions[region].start].operations

    @cached_property
    def least_bytes(self) -> int:
        """A lower bound of the peak live bytes under any decisions."""
        saved_bytes: dict[tuple[str, ...], int] = {}
        for region, points in enumerate(self._smaller_workspaces):
            if points:
                least_bytes = min(workspace_bytes for workspace_bytes, _ in points)
                saved_bytes[self._operations(region)] = self._all_scratch_bytes(region) - least_bytes
        replaceable = {launch.reductions for launch in self.fused_remat.values()}
        return operand_peak_bytes(self.draft, self.regions, self._in_place_operands, saved_bytes, replaceable)

    # Freeing bytes

    def relieve(self, excess_bytes: NDArray[np.int64]) -> bool:
        """Free bytes, by the ledger, at every region that exceeds the arena; return whether that was possible."""
        done = False
        hopeless = np.zeros(len(excess_bytes), bool)
        while True:
            taken = np.where(hopeless, NOTHING_BYTES, excess_bytes + self.ledger.delta_bytes)
            worst = int(np.argmax(taken))
            if taken[worst] <= 0 or self.recompute_too_long():
                return done
            if self._relieve_at(worst, excess_bytes):
                done = True
            if excess_bytes[worst] + self.ledger.delta_at(worst) > 0:
                hopeless[worst] = True

    def _relieve_at(self, position: int, excess_bytes: NDArray[np.int64]) -> bool:
        ledger = self.ledger
        # A chain takes longest to price. So gaps enter the heap by a lower bound of their price, and are priced when
        # they are at the top.
        heap = self._least_prices(position)
        heapq.heapify(heap)
        done = False
        while heap and excess_bytes[position] + ledger.delta_at(position) > 0 and not self.recompute_too_long():
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
            lacking_bytes = int(excess_bytes[position]) + ledger.delta_at(position)
            if self._cut_workspace(position, lacking_bytes, price * max(ledger.size_bytes[buffer], lacking_bytes)):
                return True
            self._apply(gap)
            done = True
        lacking_bytes = int(excess_bytes[position]) + ledger.delta_at(position)
        return (lacking_bytes > 0 and self._cut_workspace(position, lacking_bytes, math.inf)) or done

    def _cut_workspace(self, position: int, lacking_bytes: int, most_us: float) -> bool:
        """Reduce the workspace of a region by `lacking_bytes`, if that takes no longer than `most_us`.

        `most_us` is the price of another decision.
        """
        if position >= len(self.regions) or not self._smaller_workspaces[position]:
            return False
        ledger = self.ledger
        current = ledger.workspace_cuts.get(position, WorkspaceCut(0, 0.0))
        all_bytes = self._all_scratch_bytes(position)
        most_bytes = all_bytes - current.freed_bytes - lacking_bytes
        fitting = [point for point in self._smaller_workspaces[position] if point[0] <= most_bytes]
        if not fitting:
            return False
        workspace_bytes, time_us = max(fitting)
        more_us = max(0.0, time_us - self.regions[position].time_us)
        if (more_us - current.more_us) * ledger.times(position) * self.price_perturbations.get(
            -1 - position, 1.0
        ) > most_us:
            return False
        ledger.cut_workspace(position, WorkspaceCut(all_bytes - workspace_bytes, more_us))
        return True

    def _all_scratch_bytes(self, region: int) -> int:
        """Return the workspace of a region as selected."""
        cut = self.ledger.workspace_cuts.get(region)
        return self.ledger.scratch_bytes(region) + (cut.freed_bytes if cut else 0)

    def forbid_at(self, position: int) -> bool:
        """Forbid the largest recomputation before a region; return False if there is none.

        This is for values that together exceed the available bytes there: the largest has to be kept or offloaded.
        """
        ledger = self.ledger
        candidates = [b for b in ledger.recomputed_at(position) if (b, position) not in self.forbidden]
        if not candidates:
            return False
        largest = max(candidates, key=lambda b: (ledger.operand_bytes(b), b))
        self.forbidden.add((largest, position))
        ledger.drop_recompute(largest, position)
        return True

    def _price(self, gap: Gap) -> float:
        """Return the microseconds per byte of recomputing or offloading over a gap, whichever is cheaper."""
        self.work += effort.PRICE_WORK
        return self._per_byte(gap.buffer, min(self._recompute_us(gap), self._stall_us(gap)))

    def _least_prices(self, position: int) -> list[tuple[float, int, int]]:
        """Return the gaps over a region: a lower bound of `_price`, the value, and where the gap ends."""
        prices: list[tuple[float, int, int]] = []
        price_perturbations, sizes = self.price_perturbations, self.ledger.size_bytes
        for buffer, before, time_us in self.ledger.gaps(position):
            if self.techniques.offload > 0:
                time_us = min(time_us, self._copies_us(buffer))
            prices.append((time_us * price_perturbations.get(buffer, 1.0) / sizes[buffer], buffer, before))
        return prices

    def _per_byte(self, buffer: int, time_us: float) -> float:
        return time_us * self.price_perturbations.get(buffer, 1.0) / self.ledger.size_bytes[buffer]

    def _apply(self, gap: Gap) -> None:
        if self._recompute_us(gap) <= self._stall_us(gap):
            self.ledger.recompute_chain(gap.buffer, gap.before)
        else:
            self.offloader.stalling.add(gap.buffer)
            self.ledger.offload(gap.buffer, gap.after + 1, gap.before, self.offloader.fastest(gap.buffer))

    def _recompute_us(self, gap: Gap) -> float:
        if not self.techniques.recompute or (gap.buffer, gap.before) in self.forbidden:
            return math.inf
        return self.ledger.chain(gap.buffer, gap.before)[0]

    def _stall_us(self, gap: Gap) -> float:
        """Return the cost of an offload that kernels wait for.

        Short copies are used only where nothing else is possible.
        """
        copies_us = self._copies_us(gap.buffer)
        if not self.offloader.worth_copying(gap.buffer) and self._recompute_us(gap) < math.inf:
            return math.inf
        return copies_us

    def _copies_us(self, buffer: int) -> float:
        """Return the time of an offload's copies, both ways, by the fastest idle link with enough memory behind it."""
        if self.techniques.offload <= 0 or not self.techniques.stall or buffer in self.ledger.offloads:
            return math.inf
        space = self.offloader.fastest(buffer)
        return math.inf if space is None else self.offloader.round_trip_us(buffer, space)

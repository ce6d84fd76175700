"""Variants of a step that fit the available bytes, and their placement.

Workspace and kept values compete for the same bytes. So decisions are made under several limits of workspace. In the
variants that fit, each operation then gets the workspace that is free when it runs, and the fastest step that can be
placed wins.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mbc.hardware.streams import Space, aligned
from mbc.ops.fused import kind_of, names_of
from mbc.optimize import effort
from mbc.optimize.placement.assign_addresses import Placed, assign_addresses
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.draft_state import Points, RematState, RematTask, Residency
from mbc.optimize.remat.fused_remat import FusedRematLaunches, defer_readers, fused_remat_launches
from mbc.optimize.remat.greedy import choose_residency
from mbc.optimize.remat.remat_without_statistics import remat_without_statistics
from mbc.optimize.schedule.coalesce_waits import coalesce_waits
from mbc.optimize.schedule.contention import contention
from mbc.optimize.schedule.cross_stream_liveness import data_waits_only
from mbc.optimize.schedule.depth_first_micro_batches import divided_operations
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.liveness import owners
from mbc.optimize.schedule.regions import Region, regions_of
from mbc.optimize.search.reclaim_workspace import Decided
from mbc.optimize.search.solution import Problem, Solution, scheduled_draft
from mbc.optimize.selection.select import Choices
from mbc.optimize.selection.selector import Selector


@dataclass(frozen=True)
class Undecided:
    """A step before any decision, under one limit of workspace.

    Attributes:
        problem: The step and its available bytes.
        choices: Kernels, layouts and divisions.
        techniques: Techniques that may be used.
        divided: Operations in depth-first groups, which keep their division.
    """

    problem: Problem
    choices: Choices
    techniques: AllowedTechniques
    divided: Collection[str]

    @cached_property
    def draft(self) -> Draft:
        """Launches and buffers."""
        return scheduled_draft(self.problem, self.choices, self.techniques, self.problem.available_bytes)

    @property
    def least_bytes(self) -> int:
        """A lower bound of the step's live bytes under any decisions."""
        return RematState(self.task(self.problem.available_bytes)).least_bytes

    @cached_property
    def least_us(self) -> float:
        """Time of the step where launches wait for data only, not for memory; decisions add launches."""
        table, buffers = self.problem.table, self.draft.buffers
        program = data_waits_only(self.draft.train, buffers, owners(buffers))
        return coalesce_waits(program, contention(program, table.graph, buffers, table.device))[1]

    def searched(self, task: RematTask, work: int, start: Residency | None = None) -> _Variant:
        """Return the step with the decisions of `choose_residency`."""
        residency = choose_residency(task, work, start)
        self.problem.spent.work += residency.work
        return _Variant(self, residency)

    def quickly_searched(self, known_us: float) -> _Variant:
        """Return the step after a quick search; a step that takes at least `known_us` is abandoned."""
        return self.searched(self.task(self.problem.available_bytes, known_us), effort.QUICK_SEARCH_WORK)

    def task(self, available_bytes: int, known_us: float = math.inf) -> RematTask:
        """Return the task to fit the step into `available_bytes`."""
        table, draft = self.problem.table, self.draft
        taken_bytes: Counter[Space] = Counter()
        for state in draft.persistent:
            taken_bytes[draft.buffers[state].space] += aligned(draft.buffers[state].size_bytes)
        return RematTask(
            table.graph,
            draft,
            table.device.links,
            self.techniques.less(taken_bytes),
            available_bytes,
            known_us,
            groups=(
                *self.choices.train,
                *self.choices.infer,
                *(remat.operation for remat in self.problem.selector.fusion.fused_remats),
            ),
            points=self._points,
            fused_remat=self._fused_remat,
            regions=self._regions,
        )

    @cached_property
    def _regions(self) -> tuple[Region, ...]:
        table, draft = self.problem.table, self.draft
        regions = regions_of(table.graph, draft, draft.train)
        return remat_without_statistics(table, draft, regions, self.choices.train)

    @cached_property
    def _fused_remat(self) -> FusedRematLaunches:
        return fused_remat_launches(self.problem.selector.fusion, self.draft, self._regions, self.choices.train)

    @cached_property
    def _points(self) -> Points:
        """Times with less workspace, in the same layouts, of operations that are not in depth-first groups."""
        # Operations that other launches recompute keep their kernels: the two must match bit by bit.
        recomputed_inside = {region for region, _ in self._fused_remat}.union(
            i for i, region in enumerate(self._regions) if region.remat_launch is not None
        )
        kept = {self.draft.train.launches[self._regions[i].start].operations for i in recomputed_inside}
        points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        for operation in self.choices.train:
            name = operation.name
            # A horizontally fused operation has no limit: it needs no workspace.
            if kind_of(operation).view or name in self.divided or name not in self.problem.workspace_limits:
                continue
            choice = self.choices.operations[name]
            front = self.problem.table.fronts(operation)[choice.layouts]
            less = [point for point in front if point.workspace_bytes < choice.point.workspace_bytes]
            if less and names_of(operation) not in kept:
                points[names_of(operation)] = [(aligned(point.workspace_bytes), point.time_us) for point in less]
        return points


@dataclass(frozen=True)
class _Variant:
    """A step with decisions under one limit of workspace."""

    step: Undecided
    residency: Residency

    @cached_property
    def time_us(self) -> float:
        """Estimated time of the step, computed when it is first read: most variants that do not fit never need it."""
        return _step_us(self.residency.draft, self.step.problem.selector) + self.residency.workspace_cuts_us

    def improved(self, available_bytes: int) -> _Variant:
        """Return the variant after more rounds of local search, in as many bytes or fewer."""
        searched: dict[object, _Variant] = {}  # by the decisions that a search resumes from: it often ends there

        def search_from(start: Residency | None) -> _Variant:
            resumed = start.resumed if start is not None else None
            if resumed not in searched:
                searched[resumed] = self.searched(available_bytes, start)
            return searched[resumed]

        improved = search_from(self.residency)
        if improved.residency.live_bytes > available_bytes:
            improved = search_from(None)
        for _ in range(effort.MAX_REPEATS):
            before, improved = improved, search_from(improved.residency)
            if improved.time_us > (1 - effort.REPEAT_GAIN) * before.time_us:
                break
        return improved

    def searched(self, available_bytes: int, start: Residency | None) -> _Variant:
        """Return the variant after a thorough local search that resumes from `start`."""
        return self.step.searched(self.step.task(available_bytes), effort.THOROUGH_SEARCH_WORK, start)


def placed_variants(unlimited: Undecided, known_us: float, defer_reads: bool) -> Iterator[Solution]:
    """Yield variants of the step with addresses, the most promising first.

    Where a placement exceeds the available bytes, the variant is tried again for fewer.

    Args:
        unlimited: The step before any decision, with as much workspace as it likes.
        known_us: Time of the best step so far; a step that takes at least as long is abandoned.
        defer_reads: Whether readers of a value that another launch could recompute come after that launch
            (`mbc.optimize.remat.fused_remat`).
    """
    problem = unlimited.problem
    available_bytes = problem.available_bytes
    searched: list[_Variant] = []  # thoroughly
    variants = _variants(unlimited, known_us, defer_reads)
    fewest = effort.THOROUGH_MIN_ROUNDS
    thorough = bool(variants) and fewest * len(variants[0].step.draft.train.launches) <= effort.THOROUGH_SEARCH_WORK
    if (
        thorough
        and math.isinf(known_us)
        and all(variant.residency.live_bytes > available_bytes for variant in variants)
    ):
        nearest = sorted(variants, key=lambda variant: variant.residency.live_bytes)[: effort.MAX_THOROUGH]
        nearest = [
            variant
            for variant in nearest
            if variant.residency.live_bytes <= effort.REACHABLE_PEAK * available_bytes
            and variant.residency.least_bytes <= available_bytes
        ]
        searched = list(_nearer(problem, nearest))
        variants += searched
    fitting = [variant for variant in variants if variant.residency.live_bytes <= available_bytes]
    if not fitting:
        if variants:
            smallest = min(variants, key=lambda variant: variant.residency.live_bytes).residency.draft
            yield Solution(smallest, assign_addresses(smallest, thorough=False), problem.selector)
        return
    # Variants are placed fastest first; a variant whose placement exceeds the available bytes is tried again for fewer.
    promising = _distinct(fitting)
    if thorough:
        most_us = effort.THOROUGH_WITHIN * min(promising[0].time_us, known_us)
        near = [variant for variant in promising if variant.time_us <= most_us][: effort.MAX_THOROUGH]
        improved = [one if any(one is other for other in searched) else one.improved(available_bytes) for one in near]
        promising = _distinct((*improved, *promising[len(near) :]))
    tried = [(variant.time_us, number, 0, variant) for number, variant in enumerate(promising)]
    heapq.heapify(tried)
    best_us = known_us
    longer = 1.0  # factor on times: where addresses are tight, kernels wait longer for copies than predicted
    affordable = effort.PLACEMENTS_WORK // len(fitting[0].residency.draft.train.launches)
    most_placed = min(effort.MAX_PLACEMENTS, max(effort.MIN_PLACEMENTS, affordable))
    last = len(fitting) + most_placed
    for number in range(len(fitting), last):
        if not tried or longer * tried[0][0] >= best_us or number > last:
            return
        _, _, spared_bytes, variant = heapq.heappop(tried)
        step = variant.step
        solution, as_fast = Decided(problem, variant.residency.draft, step.choices, step.divided).placed(spared_bytes)
        yield solution
        lacking_bytes = solution.placed.arena_bytes - available_bytes
        if lacking_bytes <= 0:
            last = min(last, number + effort.PLACEMENTS_AFTER_FIT)
        if lacking_bytes <= 0 and solution.step_us < best_us:
            best_us = solution.step_us
            longer = max(1.0, best_us / variant.time_us) if as_fast else longer
        if as_fast:
            continue
        spared_bytes = max(
            2 * spared_bytes, int(effort.SPARED_FACTOR * lacking_bytes), int(effort.MIN_SPARED_SHARE * available_bytes)
        )
        if spared_bytes > effort.MAX_SPARED_SHARE * available_bytes:
            continue
        variant = variant.improved(available_bytes - spared_bytes)
        if variant.residency.live_bytes <= available_bytes - spared_bytes:
            heapq.heappush(tried, ((1 - effort.RETRY_BONUS) * variant.time_us, number, spared_bytes, variant))


def undecided(problem: Problem, techniques: AllowedTechniques, workspace_bytes: int) -> Undecided:
    """Return the step before any decision, where no operation has more workspace than `workspace_bytes`."""
    table = problem.table
    limits = problem.workspace_limits
    if techniques.division is not None or workspace_bytes < problem.most_workspace_bytes:
        limits = {name: min(limit, workspace_bytes) for name, limit in limits.items()}
    choices = problem.choose(limits)
    divided: Mapping[str, int] = {}
    if techniques.division is not None:
        operations = (*choices.train, *choices.infer)
        divided = divided_operations(table, emit_launches(table, choices), operations, techniques.division)
        choices = problem.choose(limits, divided)
    return Undecided(problem, choices, techniques, divided)


def _distinct(variants: Sequence[_Variant]) -> Sequence[_Variant]:
    """Return the fastest variant for each combination of decisions and layouts.

    Other variants differ in workspace, which is chosen again.
    """
    distinct: dict[object, _Variant] = {}
    for variant in sorted(variants, key=lambda variant: variant.time_us):
        layouts = tuple(buffer.layout for buffer in variant.step.draft.buffers if buffer.value is not None)
        distinct.setdefault((variant.residency.decisions, layouts), variant)
    return list(distinct.values())


def _variants(unlimited: Undecided, known_us: float, defer_reads: bool) -> list[_Variant]:
    """Return the step fitted under several limits of workspace.

    Under the best of them, less is offloaded as well. Where kernels wait for copies, only recomputation frees what
    copies cannot free in time.
    """
    problem, techniques = unlimited.problem, unlimited.techniques
    available_bytes = problem.available_bytes
    seen: set[tuple[float, ...]] = set()
    variants: list[_Variant] = []
    left, best_us, worse = effort.VARIANTS_WORK, known_us, 0
    parts: deque[float] = deque(effort.WORKSPACE_SHARES)
    while parts:
        if variants and math.isinf(best_us) and problem.exhausted:
            parts = deque(list(parts)[-1:])  # the least workspace is likeliest to fit
        part = parts.popleft()
        limit_bytes = int(part * available_bytes)
        step = undecided(problem, techniques, limit_bytes)
        choices = step.choices
        if choices is unlimited.choices:
            step = unlimited  # its draft may be known
        points = tuple(float(c.point.workspace_bytes) for c in choices.operations.values())
        if points in seen or choices.train_us >= best_us:
            continue
        seen.add(points)
        deferred = defer_readers(problem.selector.fusion, choices, available_bytes) if defer_reads else choices
        if deferred is not choices:
            step = replace(step, choices=deferred)
        variants.append(step.quickly_searched(best_us))
        left -= len(step.draft.train.launches)
        better = variants[-1].residency.live_bytes <= available_bytes and variants[-1].time_us < best_us
        if better:
            best_us = variants[-1].time_us
        worse = 0 if better else worse + 1
        if math.isfinite(best_us) and (left < 0 or worse > 1):
            break
        live_bytes = variants[-1].residency.live_bytes
        if math.isfinite(known_us) and live_bytes > effort.GIVE_UP_PEAK * available_bytes:
            return variants
        if math.isinf(best_us) and live_bytes - limit_bytes > effort.GIVE_UP_PEAK * available_bytes:
            parts = deque(list(parts)[-1:])  # the least workspace may need fewer conversions, too
    if not techniques.recompute or left <= 0:
        return variants
    near = [variant for variant in variants if variant.residency.live_bytes <= effort.REACHABLE_PEAK * available_bytes]
    for variant in sorted(near, key=lambda variant: (variant.residency.live_bytes > available_bytes, variant.time_us))[
        :2
    ]:
        if variant.residency.least_bytes > available_bytes or (math.isinf(best_us) and problem.exhausted):
            continue
        # A share above what the link can copy changes nothing.
        most = min(variant.residency.offloaded_share, techniques.offload)
        trials = [replace(techniques, offload=part) for part in effort.OFFLOAD_SHARES if part < most]
        if variant.residency.stalling:
            trials.append(replace(techniques, stall=False))
        for trial in trials:
            if left > 0:
                here = replace(variant.step, techniques=trial)
                variants.append(here.quickly_searched(best_us))
                left -= len(here.draft.train.launches)
    return variants


def _step_us(draft: Draft, selector: Selector) -> float:
    """Return the estimated time of a step. Waits between streams depend on addresses; a single stream has none."""
    several = len({launch.stream for launch in draft.train.launches}) > 1
    placed = assign_addresses(draft, thorough=False) if several else Placed((), 0, 0, 0)
    return Solution(draft, placed, selector).step_us


def _nearer(problem: Problem, nearest: Sequence[_Variant]) -> Iterator[_Variant]:
    """Yield variants that do not fit, after more rounds of local search.

    The variants are similar. So if these rounds free few of the missing bytes of one variant, further rounds do not
    help, and the other variants are not searched.
    """
    available_bytes = problem.available_bytes
    for variant in nearest:
        if problem.exhausted:
            return
        searched = variant.searched(available_bytes, variant.residency)
        lacking_bytes, left_bytes = (v.residency.live_bytes - available_bytes for v in (variant, searched))
        if left_bytes > max(effort.HOPELESS_LACK * lacking_bytes, effort.NEAR_FIT_SHARE * available_bytes):
            yield searched
            return
        improved = searched.improved(available_bytes)
        fits = improved.residency.live_bytes <= available_bytes
        yield improved if fits else min(searched, improved, key=lambda candidate: candidate.residency.live_bytes)

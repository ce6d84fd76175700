"""The only loop of the compiler: select, emit, place.

Where the result exceeds the budget, kernels are selected again within the bytes that are free when each operation runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.errors import BudgetError
from mbc.hardware.streams import Stream
from mbc.kernels.nccl import latency_us
from mbc.optimize import effort
from mbc.optimize.bounds.arena_bytes import LeastArena, least_arena
from mbc.optimize.bounds.budget_lp import budget_bound_us
from mbc.optimize.bounds.critical_path import critical_path_us
from mbc.optimize.bounds.infeasible import cannot_fit, cannot_start, is_hopeless, not_found
from mbc.optimize.candidates.micro_batch import check_micro_batch
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Fusion, plain
from mbc.optimize.placement.assign_addresses import assign_addresses, check_outside
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.optimizer_offload import movable_states
from mbc.optimize.schedule.choose_buckets import Buckets, choose_buckets
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.search.assemble_plan import assemble_plan
from mbc.optimize.search.concurrent_stream import use_concurrent_stream
from mbc.optimize.search.fit_budget import crowds_arena, fit, fit_again, movable_bytes
from mbc.optimize.search.limits import Limits as Limits
from mbc.optimize.search.overhead import reserved_bytes, tables_bytes, usual_bytes
from mbc.optimize.search.select_relu_masks import masks_of_kept, with_relu_masks
from mbc.optimize.search.smallest_step import smallest_step
from mbc.optimize.search.solution import Problem, Solution, best_within, free_bytes
from mbc.optimize.selection.selector import Selector
from mbc.options import UNLIMITED_BYTES
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.model import Bounds, Plan
from mbc.plan.prefetch import ahead_bytes
from mbc.plan.verify import verify_plan
from mbc.profile.measured_workspace import measured_workspace
from mbc.units import show_enough


def search(table: CandidateTable, limits: Limits) -> Plan:
    """Return the fastest plan that the search finds within the limits.

    An operation may use the bytes that are free when it runs as workspace, so every operation takes its own best
    candidate within them.

    Args:
        table: Candidates of the graph.
        limits: The budget, and all other limits.

    Raises:
        MbcError: MBC201 if a limit is too small for an operation, MBC205 for impossible micro-batches, MBC210 if
            the plan exceeds a limit outside the arena.
        BudgetError: MBC203 if no plan of this graph can fit, MBC204 if the search finds none.
    """
    check_micro_batch(table)
    this = Search.of(table, limits)
    if this.least.total_bytes + this.usual_bytes > limits.budget_bytes:
        error = this.refusal()
        raise error
    solution = this.refined(this.within_budget())
    if this.needed_bytes(solution) > limits.budget_bytes:
        smallest = this.smallest(solution)
        if this.needed_bytes(smallest) > limits.budget_bytes:
            error = this.not_found(smallest, is_certain=smallest is not solution)
            raise error
        solution = this.refined(smallest)
    check_outside(solution.placed, limits.host_bytes, limits.peer_bytes, table.graph.name)
    overhead_bytes = this.overhead_bytes(solution.draft)
    return assemble_plan(solution, this.bounds(solution), overhead_bytes, limits)


def may_fit(table: CandidateTable, limits: Limits) -> bool:
    """Return whether a plan may fit, by its shapes alone. If not, `search` raises MBC203 with any profile.

    Args:
        table: Candidates of the graph.
        limits: The budget, and all other limits.
    """
    techniques = limits.techniques(table.rules)
    masked = table.of(mask_relus(table.graph, residual_relus(table.graph)))
    variants = Fusion.of(table), Fusion.of(masked)
    least = least_arena(variants, techniques.outside_bytes, techniques.split, workspaces=False)
    return least.total_bytes + usual_bytes(table.device, table.graph.precision) <= limits.budget_bytes


@dataclass(frozen=True, eq=False)
class Search:
    """The search for one plan, and all that its steps share.

    Attributes:
        limits: The budget, and all other limits.
        techniques: Techniques that may be used where not all values fit.
        least: Lower bound of the arena.
        unmasked: Choices of the step without ReLU bit masks.
        masked: Choices of the step with masks where they save time; None: nowhere.
        buckets: Gradient buckets of the fastest step, which all steps have; None if there is one rank.
        usual_bytes: Bytes that the GPU's context and libraries take at least.
    """

    limits: Limits
    techniques: AllowedTechniques
    least: LeastArena
    unmasked: Selector
    masked: Selector | None
    buckets: Buckets | None
    usual_bytes: int

    @staticmethod
    def of(table: CandidateTable, limits: Limits) -> Search:
        """Return the search for a plan of a table's graph."""
        techniques = limits.techniques(table.rules)
        fusion = Fusion.of(table)
        unmasked = Selector(with_bitwise_remat(fusion) if techniques.recompute else fusion)
        masked = with_relu_masks(unmasked)
        fusions = [selector.fusion for selector in (unmasked, masked) if selector is not None]
        least = least_arena(fusions, techniques.outside_bytes, techniques.split)
        several = table.graph.ranks is not None
        buckets = choose_buckets(table, emit_launches(unmasked.table, unmasked.unlimited)) if several else None
        usual = usual_bytes(table.device, table.graph.precision)
        return Search(limits, techniques, least, unmasked, masked, buckets, usual)

    @property
    def available_bytes(self) -> int:
        """Upper bound of the arena; steps of many launches reserve more of the budget."""
        return self.limits.budget_bytes - self.usual_bytes

    def refusal(self) -> BudgetError:
        """Return error MBC203, for a budget below the lower bound of all plans.

        Its remedy also names the size of the plan that saves no memory, if the GPU has so much.
        """
        table, budget_bytes = self.unmasked.table, self.limits.budget_bytes
        if self.usual_bytes < budget_bytes and self.least.start_bytes > self.least.operand_bytes:
            error = cannot_start(table, self.least, self.usual_bytes, budget_bytes)
        else:
            error = cannot_fit(table, self.least, self.techniques, self.usual_bytes, budget_bytes)
        if error.floor_bytes > table.device.memory_bytes:  # no budget of this GPU has a plan
            return error
        enough_bytes = self.needed_bytes(_compacted(self.solve(self.unmasked, UNLIMITED_BYTES, math.inf)))
        if enough_bytes > table.device.memory_bytes:
            return error
        return replace(error, remedy=f"{error.remedy}; a plan that saves no memory fits {show_enough(enough_bytes)}")

    def not_found(self, smallest: Solution, is_certain: bool) -> BudgetError:
        """Return error MBC204, which recommends the size of a step, so that its plan has to be valid.

        `is_certain`: budgets of that size are never refused.
        """
        check_outside(smallest.placed, self.limits.host_bytes, self.limits.peer_bytes, smallest.table.graph.name)
        bounds = replace(self.arena_bounds(smallest), fastest_us=smallest.selector.unlimited.train_us)
        limits = replace(self.limits, budget_bytes=self.needed_bytes(smallest))
        plan = assemble_plan(smallest, bounds, self.overhead_bytes(smallest.draft), limits)
        verify_plan(plan, measured_workspace(smallest.table.profile))
        error = not_found(plan, self.least.total_bytes + self.usual_bytes, self.limits.budget_bytes)
        return replace(error, is_certain=is_certain, slowest_us=self.limits.slowest_us)

    def smallest(self, solution: Solution) -> Solution:
        """Return the smaller of a step that does not fit and `smallest_step`, which is the same for all budgets.

        A limit on a step's time excludes the latter.
        """
        if self.limits.slowest_us < math.inf:
            return solution
        smallest = smallest_step(self.unmasked, self.limits, self.techniques, self.buckets)
        return min((one for one in (solution, smallest) if one is not None), key=self.needed_bytes)

    def needed_bytes(self, solution: Solution) -> int:
        """Return the smallest budget that a step fits."""
        return solution.placed.arena_bytes + self.overhead_bytes(solution.draft)

    def overhead_bytes(self, draft: Draft) -> int:
        """Return the bytes that the GPU's context and libraries take beside a step."""
        table = self.unmasked.table
        return reserved_bytes(table.device, table.graph.precision, draft)

    def within_budget(self) -> Solution:
        """Return the fastest step within the budget, whose overhead depends on the launches of the step.

        Where a step has more launches than expected, a step is searched within fewer bytes, by the same techniques if
        one fits.
        """
        available_bytes = self.available_bytes

        def beside(more_bytes: int) -> int:
            return available_bytes - int(more_bytes * effort.REFIT_MARGIN)

        solution = self.within(beside(self._expected_more_bytes()))
        for _ in range(effort.MAX_REFITS):
            more_bytes = self.overhead_bytes(solution.draft) - self.usual_bytes
            if not available_bytes - more_bytes < solution.placed.arena_bytes <= available_bytes:
                break
            solution = fit_again(solution, beside(more_bytes)) or self.within(beside(more_bytes))
        return solution

    def _expected_more_bytes(self) -> int:
        """Return the bytes beside the arena, above those of every plan, that a step within the budget probably takes.

        A step that keeps everything has fewer launches than most plans within a budget, and offloads nothing. Where
        the optimizer's states are offloaded first, each needs two copies and an update of its own.
        """
        table, available_bytes = self.unmasked.table, self.available_bytes
        kept = emit_launches(table, self.unmasked.unlimited)
        lacking_bytes = -min(free_bytes(kept, available_bytes).values())
        mapped_bytes = tables_bytes(min(lacking_bytes, self.techniques.outside_bytes))
        crowding = crowds_arena(movable_bytes(table, self.techniques), available_bytes)
        launches = 3 * len(movable_states(table.graph, kept)) if crowding and lacking_bytes > 0 else 0
        return reserved_bytes(table.device, table.graph.precision, kept, launches) - self.usual_bytes + mapped_bytes

    def within(self, available_bytes: int) -> Solution:
        """Return the faster of two training steps: one without ReLU bit masks, one with them.

        The step with masks is searched only where masks could make it much faster. It uses them for the ReLUs whose
        output the first step keeps.

        Args:
            available_bytes: Bytes of the arena that the step may use.
        """
        best = self.solve(self.unmasked, available_bytes, self.limits.slowest_us)
        fits, least_us = best.fits(available_bytes), self.unmasked.unlimited.train_us
        is_slow = fits and best.step_us * effort.SLOW_PROBE > self.limits.slowest_us
        if self.masked is None or is_slow or is_hopeless(best.placed.arena_bytes, available_bytes):
            return best
        gain = effort.RELU_MASKS_GAIN
        if fits and best.step_us > gain * least_us and least_us < gain * self.masked.unlimited.train_us:
            return best
        selector = masks_of_kept(self.unmasked, self.masked, best.draft)
        if selector is self.unmasked:  # the step keeps no output of such a ReLU
            return best
        masked = self.solve(selector, available_bytes, best.step_us if fits else self.limits.slowest_us)
        return best_within(available_bytes, (best, masked))

    def solve(self, selector: Selector, available_bytes: int, known_us: float) -> Solution:
        """Return a step with fusion groups. If there are none, or no step with them fits, return a step without fusion.

        If the step with them fits but is slow, and the network has few operations, return the faster of both steps. A
        step that takes at least `known_us` is abandoned.
        """
        table, held_bytes = selector.table, int(effort.HELD_SHARE * available_bytes)
        graph, groups = table.graph, selector.fastest_fused(self.limits.operation_bytes, held_bytes)
        workspaces, plain_workspaces = (self.limits.of_workspaces(table, p) for p in (groups, plain(graph)))
        fused = Problem(selector, workspaces, available_bytes, groups, buckets=self.buckets)
        unfused = Problem(selector, plain_workspaces, available_bytes, buckets=self.buckets)
        chosen = fused.choose(fused.workspace_limits)
        if (chosen.train, chosen.infer) == (graph.train, graph.infer):
            return fit(unfused, self.techniques, known_us)
        solution = fit(fused, self.techniques, known_us)
        if fused.fits(solution):
            # A step without fusion takes at least `unfused.fastest_us`: it is tried where the fused step is slower.
            if not unfused.tries_more([solution]):
                return solution
            known_us = min(known_us, solution.step_us)
        elif is_hopeless(solution.placed.arena_bytes, available_bytes):
            return solution
        return unfused.best((solution, fit(unfused, self.techniques, known_us, solution.placed.arena_bytes)))

    def refined(self, solution: Solution) -> Solution:
        """Return the step in fewer bytes, and with launches on the concurrent stream, where that costs no time."""
        draft, placed = solution.draft, solution.placed
        if self.needed_bytes(solution) > self.limits.budget_bytes:
            # The smallest arena of this step fits, or it is the budget that the error recommends.
            placed = min(placed, assign_addresses(draft, lowest=True), key=lambda p: p.arena_bytes)
            solution = replace(solution, placed=placed)
        if solution.copies:
            return solution
        solution = _compacted(solution)
        if "concurrent_stream" in self.limits.without:
            return solution
        return _with_concurrent_stream(solution, self.limits.budget_bytes - self.overhead_bytes(draft))

    def arena_bounds(self, solution: Solution) -> Bounds:
        """Return the lower bounds of the arena, without those of times."""
        return Bounds(self.least.total_bytes, self.least.operation.name, solution.placed.live_bytes, 0.0)

    def bounds(self, solution: Solution) -> Bounds:
        """Return the lower bounds of all plans with the bit masks of a solution."""
        selector, draft = solution.selector, solution.draft
        table, unlimited_us = selector.table, selector.unlimited.train_us
        # A serial step sums all gradients in one launch.
        summing_us = 0.0 if table.graph.ranks is None else latency_us(table.device, table.graph.ranks.size)
        nondeterministic_us = 0.0
        if table.rules.deterministic:
            nondeterministic_us = Selector.of(table.without_determinism()).unlimited.train_us + summing_us
        least_us = budget_bound_us(selector.fusion, self.techniques, self.available_bytes, unlimited_us)
        return replace(
            self.arena_bounds(solution),
            fastest_us=unlimited_us + summing_us,
            nondeterministic_us=nondeterministic_us,
            within_budget_us=least_us + summing_us,
            critical_path_us=critical_path_us(selector.fusion, draft.train, draft.buffers, unlimited_us + summing_us),
        )


def _compacted(solution: Solution) -> Solution:
    """Return a step without copies in fewer bytes: no stream waits for another, so addresses cost no time."""
    placed = solution.placed
    if placed.arena_bytes <= effort.PLACEMENT_GOOD_ENOUGH * placed.live_bytes:
        return solution
    return replace(solution, placed=min(placed, assign_addresses(solution.draft), key=lambda p: p.arena_bytes))


def _with_concurrent_stream(serial: Solution, available_bytes: int) -> Solution:
    """Return the step with launches on the concurrent stream, where that is faster.

    The bytes for prefetching inputs stay free, unless the step saves more time than prefetching.
    """
    table = serial.table
    inputs_bytes = ahead_bytes(table.graph, available_bytes - serial.placed.arena_bytes)
    concurrent = use_concurrent_stream(serial, available_bytes - inputs_bytes)
    if concurrent is not serial or not inputs_bytes:
        return concurrent
    concurrent = use_concurrent_stream(serial, available_bytes)
    saved_us = serial.step_us - concurrent.step_us
    return concurrent if saved_us > table.device.host_link.copy_us(inputs_bytes, Stream.TO_DEVICE) else serial

"""The only loop of the compiler: select, emit, place.

Where the result exceeds the budget, kernels are selected again within the bytes that are free when each operation runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from mbc.hardware.spec import unlisted_sheet
from mbc.hardware.streams import Stream
from mbc.kernels.nccl import latency_us
from mbc.optimize import effort
from mbc.optimize.bounds.arena_bytes import least_arena
from mbc.optimize.bounds.budget_lp import budget_bound_us
from mbc.optimize.bounds.critical_path import critical_path_us
from mbc.optimize.bounds.infeasible import cannot_fit, cannot_start, is_hopeless, not_found
from mbc.optimize.candidates.micro_batch import check_micro_batch
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Programs, plain
from mbc.optimize.placement.assign_addresses import assign_addresses, check_outside
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.schedule.emit_launches import emit_launches
from mbc.optimize.search.concurrent_stream import use_concurrent_stream
from mbc.optimize.search.fit_budget import fit
from mbc.optimize.search.overhead import reserved_bytes, usual_bytes
from mbc.optimize.search.predicted_times import predicted_times
from mbc.optimize.search.prediction_interval import Timing, similar_gpu
from mbc.optimize.search.select_relu_masks import masks_of_kept, with_relu_masks
from mbc.optimize.search.solution import NO_LIMIT_BYTES, Problem, Solution
from mbc.optimize.selection.fuse_by_layout import fastest_fused
from mbc.optimize.selection.select import Choices, check_limit, choose
from mbc.optimize.selection.workspace_division import divide_workspace
from mbc.options import Policy
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.model import Bounds, Buffer, Kernel, Plan, Predictions, Program, Target
from mbc.plan.prefetch import ahead_bytes
from mbc.plan.verify import verify_plan
from mbc.profile.measured_workspace import measured_workspace
from mbc.version import __version__


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits besides the budget.

    Attributes:
        operation_bytes: Workspace of one operation; None: no limit.
        total_bytes: Workspace of all operations of a program together; None: no limit.
        without: AllowedTechniques that are not used, of mbc.options.TECHNIQUES.
        host_bytes: Host memory that a plan may pin; None: no limit.
        peer_bytes: Memory of another GPU.
    """

    operation_bytes: int | None = None
    total_bytes: int | None = None
    without: frozenset[str] = frozenset()
    host_bytes: int | None = None
    peer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepVariant:
    """A variant of the step, with ReLU bit masks or without, and its choices without a limit."""

    table: CandidateTable
    unlimited: Choices

    @staticmethod
    def of(table: CandidateTable) -> StepVariant:
        """Return the variant of a table, with the fastest choices."""
        return StepVariant(table, choose(table, {}, programs=fastest_fused(table)))


def search(table: CandidateTable, limits: Limits, budget_bytes: int) -> Plan:
    """Return the fastest plan that the search finds within the budget.

    An operation may use the bytes that are free when it runs as workspace, so every operation takes its own best
    candidate within them.

    Args:
        table: Candidates of the graph.
        limits: Limits besides the budget.
        budget_bytes: Device memory that the plan may use, with the overhead.

    Raises:
        MbcError: MBC201 if a limit is too small for an operation, MBC205 for impossible micro-batches, MBC210 if
            the plan exceeds a limit outside the arena.
        BudgetError: MBC203 if no plan of this graph can fit, MBC204 if the search finds none.
    """
    check_micro_batch(table)
    device, precision = table.device, table.graph.precision
    usual = usual_bytes(device, precision)
    techniques = _techniques(table, limits)
    outside_bytes = techniques.outside_bytes
    table = with_bitwise_remat(table) if techniques.recompute else table
    masked = with_relu_masks(table)
    tables = (table,) if masked is table else (table, masked)
    least = least_arena(tables, outside_bytes, techniques.split)
    if least.total_bytes + usual > budget_bytes:
        error = cannot_fit(table, least, techniques, usual, budget_bytes)
        if usual < budget_bytes and least.start_bytes > least.operand_bytes:
            error = cannot_start(table, least, usual, budget_bytes)
        raise error
    variants = tuple(map(StepVariant.of, tables))
    available_bytes = budget_bytes - usual  # an upper bound: many launches reserve more
    # A step that keeps everything has fewer launches than most plans within a budget.
    more_bytes = reserved_bytes(device, precision, emit_launches(table, variants[0].unlimited)) - usual
    solution = _with_other_budgets(
        variants, limits, techniques, available_bytes - int(more_bytes * effort.REFIT_MARGIN)
    )
    for _ in range(effort.MAX_REFITS):
        more_bytes = reserved_bytes(device, precision, solution.draft) - usual
        if not available_bytes - more_bytes < solution.placed.arena_bytes <= available_bytes:
            break
        solution = _with_other_budgets(
            variants, limits, techniques, available_bytes - int(more_bytes * effort.REFIT_MARGIN)
        )
    overhead_bytes = reserved_bytes(device, precision, solution.draft)
    table, draft, placed = solution.table, solution.draft, solution.placed
    unlimited = StepVariant.of(table).unlimited  # with the bit masks of this step
    copies = solution.copies
    if not copies and placed.arena_bytes > effort.PLACEMENT_GOOD_ENOUGH * placed.live_bytes:
        # No stream waits for another, so addresses cost no time: place again, for the smallest arena.
        placed = min(placed, assign_addresses(draft), key=lambda p: p.arena_bytes)
    if not copies and "concurrent_stream" not in limits.without:
        solution = _with_concurrent_stream(Solution(draft, placed, table), budget_bytes - overhead_bytes)
        draft, placed = solution.draft, solution.placed
    check_outside(placed, limits.host_bytes, limits.peer_bytes, table.graph.name)
    needed_bytes = placed.arena_bytes + overhead_bytes
    if needed_bytes > budget_bytes:
        # The error recommends this plan's size as a budget, so the plan has to be valid.
        bounds = Bounds(least.total_bytes, least.operation.name, placed.live_bytes, unlimited.train_us)
        smallest = _plan(Solution(draft, placed, table), bounds, needed_bytes, overhead_bytes, limits)
        verify_plan(smallest, measured_workspace(table.profile))
        error = not_found(smallest, least.total_bytes + usual, budget_bytes)
        raise error
    # A serial step sums all gradients in one launch.
    summing_us = 0.0 if table.graph.ranks is None else latency_us(device, table.graph.ranks.size)
    fastest_us = unlimited.train_us + summing_us
    nondeterministic_us = (
        StepVariant.of(table.without_determinism()).unlimited.train_us + summing_us
        if table.rules.deterministic
        else 0.0
    )
    least_us = budget_bound_us(table, techniques, available_bytes, unlimited.train_us) + summing_us
    critical_us = critical_path_us(table, draft.train, draft.buffers, fastest_us)
    bounds = Bounds(
        least.total_bytes,
        least.operation.name,
        placed.live_bytes,
        fastest_us,
        nondeterministic_us,
        least_us,
        critical_us,
    )
    return _plan(Solution(draft, placed, table), bounds, budget_bytes, overhead_bytes, limits)


def may_fit(table: CandidateTable, limits: Limits, budget_bytes: int) -> bool:
    """Return whether a plan may fit, by its shapes alone. If not, `search` raises MBC203 with any profile.

    Args:
        table: Candidates of the graph.
        limits: Limits besides the budget.
        budget_bytes: Device memory that the plan may use, with the overhead.
    """
    techniques = _techniques(table, limits)
    masked = table.of(mask_relus(table.graph, residual_relus(table.graph)))
    least = least_arena((table, masked), techniques.outside_bytes, techniques.split, workspaces=False)
    return least.total_bytes + usual_bytes(table.device, table.graph.precision) <= budget_bytes


def _with_other_budgets(
    variants: Sequence[StepVariant], limits: Limits, techniques: AllowedTechniques, available_bytes: int
) -> Solution:
    """Return the fastest step for `available_bytes` and slightly smaller budgets.

    The smaller ones are tried where the step is much slower than without a limit: there the search is sensitive to
    small changes.
    """
    best, problem = (
        _with_or_without_masks(variants, limits, techniques, available_bytes),
        Problem(variants[0].table, {}, available_bytes),
    )
    for part in effort.NEARBY_BUDGETS:
        slow = best.step_us > effort.NEARBY_BUDGETS_SLOWDOWN * variants[0].unlimited.train_us and problem.fits(best)
        if not slow or len(best.draft.train.launches) > effort.NEARBY_BUDGETS_MAX_LAUNCHES:
            return best
        fewer_bytes = int(part * available_bytes)
        best = problem.best((best, _with_or_without_masks(variants, limits, techniques, fewer_bytes, best.step_us)))
    return best


def _with_or_without_masks(
    variants: Sequence[StepVariant],
    limits: Limits,
    techniques: AllowedTechniques,
    available_bytes: int,
    known_us: float = math.inf,
) -> Solution:
    """Return the faster of two training steps: one without ReLU bit masks, one with them.

    The step with masks is searched only where masks could make it much faster. It uses them for the ReLUs whose output
    the first step keeps.

    Args:
        variants: The step without masks, and with them if there are any.
        limits: Limits besides the budget.
        techniques: AllowedTechniques that may be used.
        available_bytes: Bytes of the arena that the step may use.
        known_us: Time of the best step so far; a step that takes at least as long is abandoned.
    """
    unmasked, *others = variants
    best, problem = (
        _solve(unmasked.table, limits, techniques, available_bytes, known_us),
        Problem(unmasked.table, {}, available_bytes),
    )
    fits, least_us = problem.fits(best), unmasked.unlimited.train_us
    if is_hopeless(best.placed.arena_bytes, available_bytes):
        return best
    for masked in others:
        if (
            fits
            and best.step_us > effort.RELU_MASKS_GAIN * least_us
            and least_us < effort.RELU_MASKS_GAIN * masked.unlimited.train_us
        ):
            continue
        table = masks_of_kept(unmasked.table, masked.table, best.draft)
        if table is unmasked.table:  # the step keeps no output of such a ReLU
            continue
        least_known_us = min(known_us, best.step_us) if fits else known_us
        best = problem.best((best, _solve(table, limits, techniques, available_bytes, least_known_us)))
    return best


def _solve(
    table: CandidateTable,
    limits: Limits,
    techniques: AllowedTechniques,
    available_bytes: int,
    known_us: float = math.inf,
) -> Solution:
    """Return a step with fusion groups. If there are none, or no step with them fits, return a step without fusion.

    A step that takes at least `known_us` is abandoned.
    """
    graph, groups = table.graph, fastest_fused(table, limits.operation_bytes)
    fused = Problem(table, _workspace_limits(table, limits, groups), available_bytes, groups)
    unfused = Problem(table, _workspace_limits(table, limits, plain(graph)), available_bytes)
    chosen = fused.choose(fused.workspace_limits)
    if (chosen.train, chosen.infer) == (graph.train, graph.infer):
        return fit(unfused, techniques, known_us)
    solution = fit(fused, techniques, known_us)
    enough = fused.fits(solution) or is_hopeless(solution.placed.arena_bytes, available_bytes)
    return solution if enough else unfused.best((solution, fit(unfused, techniques, known_us)))


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


def _techniques(table: CandidateTable, limits: Limits) -> AllowedTechniques:
    """Return the techniques that may be used where not all values fit."""
    host_bytes = NO_LIMIT_BYTES if limits.host_bytes is None else limits.host_bytes
    # Depth-first execution relies on recomputation in the backward pass.
    recompute = "recompute" not in limits.without
    split = recompute and table.rules.policy is not Policy.UNDIVIDED and not table.rules.micro_batch
    offload = 0.0 if "offload" in limits.without else 1.0
    return AllowedTechniques(recompute, offload, host_bytes, split, peer_bytes=limits.peer_bytes)


def _workspace_limits(table: CandidateTable, limits: Limits, programs: Programs) -> Mapping[str, int]:
    """Return the limit of each operation's workspace by name, independent of the bytes that are free."""
    most_bytes = NO_LIMIT_BYTES
    if limits.operation_bytes is not None:
        most_bytes = limits.operation_bytes
        check_limit(table, most_bytes)
    if "workspace" in limits.without:
        most_bytes = 0  # each operation then takes the smallest workspace
    graph = table.graph
    workspace_limits = {operation.name: most_bytes for operation in (*programs.train, *programs.infer)}
    if limits.total_bytes is not None:
        shares = dict(divide_workspace(table, programs.train, graph.inputs, limits.total_bytes))
        shares |= divide_workspace(table, programs.infer, graph.infer_inputs, limits.total_bytes)
        workspace_limits |= {name: min(part, workspace_limits[name]) for name, part in shares.items()}
    return workspace_limits


def _plan(solution: Solution, bounds: Bounds, budget_bytes: int, overhead_bytes: int, limits: Limits) -> Plan:
    table, draft, placed = solution.table, solution.draft, solution.placed
    device = table.device
    timed = solution.finished(draft.train), solution.finished(draft.infer)
    (train, _), (infer, _) = timed
    pinned = any(key == "engine" and value >= 0 for p in (train, infer) for key, value in _settings(p))
    cudnn = table.profile.cudnn if pinned and table.profile else 0
    return Plan(
        __version__,
        table.graph,
        Target(
            device.name,
            device.architecture,
            device.multiprocessors,
            device.memory_bytes,
            cudnn,
            _origin(table, draft.buffers, train, infer),
            unlisted_sheet(device),
        ),
        budget_bytes,
        draft.buffers,
        placed.offsets,
        train,
        infer,
        Predictions(
            **asdict(predicted_times(table, draft.buffers, *timed)),
            arena_bytes=placed.arena_bytes,
            overhead_bytes=overhead_bytes,
            overhead_measured=device.overhead_bytes > 0,
            host_bytes=placed.host_bytes,
            peer_bytes=placed.peer_bytes,
        ),
        bounds,
        limits.host_bytes,
        limits.peer_bytes,
    )


def _origin(table: CandidateTable, buffers: Sequence[Buffer], train: Program, infer: Program) -> str:
    """Return the origin of the times of both programs; empty if all are modelled."""
    if table.profile is None:
        return ""
    scaled_from = similar_gpu(train, Timing.of(table, buffers, table.graph.train)) or similar_gpu(
        infer, Timing.of(table, buffers, table.graph.infer)
    )
    return f"{table.profile.origin}{f'; some times are scaled from {scaled_from}' if scaled_from else ''}"


def _settings(program: Program) -> list[tuple[str, int]]:
    return [pair for launch in program.launches if isinstance(launch.work, Kernel) for pair in launch.work.settings]

"""The only loop of the compiler: select, emit, place; where the result misses the budget, select again with the bytes
that are free when each operation runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import mbc
from mbc.ir.transforms.relu_masks import mask_relus, residual_relus
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
from mbc.optimize.placement.assign_addresses import Placed, assign_addresses, check_outside
from mbc.optimize.remat.state import Techniques
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.search.concurrent_stream import use_concurrent_stream
from mbc.optimize.search.fit import fit
from mbc.optimize.search.overhead import reserved_bytes, usual_bytes
from mbc.optimize.search.predicted_times import predicted_times
from mbc.optimize.search.prediction_interval import similar_gpu
from mbc.optimize.search.relu_masks import masks_of_kept, with_relu_masks
from mbc.optimize.search.solution import NO_LIMIT_BYTES, Problem, Solution
from mbc.optimize.selection.fuse_by_layout import fastest_fused
from mbc.optimize.selection.select import Choices, check_limit, choose
from mbc.optimize.selection.workspace_division import divide_workspace
from mbc.options import Policy
from mbc.plan.model import Bounds, Buffer, Kernel, Plan, Predictions, Program, Stream, Target
from mbc.plan.prefetch import ahead_bytes
from mbc.plan.verify import verify_plan
from mbc.profile.measured_workspace import measured_workspace


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits besides the budget: workspace of one operation, and of all of a program together; host memory that a plan
    may pin (None: no limit), and memory of another GPU.

    `without`: techniques that are not used, of mbc.options.TECHNIQUES."""

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
        return StepVariant(table, choose(table, {}, programs=fastest_fused(table)))


def search(table: CandidateTable, limits: Limits, budget_bytes: int) -> Plan:
    """The fastest plan found within the budget.

    An operation may use the bytes that are free when it runs as workspace, so every operation takes its own best
    candidate within them. Raises MBC201 where a limit is too small for an operation, MBC203 where no plan of this graph
    can fit, MBC204 where none was found and MBC205 for micro-batches that cannot be.
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
        if usual < budget_bytes and least.start_bytes > least.operand_bytes:
            raise cannot_start(table, least, usual, budget_bytes)
        raise cannot_fit(table, least, usual, budget_bytes, outside_bytes, techniques.split)
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
        # Its size is recommended as a budget, so the plan has to be right.
        bounds = Bounds(least.total_bytes, least.operation.name, placed.live_bytes, unlimited.train_us)
        smallest = _plan(table, draft, placed, bounds, needed_bytes, overhead_bytes, limits)
        verify_plan(smallest, measured_workspace(table.profile))
        raise not_found(smallest, least.total_bytes + usual, budget_bytes)
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
    return _plan(table, draft, placed, bounds, budget_bytes, overhead_bytes, limits)


def may_fit(table: CandidateTable, limits: Limits, budget_bytes: int) -> bool:
    """Whether a plan may fit by its shapes alone. Where not, `search` raises MBC203 with any profile."""
    techniques = _techniques(table, limits)
    masked = table.of(mask_relus(table.graph, residual_relus(table.graph)))
    least = least_arena((table, masked), techniques.outside_bytes, techniques.split, workspaces=False)
    return least.total_bytes + usual_bytes(table.device, table.graph.precision) <= budget_bytes


def _with_other_budgets(
    variants: Sequence[StepVariant], limits: Limits, techniques: Techniques, available_bytes: int
) -> Solution:
    """The fastest of the steps found for `available_bytes` and, where that is much slower than without a limit, for
    slightly fewer: there the search is sensitive to small changes."""
    found, problem = (
        _with_or_without_masks(variants, limits, techniques, available_bytes),
        Problem(variants[0].table, {}, available_bytes),
    )
    for part in effort.NEARBY_BUDGETS:
        slow = found.step_us > effort.NEARBY_BUDGETS_SLOWDOWN * variants[0].unlimited.train_us and problem.fits(found)
        if not slow or len(found.draft.train.launches) > effort.NEARBY_BUDGETS_MAX_LAUNCHES:
            return found
        fewer_bytes = int(part * available_bytes)
        found = problem.best((found, _with_or_without_masks(variants, limits, techniques, fewer_bytes, found.step_us)))
    return found


def _with_or_without_masks(
    variants: Sequence[StepVariant],
    limits: Limits,
    techniques: Techniques,
    available_bytes: int,
    known_us: float = math.inf,
) -> Solution:
    """The faster of a step without ReLU bit masks and, where masks could make it much faster, one with them for those
    ReLUs whose output the first one keeps. Steps that take at least `known_us` are given up."""
    unmasked, *others = variants
    found, problem = (
        _solve(unmasked.table, limits, techniques, available_bytes, known_us),
        Problem(unmasked.table, {}, available_bytes),
    )
    fits, least_us = problem.fits(found), unmasked.unlimited.train_us
    if is_hopeless(found.placed.arena_bytes, available_bytes):
        return found
    for masked in others:
        if (
            fits
            and found.step_us > effort.RELU_MASKS_GAIN * least_us
            and least_us < effort.RELU_MASKS_GAIN * masked.unlimited.train_us
        ):
            continue
        table = masks_of_kept(unmasked.table, masked.table, found.draft)
        if table is unmasked.table:  # no such output is kept
            continue
        least_known_us = min(known_us, found.step_us) if fits else known_us
        found = problem.best((found, _solve(table, limits, techniques, available_bytes, least_known_us)))
    return found


def _solve(
    table: CandidateTable, limits: Limits, techniques: Techniques, available_bytes: int, known_us: float = math.inf
) -> Solution:
    """A step with fusion; where there are no fusion groups, or none was found that fits, one without. Steps that take
    at least `known_us` are given up."""
    graph, groups = table.graph, fastest_fused(table, limits.operation_bytes)
    fused = Problem(table, _workspace_limits(table, limits, groups), available_bytes, groups)
    unfused = Problem(table, _workspace_limits(table, limits, plain(graph)), available_bytes)
    chosen = fused.choose(fused.workspace_limits)
    if (chosen.train, chosen.infer) == (graph.train, graph.infer):
        return fit(unfused, techniques, known_us)
    found = fit(fused, techniques, known_us)
    enough = fused.fits(found) or is_hopeless(found.placed.arena_bytes, available_bytes)
    return found if enough else unfused.best((found, fit(unfused, techniques, known_us)))


def _with_concurrent_stream(serial: Solution, available_bytes: int) -> Solution:
    """With launches on the concurrent stream. The bytes for prefetching inputs stay free, unless the step saves more
    than that."""
    table = serial.table
    inputs_bytes = ahead_bytes(table.graph, available_bytes - serial.placed.arena_bytes)
    found = use_concurrent_stream(serial, available_bytes - inputs_bytes)
    if found is not serial or not inputs_bytes:
        return found
    found = use_concurrent_stream(serial, available_bytes)
    saved_us = serial.step_us - found.step_us
    return found if saved_us > table.device.host_link.copy_us(inputs_bytes, Stream.TO_DEVICE) else serial


def _techniques(table: CandidateTable, limits: Limits) -> Techniques:
    """The techniques that may be used where not all values fit."""
    host_bytes = NO_LIMIT_BYTES if limits.host_bytes is None else limits.host_bytes
    # Depth-first execution relies on recomputation in the backward pass.
    recompute = "recompute" not in limits.without
    split = recompute and table.rules.policy is not Policy.UNDIVIDED and not table.rules.micro_batch
    offload = 0.0 if "offload" in limits.without else 1.0
    return Techniques(recompute, offload, host_bytes, split, peer_bytes=limits.peer_bytes)


def _workspace_limits(table: CandidateTable, limits: Limits, programs: Programs) -> Mapping[str, int]:
    """The limit of each operation's workspace by name, however many bytes are free."""
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


def _plan(
    table: CandidateTable,
    draft: Draft,
    placed: Placed,
    bounds: Bounds,
    budget_bytes: int,
    overhead_bytes: int,
    limits: Limits,
) -> Plan:
    solution = Solution(draft, placed, table)
    device = table.device
    timed = solution.finished(draft.train), solution.finished(draft.infer)
    (train, _), (infer, _) = timed
    pinned = any(key == "engine" and value >= 0 for p in (train, infer) for key, value in _settings(p))
    cudnn = table.profile.cudnn if pinned and table.profile else 0
    return Plan(
        mbc.__version__,
        table.graph,
        Target(
            device.name,
            device.architecture,
            device.multiprocessors,
            device.memory_bytes,
            cudnn,
            _origin(table, draft.buffers, train, infer),
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
    """Of the times of both programs; empty where all are the model's."""
    if table.profile is None:
        return ""
    graph, other_sizes = table.graph, table.other_sizes
    scaled_from = similar_gpu(train, graph, buffers, other_sizes, graph.train) or similar_gpu(
        infer, graph, buffers, other_sizes, graph.infer
    )
    return f"{table.profile.origin}{f'; some times are scaled from {scaled_from}' if scaled_from else ''}"


def _settings(program: Program) -> list[tuple[str, int]]:
    return [pair for launch in program.launches if isinstance(launch.work, Kernel) for pair in launch.work.settings]

"""The only loop of the compiler: select, emit, place; where the result misses the budget, select again with the bytes
that are free when each operation runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mbc
from mbc.optimize import effort
from mbc.optimize.bounds.budget_lp import budget_bound_us
from mbc.optimize.bounds.infeasible import cannot_fit, cannot_start, not_found
from mbc.optimize.bounds.lower_bounds import critical_path_us, floor_bytes, start_bytes
from mbc.optimize.candidates.micro_batch import check_micro_batch
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.bitwise_remat_match import with_bitwise_remat
from mbc.optimize.fusion.select_groups import Programs, fuse, plain
from mbc.optimize.placement.addresses import Placed, assign_addresses, check_host
from mbc.optimize.remat.state import Means
from mbc.optimize.schedule.emit_launches import Draft, emit_launches
from mbc.optimize.schedule.simulate import measured_share
from mbc.optimize.search.concurrent_stream import use_concurrent_stream
from mbc.optimize.search.fit import fit
from mbc.optimize.search.overhead import reserved_bytes, usual_bytes
from mbc.optimize.search.prediction_interval import time_range_us
from mbc.optimize.search.relu_masks import masks_of_kept, with_relu_masks
from mbc.optimize.search.solution import UNLIMITED_BYTES, Fitted, Problem
from mbc.optimize.selection.select import Choices, check_limit, choose
from mbc.optimize.selection.workspace_division import share
from mbc.options import Policy
from mbc.plan.model import Bounds, Kernel, Plan, Predictions, Program, Stream, Target
from mbc.plan.prefetch import ahead_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits besides the budget: workspace of one operation, and of all of a program together; host memory that a plan
    may pin (None: no limit).

    `without`: techniques that are left out, of mbc.options.TECHNIQUES."""

    operation_bytes: int | None = None
    total_bytes: int | None = None
    without: frozenset[str] = frozenset()
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A step that may be planned, with ReLU bit masks or without, and its choices without a limit."""

    table: CandidateTable
    unlimited: Choices

    @staticmethod
    def of(table: CandidateTable) -> Form:
        return Form(table, choose(table, {}, programs=fuse(table)))


def search(table: CandidateTable, limits: Limits, budget_bytes: int) -> Plan:
    """The fastest plan found within the budget.

    An operation may use the bytes that are free when it runs as workspace: what is kept does not depend on it, so that
    every operation takes its own best. Raises MBC201 where a limit is too small for an operation, MBC203 where no plan
    of this graph can fit, MBC204 where none was found and MBC205 for micro-batches that cannot be.
    """
    check_micro_batch(table)
    device, precision = table.device, table.graph.precision
    usual = usual_bytes(device, precision)
    means = _means(table, limits)
    host_bytes = means.host_bytes if means.offload > 0 else 0
    floor, floor_operation = floor_bytes(table, host_bytes, means.split)
    if floor + usual > budget_bytes:
        raise cannot_fit(table, floor, floor_operation, usual, budget_bytes, host_bytes, means.split)
    start = start_bytes(table, host_bytes)
    if start + usual > budget_bytes:
        raise cannot_start(table, start, usual, budget_bytes)
    table = with_bitwise_remat(table) if means.recompute else table
    signed = with_relu_masks(table)
    forms = tuple(Form.of(form) for form in ((table,) if signed is table else (table, signed)))
    available_bytes = budget_bytes - usual  # of a plan with few launches, an upper bound
    # What keeps everything has fewer launches than most plans within a budget.
    more_bytes = reserved_bytes(device, precision, emit_launches(table, forms[0].unlimited)) - usual
    fitted = _with_other_budgets(forms, limits, means, available_bytes - int(more_bytes * effort.REFIT_MARGIN))
    for _ in range(effort.MAX_REFITS):
        more_bytes = reserved_bytes(device, precision, fitted.draft) - usual
        if not available_bytes - more_bytes < fitted.placed.arena_bytes <= available_bytes:
            break
        fitted = _with_other_budgets(forms, limits, means, available_bytes - int(more_bytes * effort.REFIT_MARGIN))
    overhead_bytes = reserved_bytes(device, precision, fitted.draft)
    table, draft, placed = fitted.table, fitted.draft, fitted.placed
    unlimited = Form.of(table).unlimited  # with the bit masks of this step
    floor, floor_operation = floor_bytes(table, host_bytes, means.split)
    copies = fitted.copies
    if not copies and placed.arena_bytes > effort.PLACEMENT_GOOD_ENOUGH * placed.live_bytes:
        # No stream waits for another, so that addresses cost no time: the arena is no larger than it has to be.
        placed = min(placed, assign_addresses(draft), key=lambda p: p.arena_bytes)
    if not copies and "concurrent_stream" not in limits.without:
        fitted = _beside(Fitted(draft, placed, table), budget_bytes - overhead_bytes)
        draft, placed = fitted.draft, fitted.placed
    if placed.arena_bytes + overhead_bytes > budget_bytes:
        raise not_found(table, floor + usual, placed.arena_bytes, overhead_bytes, budget_bytes)
    check_host(placed, limits.host_bytes, table.graph.name)
    any_us = Form.of(table.without_determinism()).unlimited.train_us if table.rules.deterministic else 0.0
    least_us = budget_bound_us(table, means, available_bytes, unlimited.train_us)
    chain_us = critical_path_us(table, draft.train, draft.buffers, unlimited.train_us)
    bounds = Bounds(floor, floor_operation.name, placed.live_bytes, unlimited.train_us, any_us, least_us, chain_us)
    return _plan(table, draft, placed, bounds, budget_bytes, overhead_bytes, limits.host_bytes)


def may_fit(table: CandidateTable, limits: Limits, budget_bytes: int) -> bool:
    """Whether a plan may fit by its shapes alone. Where not, `search` raises MBC203 whatever a profile will say."""
    means = _means(table, limits)
    host_bytes = means.host_bytes if means.offload > 0 else 0
    floor, _ = floor_bytes(table, host_bytes, means.split, workspaces=False)
    return max(floor, start_bytes(table, host_bytes)) + usual_bytes(table.device, table.graph.precision) <= budget_bytes


def _with_other_budgets(forms: Sequence[Form], limits: Limits, means: Means, available_bytes: int) -> Fitted:
    """The fastest of the steps found for `available_bytes` and, where that is much slower than without a limit, for
    slightly fewer: there the search is sensitive to small changes."""
    found, problem = (
        _with_or_without_masks(forms, limits, means, available_bytes),
        Problem(forms[0].table, {}, available_bytes),
    )
    for part in effort.NEARBY_ROOMS:
        slow = found.step_us > effort.NEARBY_ROOMS_SLOWDOWN * forms[0].unlimited.train_us and problem.holds(found)
        if not slow or len(found.draft.train.launches) > effort.NEARBY_ROOMS_MAX_LAUNCHES:
            return found
        found = problem.best((found, _with_or_without_masks(forms, limits, means, int(part * available_bytes))))
    return found


def _with_or_without_masks(forms: Sequence[Form], limits: Limits, means: Means, available_bytes: int) -> Fitted:
    """The faster of a step without ReLU bit masks and, where masks could make it much faster, one with them for those
    ReLUs whose output the first one keeps."""
    unsigned, *others = forms
    found, problem = (
        _fitted(unsigned.table, limits, means, available_bytes),
        Problem(unsigned.table, {}, available_bytes),
    )
    fits, least_us = problem.holds(found), unsigned.unlimited.train_us
    for signed in others:
        if (
            fits
            and found.step_us > effort.RELU_MASKS_GAIN * least_us
            and least_us < effort.RELU_MASKS_GAIN * signed.unlimited.train_us
        ):
            continue
        table = masks_of_kept(unsigned.table, signed.table, found.draft)
        if table is unsigned.table:  # no such output is kept
            continue
        known_us = found.step_us if fits else math.inf
        found = problem.best((found, _fitted(table, limits, means, available_bytes, known_us)))
    return found


def _fitted(
    table: CandidateTable, limits: Limits, means: Means, available_bytes: int, known_us: float = math.inf
) -> Fitted:
    """A step with groups of operations; where there are none, or it was not found to fit, one without. What takes no
    less than `known_us` is of no use."""
    graph, groups = table.graph, fuse(table, limits.operation_bytes)
    together = Problem(table, _most(table, limits, groups), available_bytes, groups)
    alone = Problem(table, _most(table, limits, plain(graph)), available_bytes)
    chosen = together.choose(together.most)
    if (chosen.train, chosen.infer) == (graph.train, graph.infer):
        return fit(alone, means, known_us)
    found = fit(together, means, known_us)
    return found if together.holds(found) else alone.best((found, fit(alone, means, known_us)))


def _beside(alone: Fitted, available_bytes: int) -> Fitted:
    """With launches on the concurrent stream. The bytes for prefetching inputs stay free, unless the step saves more
    than that."""
    table = alone.table
    inputs_bytes = ahead_bytes(table.graph, available_bytes - alone.placed.arena_bytes)
    found = use_concurrent_stream(alone, available_bytes - inputs_bytes)
    if found is not alone or not inputs_bytes:
        return found
    found = use_concurrent_stream(alone, available_bytes)
    saved_us = alone.step_us - found.step_us
    return found if saved_us > table.device.host_link.copy_us(inputs_bytes, Stream.TO_DEVICE) else alone


def _means(table: CandidateTable, limits: Limits) -> Means:
    """The techniques that may be used where not all values fit."""
    host_bytes = UNLIMITED_BYTES if limits.host_bytes is None else limits.host_bytes
    # Depth-first execution relies on recomputation in the backward pass.
    recompute = "recompute" not in limits.without
    split = recompute and table.rules.policy is not Policy.UNDIVIDED and not table.rules.micro_batch
    return Means(recompute, 0.0 if "offload" in limits.without else 1.0, host_bytes, split)


def _most(table: CandidateTable, limits: Limits, programs: Programs) -> Mapping[str, int]:
    """The limit of each operation's workspace by name, however many bytes are free."""
    most_bytes = UNLIMITED_BYTES
    if limits.operation_bytes is not None:
        most_bytes = limits.operation_bytes
        check_limit(table, most_bytes)
    if "workspace" in limits.without:
        most_bytes = 0  # each operation then takes what needs least
    graph = table.graph
    most = {operation.name: most_bytes for operation in (*programs.train, *programs.infer)}
    if limits.total_bytes is not None:
        parts = dict(share(table, programs.train, graph.inputs, limits.total_bytes))
        parts |= share(table, programs.infer, graph.infer_inputs, limits.total_bytes)
        most |= {name: min(part, most[name]) for name, part in parts.items()}
    return most


def _plan(
    table: CandidateTable,
    draft: Draft,
    placed: Placed,
    bounds: Bounds,
    budget_bytes: int,
    overhead_bytes: int,
    host_limit_bytes: int | None,
) -> Plan:
    fitted = Fitted(draft, placed, table)
    device = table.device
    (train, train_us), (infer, infer_us) = map(fitted.finished, (draft.train, draft.infer))
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
            table.profile.origin if table.profile else "",
        ),
        budget_bytes,
        draft.buffers,
        placed.offsets,
        train,
        infer,
        Predictions(
            train_us,
            *time_range_us(train, table.graph, draft.buffers, device, table.larger, table.graph.train),
            infer_us,
            *time_range_us(infer, table.graph, draft.buffers, device, table.larger, table.graph.infer),
            measured_share(train),
            placed.arena_bytes,
            overhead_bytes,
            device.overhead_bytes > 0,
            placed.host_bytes,
        ),
        bounds,
        host_limit_bytes,
    )


def _settings(program: Program) -> list[tuple[str, int]]:
    return [pair for launch in program.launches if isinstance(launch.work, Kernel) for pair in launch.work.settings]

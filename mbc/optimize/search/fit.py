"""Fits a step into the available bytes: workspaces, and what is kept, recomputed or offloaded, chosen together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mbc.ir.graph import Role
from mbc.optimize import effort
from mbc.optimize.bounds.lower_bounds import floor_bytes
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.placement.addresses import assign_addresses
from mbc.optimize.remat.fused_remat import fused_remats_of
from mbc.optimize.remat.optimizer_offload import most_together_bytes, movable_states
from mbc.optimize.remat.state import Means
from mbc.optimize.schedule.depth_first_micro_batches import Division
from mbc.optimize.schedule.in_place import take_over
from mbc.optimize.search.solution import Fitted, Problem, free_bytes, ordered
from mbc.optimize.search.variants import placed_variants
from mbc.plan.model import aligned


def fit(problem: Problem, means: Means, known_us: float = math.inf) -> Fitted:
    """The fastest step that was found within the available bytes; where none was, the smallest. A step that takes no
    less than `known_us` is of no use.

    The states of the optimizer are offloaded where they are a large share of the available bytes, and the rest of the
    step does not fit or is slow with them in the arena.
    """
    table, available_bytes = problem.table, problem.available_bytes
    found: list[Fitted] = []
    looked_at: set[Means] = set()

    def tried(here: Means) -> Fitted | None:
        looked_at.add(here)
        asked = problem.apart if here.states_bytes else problem
        fitted = _fit(asked, here, min(known_us, _least_us(problem, found)))
        if fitted is not None:
            found.append(fitted)
        return fitted

    whole_bytes, _ = floor_bytes(table, means.host_bytes if means.offload > 0 else 0)
    moved_bytes = _movable_bytes(table, means)
    if moved_bytes > effort.STATES_CROWDING_SHARE * available_bytes:
        tried(
            replace(means, states_bytes=moved_bytes, lead=effort.STATES_LEAD)
        )  # with them in the arena few bytes are left
    stay_bytes, _ = floor_bytes(table, split=means.split)
    if (stay_bytes <= available_bytes or not found) and (whole_bytes <= available_bytes or not means.split):
        with_host = tried(means)
        # Offloads are chosen before it is known how long kernels wait for copies.
        if means.recompute and with_host is not None and with_host.copies and not _is_good(problem, with_host):
            # Not given up early for what the other one takes.
            alone = _fit(problem, replace(means, offload=0.0), known_us)
            found += [alone] if alone is not None else []
    best = _with_depth_first(problem, means, found, tried)
    if not found:  # `known_us` may have ruled out all depth-first steps
        tried(means)
    for here in _with_states_offloaded(problem, best, problem.best(found)):
        fitted = None if here in looked_at else tried(here)
        if fitted is not None and problem.holds(fitted):
            break
    return problem.best(found)


def _with_depth_first(
    problem: Problem, means: Means, found: Sequence[Fitted], tried: Callable[[Means], Fitted | None]
) -> Means:
    """Tries depth-first execution in micro-batches. Returns the best means; `means` where nothing was better."""
    best = means
    for divisions in _divisions(problem, means, found):
        better = slower = False
        for division in divisions:
            here = replace(means, division=division)
            fitted = tried(here)
            if fitted is not None and problem.best(found) is fitted:
                best, better = here, True
            elif fitted is None or problem.holds(fitted):
                slower = True
        if slower and not better:
            break  # more values in parts take longer
    return best


def _movable_bytes(table: CandidateTable, means: Means) -> int:
    """Bytes of the optimizer's states, where they may be in host memory; 0 where they may not, or do not all fit
    there."""
    sizes = (table.graph.values[state.value] for state in table.graph.states)
    all_bytes = sum(aligned(value.type.size_bytes) for value in sizes if value.role is Role.OPTIMIZER)
    return all_bytes if means.offload > 0 and all_bytes <= means.host_bytes else 0


def _divisions(problem: Problem, means: Means, found: Sequence[Fitted]) -> Iterator[list[Division]]:
    """Which values to execute depth-first in micro-batches: at first the largest, then smaller ones too."""
    table, available_bytes = problem.table, problem.available_bytes
    graph = table.graph
    if not means.split or (found and _is_good(problem, problem.best(found))):
        return
    sizes = {
        value.type.size_bytes for name, value in graph.values.items() if value.per_sample and name not in graph.inputs
    }
    largest_bytes = max(sizes, default=0)
    if any(map(problem.holds, found)) and largest_bytes < effort.DIVIDED_MIN_SHARE * available_bytes:
        return
    pass_us = 2 / (table.device.copy_gb_s * 1e3)  # a byte read and written
    known: set[int] = set()
    for part in effort.DIVIDED_VALUE_SHARES:
        large_bytes = max((size for size in sizes if size <= part * available_bytes), default=0)
        if large_bytes >= largest_bytes or large_bytes in known:
            continue
        known.add(large_bytes)
        tried: list[Division] = []
        for micro_part in effort.MICRO_BATCH_SHARES:
            rows = 1 << max(0, int(graph.batch * micro_part * available_bytes / largest_bytes).bit_length() - 1)
            if rows < graph.batch:
                tried += [
                    Division(large_bytes, rows, price) for price in (math.inf, effort.KEPT_WHOLE_PASSES * pass_us)
                ]
        yield tried[: max(1, effort.DIVISIONS_WORK // len(graph.train))]


def _with_states_offloaded(problem: Problem, means: Means, found: Fitted) -> Iterator[Means]:
    """What is worth trying after `found`: offloading more and more of the optimizer's states."""
    if means.offload <= 0 or _is_good(problem, found):
        return
    graph, buffers = problem.table.graph, found.draft.buffers
    all_bytes = sum(aligned(buffers[b].size_bytes) for b in movable_states(graph, found.draft))
    lacking_bytes = found.placed.arena_bytes - problem.available_bytes
    if lacking_bytes <= 0:
        if all_bytes > effort.STATES_OFFLOAD_SHARE * problem.available_bytes:
            yield replace(means, states_bytes=all_bytes, lead=effort.STATES_LEAD)
        return
    together_bytes = most_together_bytes(graph)
    for times, lead in effort.STATES_TRIALS:
        states_bytes = int(times * lacking_bytes) + together_bytes
        if states_bytes < all_bytes:
            yield replace(means, states_bytes=states_bytes, lead=lead)
    for lead in (effort.STATES_LEAD, 0.0) if all_bytes else ():
        yield replace(means, states_bytes=all_bytes, lead=lead)


def _is_good(problem: Problem, found: Fitted) -> bool:
    return problem.holds(found) and found.step_us <= effort.FIT_GOOD_ENOUGH * problem.fastest_us


def _least_us(problem: Problem, found: Sequence[Fitted]) -> float:
    """Time of the fastest that is within the available bytes; infinite where none is."""
    return min((f.step_us for f in found if problem.holds(f)), default=math.inf)


def _fit(problem: Problem, means: Means, known_us: float) -> Fitted | None:
    """None where nothing was found that fits and could take less than `known_us`, the time of another step."""
    found: list[Fitted] = []
    if means.division is None:
        kept = _keep_all(problem, means, None)
        if not problem.holds(kept):
            kept = _keep_all(problem, means, problem.available_bytes)
        # More bytes would not help.
        if problem.holds(kept) and kept.step_us <= (1 + effort.FIT_NEGLIGIBLE) * problem.fastest_us:
            return kept
        found.append(kept)
    if means.division is not None or means.recompute or means.offload > 0:
        # Deferred reads keep values live for longer: where that does not fit, in the order as it is written.
        again = means.recompute and problem.programs is not None and fused_remats_of(problem.table)
        for late in (True, False) if again else (False,):
            found += placed_variants(problem, means, known_us, late)
            if any(map(problem.holds, found)) or known_us < math.inf:
                break
    return problem.best(found) if found else None


def _keep_all(problem: Problem, means: Means, split_bytes: int | None) -> Fitted:
    """Every value kept, with less workspace where it does not fit. `split_bytes`: as `ordered` takes it."""
    table, most, available_bytes = problem.table, problem.most, problem.available_bytes
    limits = most
    spared_bytes = 0  # of the available bytes: what placement leaves unused between buffers
    smallest: Fitted | None = None
    for _ in range(effort.KEEP_ALL_ROUNDS):
        choices = problem.choose(limits)
        draft = take_over(table.graph, ordered(table, choices, means, split_bytes), (*choices.train, *choices.infer))
        free = free_bytes(draft, available_bytes - spared_bytes)
        hopeless = min(free.values()) < 0
        if hopeless and smallest is not None:
            break
        placed = assign_addresses(draft, available_bytes, thorough=not hopeless)
        if placed.arena_bytes <= available_bytes:
            return Fitted(draft, placed, table)
        if smallest is None or placed.arena_bytes < smallest.placed.arena_bytes:
            smallest = Fitted(draft, placed, table)
        if placed.live_bytes <= available_bytes:
            spared_bytes += placed.arena_bytes - available_bytes
            free = free_bytes(draft, available_bytes - spared_bytes)
        # Where what is kept alone is too much, no workspace is small enough.
        tighter = {name: min(limit, max(0, free.get(name, limit))) for name, limit in most.items()}
        if tighter == limits or min(free.values()) < 0:
            break
        limits = tighter
    assert smallest is not None
    return smallest

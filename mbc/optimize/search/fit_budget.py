"""Fits a step into the available bytes: workspaces, and decisions to keep, recompute or offload, chosen together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from mbc.hardware.streams import aligned
from mbc.optimize import effort
from mbc.optimize.bounds.arena_bytes import bytes_of_states, floor_bytes
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.remat.allowed_techniques import AllowedTechniques
from mbc.optimize.remat.fused_remat import defer_readers
from mbc.optimize.remat.optimizer_offload import largest_update_bytes, movable_states
from mbc.optimize.schedule.depth_first_groups import Division
from mbc.optimize.search.keep_all import kept_step, may_keep_all
from mbc.optimize.search.solution import Problem, Solution, Spent
from mbc.optimize.search.variants import Undecided, placed_variants, undecided
from mbc.options import UNLIMITED_BYTES


def fit(
    problem: Problem, techniques: AllowedTechniques, known_us: float = math.inf, smallest_bytes: int = UNLIMITED_BYTES
) -> Solution:
    """Return the fastest step that the search finds within the available bytes, or the smallest step if none fits.

    The states of the optimizer are offloaded where they are a large share of the available bytes, and the rest of the
    step does not fit or is slow with them in the arena. A set of techniques whose lower bound of live bytes exceeds the
    available bytes is not searched. If all of them do, only the one with the lowest bound is, for the smallest step.

    Args:
        problem: The step and its available bytes.
        techniques: Techniques that may be used.
        known_us: Time of the best step so far; a step that takes at least as long is abandoned.
        smallest_bytes: Arena of the smallest step so far; no smallest step is searched that cannot be smaller.
    """
    fusion, available_bytes = problem.selector.fusion, problem.available_bytes
    kept = kept_step(problem, techniques, is_needed=True)
    assert kept is not None
    if _is_fastest(problem, kept):
        return kept
    solutions = [kept]
    bounds: dict[AllowedTechniques, int] = {}  # lower bounds of the live bytes of trials that are not searched

    @cache
    def before(trial: AllowedTechniques) -> Undecided:
        return undecided(posed(problem, trial), trial, UNLIMITED_BYTES)

    def nothing_fits() -> bool:
        return not any(map(problem.fits, solutions))

    def search(trial: AllowedTechniques) -> Solution | None:
        problem.spent.searches += 1
        solution = _fit(before(trial), min(known_us, _least_us(problem, solutions)))
        if solution is not None:
            solutions.append(solution)
        return solution

    def attempt(trial: AllowedTechniques) -> Solution | None:
        if trial in attempted or (problem.exhausted and nothing_fits()):
            return None
        attempted.add(trial)
        if trial.states_bytes and not (nothing_fits() or problem.tries_more(solutions)) and is_slower(trial):
            return None
        # Kernels with the least workspace may be of layouts that need other conversions.
        bound_bytes = before(trial).least_bytes
        if bound_bytes > available_bytes:
            bound_bytes = min(bound_bytes, undecided(posed(problem, trial), trial, 0).least_bytes)
        if bound_bytes > available_bytes:
            bounds[trial] = bound_bytes
            return None
        return search(trial)

    def is_slower(trial: AllowedTechniques) -> bool:
        """Return whether a step that offloads states cannot be expected to be faster than the best step so far."""
        best = problem.best(solutions)
        least_us = before(trial).least_us
        if best.origin is not None and best.origin[1].states_bytes >= trial.states_bytes:
            # The trial has no more bytes for its decisions than the best step, so its decisions take about as long.
            least_us += effort.DECISIONS_SHARE * max(0.0, best.step_us - before(best.origin[1]).least_us)
        return least_us >= best.step_us

    def attempt_until_fit(trials: Iterable[AllowedTechniques]) -> None:
        """Attempt sets of techniques until one fits; if slow steps may be searched further, until one is fast."""
        for trial in trials:
            solution = attempt(trial)
            if solution is not None and problem.fits(solution) and not problem.tries_more(solutions):
                return

    attempted: set[AllowedTechniques] = set()
    whole_bytes, _ = floor_bytes(fusion, techniques.outside_bytes)
    moved_bytes = movable_bytes(problem.table, techniques)
    if crowds_arena(moved_bytes, available_bytes):
        attempt(replace(techniques, states_bytes=moved_bytes, lead=effort.STATES_LEAD))
    sending = attempt(techniques) if whole_bytes <= available_bytes or not techniques.split else None
    if techniques in bounds:  # only other steps can fit: with fewer states in the arena, or divided ones
        attempt_until_fit(_states_trials(problem, techniques, bounds[techniques] - available_bytes, moved_bytes))
    elif sending is not None and problem.tries_more(solutions):
        # The least part of the states is tried first, then as much as is lacking.
        for lacking_bytes in sorted({0, max(0, sending.placed.arena_bytes - available_bytes)}):
            attempt_until_fit(_states_trials(problem, techniques, lacking_bytes, moved_bytes))
    if sending is not None:
        # Converting back costs a pass over each such value, so it is tried only where keeping both layouts costs more.
        trial = replace(techniques, convert_back=True)
        if not problem.is_good(sending) and _converts_back(problem, trial):
            solution = attempt(trial)
            if solution is not None and problem.best(solutions) is solution:
                techniques, sending = trial, solution
        # If the memory behind a link is too small for all values, the faster link may save more for later values.
        if techniques.peer_bytes and sending.links_used > 1:
            attempt(replace(techniques, slow_first=True))
        # Offloads are chosen before the waits of kernels for copies can be predicted.
        done = problem.is_good(sending) or (problem.exhausted and nothing_fits())
        if techniques.recompute and sending.copies and not done:
            alone = _fit(before(replace(techniques, offload=0.0)), min(known_us, _least_us(problem, solutions)))
            solutions += [alone] if alone is not None else []
    best = _with_depth_first(problem, techniques, solutions, attempt, before)
    if nothing_fits() and bounds:
        smallest = min(bounds, key=lambda trial: bounds[trial])
        best, lacking_bytes = replace(smallest, states_bytes=0, lead=0.0), bounds[smallest] - available_bytes
        attempt_until_fit(_states_trials(problem, best, lacking_bytes, moved_bytes))
    else:
        attempt_until_fit(_with_states_offloaded(problem, best, problem.best(solutions)))
    if nothing_fits() and bounds:
        smallest = min(bounds, key=lambda trial: bounds[trial])
        if bounds[smallest] < smallest_bytes:
            search(smallest)
    return problem.best(solutions)


def posed(problem: Problem, techniques: AllowedTechniques) -> Problem:
    """Return the problem with a launch for every update where optimizer states are offloaded."""
    return problem.with_single_updates if techniques.states_bytes else problem


def _with_depth_first(
    problem: Problem,
    techniques: AllowedTechniques,
    solutions: Sequence[Solution],
    attempt: Callable[[AllowedTechniques], Solution | None],
    before: Callable[[AllowedTechniques], Undecided],
) -> AllowedTechniques:
    """Return the techniques with the best division for depth-first execution; `techniques` if no division is better.

    `before` returns the step by one set of techniques before any decision.
    """
    best = techniques
    drafts = [before(techniques).draft]
    for divisions in _divisions(problem, techniques, solutions):
        better = slower = False
        for division in divisions:
            trial = replace(techniques, division=division)
            draft = before(trial).draft
            if draft in drafts:  # this division divides, or keeps whole, no other values
                continue
            drafts.append(draft)
            solution = attempt(trial)
            if solution is not None and problem.best(solutions) is solution:
                best, better = trial, True
            elif any(map(problem.fits, (solution,) if solution is not None else solutions)):
                slower = True
        if not better and (slower or best is not techniques):
            break  # dividing more values takes longer, or more bytes than dividing fewer
    return best


def _converts_back(problem: Problem, techniques: AllowedTechniques) -> bool:
    """Return whether any value may be kept in one layout of two, and converted back."""
    if not techniques.recompute:
        return False
    plain = replace(techniques, convert_back=False)
    drafts = (undecided(problem, here, UNLIMITED_BYTES).draft for here in (plain, techniques))
    return len({len(draft.train.launches) for draft in drafts}) > 1


def movable_bytes(table: CandidateTable, techniques: AllowedTechniques) -> int:
    """Return the bytes of the optimizer's states that fit outside the arena."""
    return min(bytes_of_states(table.graph, of_optimizer=True), techniques.outside_bytes)


def crowds_arena(states_bytes: int, available_bytes: int) -> bool:
    """Return whether few bytes are left with the states in the arena, so that offloading them is tried first."""
    return states_bytes > effort.STATES_CROWDING_SHARE * available_bytes


def _divisions(
    problem: Problem, techniques: AllowedTechniques, solutions: Sequence[Solution]
) -> Iterator[list[Division]]:
    """Yield divisions for depth-first execution: of the largest values first, then of smaller ones as well."""
    table, available_bytes = problem.table, problem.available_bytes
    graph = table.graph
    if not techniques.split or (solutions and problem.is_good(problem.best(solutions))):
        return
    sizes = {
        value.type.size_bytes for name, value in graph.values.items() if value.per_sample and name not in graph.inputs
    }
    largest_bytes = max(sizes, default=0)
    if any(map(problem.fits, solutions)) and largest_bytes < effort.DIVIDED_MIN_SHARE * available_bytes:
        return
    pass_us = 2 / (table.device.copy_gb_s * 1e3)  # to read and write a byte
    seen: set[int] = set()
    for part in effort.DIVIDED_VALUE_SHARES:
        large_bytes = max((size for size in sizes if size <= part * available_bytes), default=0)
        if large_bytes >= largest_bytes or large_bytes in seen:
            continue
        seen.add(large_bytes)
        tried: list[Division] = []
        for micro_part in effort.MICRO_BATCH_SHARES:
            rows = 1 << max(0, int(graph.batch * micro_part * available_bytes / largest_bytes).bit_length() - 1)
            if rows < graph.batch:
                tried += [
                    Division(large_bytes, rows, price) for price in (math.inf, effort.KEPT_WHOLE_PASSES * pass_us)
                ]
        yield tried[: max(1, effort.DIVISIONS_WORK // len(graph.train))]


def _with_states_offloaded(
    problem: Problem, techniques: AllowedTechniques, best: Solution
) -> Iterator[AllowedTechniques]:
    """Yield techniques to try after `best`, which offload more and more of the optimizer's states."""
    if techniques.offload <= 0 or problem.is_good(best):
        return
    graph, buffers = problem.table.graph, best.draft.buffers
    all_bytes = sum(aligned(buffers[b].size_bytes) for b in movable_states(graph, best.draft))
    lacking_bytes = best.placed.arena_bytes - problem.available_bytes
    if lacking_bytes > 0:
        yield from _states_trials(problem, techniques, lacking_bytes, all_bytes)
    elif all_bytes > effort.STATES_OFFLOAD_SHARE * problem.available_bytes:
        yield replace(techniques, states_bytes=all_bytes, lead=effort.STATES_LEAD)


def _states_trials(
    problem: Problem, techniques: AllowedTechniques, lacking_bytes: int, all_bytes: int
) -> Iterator[AllowedTechniques]:
    """Yield techniques that offload more and more of the optimizer's states, up to `all_bytes`."""
    together_bytes = largest_update_bytes(problem.table.graph)
    for times, lead in effort.STATES_TRIALS:
        states_bytes = int(times * lacking_bytes) + together_bytes
        if states_bytes < all_bytes:
            yield replace(techniques, states_bytes=states_bytes, lead=lead)
    for lead in (effort.STATES_LEAD, 0.0) if all_bytes else ():
        yield replace(techniques, states_bytes=all_bytes, lead=lead)


def _least_us(problem: Problem, solutions: Sequence[Solution]) -> float:
    """Return the time of the fastest solution that fits the available bytes; infinite if none does."""
    return min((f.step_us for f in solutions if problem.fits(f)), default=math.inf)


def _is_fastest(problem: Problem, solution: Solution) -> bool:
    """Return whether a solution fits, and more bytes would not help."""
    return problem.fits(solution) and solution.step_us <= (1 + effort.FIT_NEGLIGIBLE) * problem.fastest_us


def _fit(step: Undecided, known_us: float) -> Solution | None:
    """Return the best step by one set of techniques; None if none fits in less than `known_us`.

    Args:
        step: The step before any decision, with as much workspace as it likes.
        known_us: Time of the best step so far.
    """
    problem, techniques = step.problem, step.techniques
    solutions: list[Solution] = []
    if techniques.division is None and may_keep_all(step):
        kept = kept_step(problem, techniques, is_needed=False)
        if kept is not None and _is_fastest(problem, kept):
            return kept
        solutions = [kept] if kept is not None else []
    if techniques.division is not None or techniques.recompute or techniques.offload > 0:
        # Deferred readers keep their other operands live for longer. If the step then does not fit, the source order
        # is tried.
        defers = techniques.recompute and problem.programs is not None and _defers(problem)
        for defer_reads in (True, False) if defers else (False,):
            solutions += placed_variants(step, known_us, defer_reads)
            if any(map(problem.fits, solutions)) or known_us < math.inf or problem.exhausted:
                break
    return replace(problem.best(solutions), origin=(problem, techniques)) if solutions else None


def _defers(problem: Problem) -> bool:
    """Return whether any reader comes later so that another launch can recompute its operand."""
    choices = problem.choose(problem.workspace_limits)
    return defer_readers(problem.selector.fusion, choices, problem.available_bytes) is not choices


def fit_again(solution: Solution, available_bytes: int) -> Solution | None:
    """Return a step by the techniques of another step within fewer bytes; None if the search finds none that fits."""
    if solution.origin is None:
        return None
    problem, techniques = solution.origin
    fewer = replace(problem, available_bytes=available_bytes, spent=Spent())
    again = _fit(undecided(fewer, techniques, UNLIMITED_BYTES), math.inf)
    return again if again is not None and again.fits(available_bytes) else None

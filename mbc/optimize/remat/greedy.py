"""Greedy decisions: for every gap between two uses of a value, whether it is kept, recomputed or offloaded.

First as many values are offloaded as links can copy without a stall, those that are slowest to recompute first. Then,
at the peak of live bytes, the gap that costs least time per byte is recomputed, until everything fits. Live bytes are
measured in the rewritten program, and the choice goes on from there. Decisions that prove unneeded are dropped. Local
search then improves the result (`mbc.optimize.remat.local_search`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import in_launch_order
from mbc.optimize.remat.coalesce_copies import coalesce_copies
from mbc.optimize.remat.draft_state import Measured, RematState, RematTask, Residency
from mbc.optimize.remat.exhaustive import fastest_first
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.local_search import (
    Evaluated,
    drop_unneeded_offloads,
    drop_unneeded_recomputes,
    improve,
    search_feasible,
)
from mbc.optimize.remat.segment_remat import cut_into_segments


def choose_residency(task: RematTask, work: int = 0, start: Residency | None = None) -> Residency:
    """Return the draft within the available bytes, or with the smallest excess that the search finds.

    Args:
        task: The draft and its available bytes.
        work: Rounds of local search times the regions of the program.
        start: An earlier result to resume from, for the same draft and as many available bytes or more.
    """
    state = RematState(task)
    residency = _decide(state, work, start)
    return replace(residency, draft=in_launch_order(residency.draft), work=state.work)


def _decide(state: RematState, work: int, start: Residency | None) -> Residency:
    """Return the result of greedy choice followed by local search. If there are few sets of decisions, try them all.

    `work` and `start` are those of `choose_residency`.
    """
    best = state.measured()
    kept_excess_bytes = best[1]
    may_fit = state.least_bytes <= state.available_bytes
    if start is not None:
        state.resume(start)
        best = state.measured()
    elif best[0].live_bytes > state.available_bytes:
        best = _initial_decisions(state, best, may_fit)
    smallest, best = _relieved(state, best, effort.GREEDY_ROUNDS)
    limit_us = math.inf
    rounds = min(effort.LOCAL_SEARCH_ROUNDS, work // len(state.regions))
    if best[0].live_bytes > state.available_bytes and may_fit and rounds:
        result = search_feasible(state, Evaluated(*best, state.costs_us()), rounds)
        best = result.residency, result.excess_bytes
        smallest = min(smallest, result.residency, key=lambda result: result.live_bytes)
    if best[0].live_bytes <= state.available_bytes:
        kept = _drop_unneeded(state, best)
        result = improve(state, Evaluated(*kept, state.costs_us()), rounds)
        smallest, limit_us = _with_coalesced_copies(state, result), result.costs_us
    if state.techniques.recompute and may_fit and not smallest.decisions.offloads:
        ledger = Ledger(state.draft, state.regions, state.small_bytes, fused_remat=state.fused_remat)
        for decisions in fastest_first(ledger, kept_excess_bytes, limit_us):
            proved = state.measure(decisions, {})[0]
            if proved.live_bytes <= state.available_bytes:
                return proved
    return smallest


def _relieved(state: RematState, best: Measured, rounds: int) -> tuple[Residency, Measured]:
    """Choose gap by gap until the step fits; return the smallest result of all rounds, and the last one."""
    smallest = best[0]  # a round may end with a higher peak than the one before
    worse = 0
    for _ in range(rounds):
        residency, excess_bytes = best
        if (
            residency.live_bytes <= state.available_bytes
            or state.recompute_too_long()
            or worse >= effort.GREEDY_PATIENCE
        ):
            break
        if not (state.relieve(excess_bytes) or state.forbid_at(int(np.argmax(excess_bytes)))):
            break
        state.offloader.schedule()
        best = state.measured()
        worse = 0 if best[0].live_bytes < smallest.live_bytes else worse + 1
        smallest = min(smallest, best[0], key=lambda result: result.live_bytes)
    return smallest, best


def _initial_decisions(state: RematState, kept: Measured, may_fit: bool) -> Measured:
    """Make the initial decisions and return their result.

    As much is offloaded as the link can copy. Then the segments are recomputed that cost least once they fit. The
    result is that of choosing gap by gap where this costs less than any segments, or where nothing can fit.
    """
    if state.techniques.offload > 0:
        state.offloader.offload_hidden(kept[1], state.techniques.offload, state.techniques.recompute)
    offloaded = state.measured()
    if not state.techniques.recompute:
        return offloaded
    results: list[tuple[float, Residency]] = []
    before = state.ledger.mark()
    peak, max_recompute_us = int(np.argmax(kept[1])), state.max_recompute_us
    for part in (*effort.SEGMENT_SHARES, 0.0) if may_fit else (0.0,):
        if part:
            cut_into_segments(state.ledger, peak, int(part * state.available_bytes))
            state.offloader.schedule()
        best = _relieved(state, state.measured(), effort.SEGMENT_ROUNDS if part else effort.GREEDY_ROUNDS)[1]
        if best[0].live_bytes <= state.available_bytes:
            residency, _ = _drop_unneeded(state, best)
            results.append((state.costs_us(), residency))
            state.max_recompute_us = min(state.max_recompute_us, effort.RECOMPUTE_OVERSHOOT * state.costs_us())
        elif not part and not results:
            return best
        state.ledger.undo(before)
        state.offloader.stalling.clear()
        state.forbidden.clear()
    state.max_recompute_us = max_recompute_us
    state.resume(min(results, key=lambda result: result[0])[1])
    return state.measured()


def _drop_unneeded(state: RematState, best: Measured) -> Measured:
    """Drop decisions without which the step still fits by the ledger, the most expensive first."""
    before = state.ledger.mark()
    drop_unneeded_recomputes(state, best[1], max(1, effort.KEEP_WORK // len(state.regions)))
    drop_unneeded_offloads(state, best[1])
    state.offloader.schedule()
    measured = state.measure(state.ledger.decisions(), state.ledger.workspace_cuts)
    if measured[0].live_bytes > state.available_bytes:
        state.ledger.undo(before)
        return best
    state.ledger.measured()
    return measured


def _with_coalesced_copies(state: RematState, evaluated: Evaluated) -> Residency:
    """Drop offloads that are not needed, and coalesce copies, if that fits.

    Coalescing changes the draft only: a later search resumes from the decisions without it.
    """
    if not evaluated.residency.decisions.offloads:
        return evaluated.residency
    state.resume(evaluated.residency)
    _, excess_bytes = state.measured()
    drop_unneeded_offloads(state, excess_bytes)
    alone, excess_bytes = state.measured()
    if alone.live_bytes > state.available_bytes:
        return evaluated.residency
    coalesce_copies(state.offloader, state.ledger, excess_bytes, state.available_bytes)
    together, _ = state.measured()
    if together.live_bytes > state.available_bytes:
        return alone
    return replace(alone, draft=together.draft, live_bytes=together.live_bytes)

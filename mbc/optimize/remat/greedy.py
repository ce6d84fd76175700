"""Choose for every gap between two uses of a value whether it is kept, recomputed or sent to the host.

First as much goes to the host as its link can carry unseen, what is slowest to make again first. Then, where most is
taken, the gap that costs least time for its bytes is recomputed, until everything fits; how much is taken is found
from the rewritten program, and the choice goes on from there. What proves not to be needed is kept after all. What was
found so is then improved (`mbc.optimize.remat.local_search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mbc.hardware.transfers import HostLink
from mbc.ir.graph import Operation, TrainingGraph
from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import in_launch_order
from mbc.optimize.remat.coalesce_copies import coalesce_copies
from mbc.optimize.remat.exhaustive import fastest_first
from mbc.optimize.remat.fused_remat import FusedRematRuns
from mbc.optimize.remat.live_bytes_ledger import Ledger
from mbc.optimize.remat.local_search import Found, drop_offloads, improve, keep_after_all, squeeze
from mbc.optimize.remat.segment_remat import cut_into_segments
from mbc.optimize.remat.state import Means, Measured, Points, RematState, Residency
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Run, runs_of


def choose_residency(
    graph: TrainingGraph,
    draft: Draft,
    link: HostLink,
    means: Means,
    available_bytes: int,
    known_us: float = math.inf,
    groups: Sequence[Operation] = (),
    work: int = 0,
    start: Residency | None = None,
    points: Points | None = None,
    fused_remat: FusedRematRuns | None = None,
    runs: Sequence[Run] = (),
) -> Residency:
    """The draft as it fits the room, or as little over it as was found. `draft` must not alias but by updates.

    `known_us`: a step that fits; one that would take much longer is given up. `work`: rounds that improve what fits,
    times the runs of the program. `start`: what was found for the same draft and as much room or more, to go on from.
    `points`: bytes of workspace and time of the other ways to run operations that are launched together, by their
    names. `fused_remat`: what can be recomputed along with other runs, whose operations are among `groups`.
    `runs`: of the training program, where some are repeated by other launches.
    """
    runs = tuple(runs) or runs_of(graph, draft, draft.train)
    state = RematState(
        graph, draft, link, means, available_bytes, known_us, groups, points or {}, fused_remat or {}, runs
    )
    found = _decide(state, work, start)
    return replace(found, draft=in_launch_order(found.draft))


def _decide(state: RematState, work: int, start: Residency | None) -> Residency:
    """Greedy choice, local search from there, and all sets of decisions where there are few. `work`, `start`: as for
    `reside`."""
    best = state.measured()
    kept_over = best[1]
    if start is not None:
        state.go_on(start)
        best = state.measured()
    elif best[0].live_bytes > state.available_bytes:
        best = _started(state, best)
    smallest, best = _relieved(state, best, effort.GREEDY_ROUNDS)
    limit_us = math.inf
    rounds = min(effort.LOCAL_SEARCH_ROUNDS, work // len(state.runs))
    if best[0].live_bytes > state.available_bytes and rounds:
        found = squeeze(state, Found(*best, state.costs_us()), rounds)
        best = found.residency, found.over
        smallest = min(smallest, found.residency, key=lambda found: found.live_bytes)
    if best[0].live_bytes <= state.available_bytes:
        kept = _keep_after_all(state, best)
        found = improve(state, Found(*kept, state.costs_us()), rounds)
        smallest, limit_us = _with_coalesced_copies(state, found), found.costs_us
    if state.means.recompute and not smallest.decisions.offloads:
        ledger = Ledger(state.draft, state.runs, state.small_bytes, fused_remat=state.along)
        for decisions in fastest_first(ledger, kept_over, limit_us):
            proved = state.measure(decisions, {})[0]
            if proved.live_bytes <= state.available_bytes:
                return proved
    return smallest


def _relieved(state: RematState, best: Measured, rounds: int) -> tuple[Residency, Measured]:
    """What is smallest of what choosing gap by gap comes to, and what it ends with."""
    smallest = best[0]  # one round may take more than that before
    worse = 0
    for _ in range(rounds):
        residency, over = best
        if residency.live_bytes <= state.available_bytes or state.again_too_long() or worse >= effort.GREEDY_PATIENCE:
            break
        if not (state.relieve(over) or state.forbid_at(int(np.argmax(over)))):
            break
        state.offloader.schedule()
        best = state.measured()
        worse = 0 if best[0].live_bytes < smallest.live_bytes else worse + 1
        smallest = min(smallest, best[0], key=lambda found: found.live_bytes)
    return smallest, best


def _started(state: RematState, kept: Measured) -> Measured:
    """Where to go on from: as much at the host as its link can carry, and then the segments that cost least once
    they fit; where choosing gap by gap could cost less than that, nothing yet."""
    if state.means.offload > 0:
        state.offloader.send_away(kept[1], state.means.offload, state.means.recompute)
    sent = state.measured()
    if not state.means.recompute:
        return sent
    found: list[tuple[float, Residency]] = []
    before = state.ledger.mark()
    peak, most_again_us = int(np.argmax(kept[1])), state.most_again_us
    for part in (*effort.SEGMENT_SHARES, 0.0):
        if part:
            cut_into_segments(state.ledger, peak, int(part * state.available_bytes))
            state.offloader.schedule()
        best = _relieved(state, state.measured(), effort.SEGMENT_ROUNDS if part else effort.GREEDY_ROUNDS)[1]
        if best[0].live_bytes <= state.available_bytes:
            residency, _ = _keep_after_all(state, best)
            found.append((state.costs_us(), residency))
            state.most_again_us = min(state.most_again_us, effort.RECOMPUTE_OVERSHOOT * state.costs_us())
        elif not part and not found:
            return best
        state.ledger.undo(before)
        state.offloader.forced.clear()
        state.forbidden.clear()
    state.most_again_us = most_again_us
    state.go_on(min(found, key=lambda found: found[0])[1])
    return state.measured()


def _keep_after_all(state: RematState, best: Measured) -> Measured:
    """Take decisions back, the most expensive first, where the books say that it fits without."""
    before = state.ledger.mark()
    keep_after_all(state, best[1], max(1, effort.KEEP_WORK // len(state.runs)))
    drop_offloads(state, best[1])
    state.offloader.schedule()
    found = state.measure(state.ledger.decisions(), state.ledger.leaner)
    if found[0].live_bytes > state.available_bytes:
        state.ledger.undo(before)
        return best
    state.ledger.measured()
    return found


def _with_coalesced_copies(state: RematState, found: Found) -> Residency:
    """What need not go to the host stays, and copies travel together, if that fits. That copies travel together is
    in the draft only: decisions are gone on from as they are."""
    if not found.residency.decisions.offloads:
        return found.residency
    state.go_on(found.residency)
    _, over = state.measured()
    drop_offloads(state, over)
    alone, over = state.measured()
    if alone.live_bytes > state.available_bytes:
        return found.residency
    coalesce_copies(state.offloader, state.ledger, over, state.available_bytes)
    together, _ = state.measured()
    if together.live_bytes > state.available_bytes:
        return alone
    return replace(alone, draft=together.draft, live_bytes=together.live_bytes)

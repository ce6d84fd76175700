"""Local search over decisions: undo some of them, free the bytes by others, keep the result if it is faster.

This is a large neighbourhood search (Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", 1998). Decisions that a greedy choice makes one by one at the peak are not the best combination. A
round costs little, since the ledger of live bytes is updated incrementally. Improvements by the ledger are measured in
the rewritten program before they count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.draft_state import RematState, Residency

Recomputation = tuple[int, int]  # a value, and the region before which it is recomputed


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Decisions and their measured effect.

    Attributes:
        residency: The decisions, and the draft that carries them out.
        excess_bytes: Bytes by which each region exceeds the available bytes.
        costs_us: Time that the decisions add.
    """

    residency: Residency
    excess_bytes: NDArray[np.int64]
    costs_us: float


def improve(state: RematState, best: Evaluated, rounds: int) -> Evaluated:
    """Return the best decisions that the search finds from `best`, which fits and is the state of the ledger.

    The search is seeded and counted in rounds, never in seconds: the same step gets the same decisions.
    """
    draw = random.Random(0)
    ledger = state.ledger
    least_us = best.costs_us
    best_mark, best_stalling = ledger.mark(), frozenset(state.offloader.stalling)  # the state of `best`
    unmeasured, most_unmeasured = 0, effort.MEASURE_AFTER

    def settle() -> None:
        nonlocal best, least_us, best_mark, best_stalling, unmeasured, most_unmeasured
        settled = _settled(state)
        unmeasured = 0
        if settled.excess_bytes.max() <= 0 and settled.costs_us < best.costs_us:
            best = settled
            best_mark, best_stalling = ledger.mark(), frozenset(state.offloader.stalling)
            most_unmeasured = min(2 * most_unmeasured, effort.MEASURE_AFTER)
        else:  # the ledger was too optimistic
            ledger.undo(best_mark)
            ledger.measured()
            state.offloader.stalling = set(best_stalling)
            most_unmeasured = max(1, most_unmeasured // 2)
        least_us = best.costs_us

    for _ in range(rounds):
        start = ledger.mark()
        stalling = frozenset(state.offloader.stalling)
        if not _destroy(state, draw):
            break
        state.max_recompute_us = least_us
        _relieve(state, best.excess_bytes, draw)
        if _fits(state, best.excess_bytes):
            drop_unneeded_recomputes(state, best.excess_bytes, len(state.regions))
        if _fits(state, best.excess_bytes) and state.costs_us() < least_us - effort.IMPROVEMENT_US:
            least_us = state.costs_us()
            unmeasured += 1
        else:
            ledger.undo(start)
            state.offloader.stalling = set(stalling)
        if unmeasured >= most_unmeasured:
            settle()
    if unmeasured:
        settle()
    return best


def search_feasible(state: RematState, smallest: Evaluated, rounds: int) -> Evaluated:
    """Return decisions that fit; else those with the lowest peak.

    The search starts from `smallest`, which does not fit and is the state of the ledger. Where bytes are lacking,
    decisions are undone and others are made, as long as the total of lacking bytes falls.
    """
    draw = random.Random(0)
    ledger = state.ledger
    excess_bytes = smallest.excess_bytes
    lacking = _lacking(state, excess_bytes)
    unmeasured = 0

    def settle() -> None:
        nonlocal excess_bytes, lacking, smallest, unmeasured
        settled = _settled(state)
        excess_bytes, unmeasured = settled.excess_bytes, 0
        lacking = _lacking(state, excess_bytes)
        smallest = min(smallest, settled, key=lambda settled: settled.residency.live_bytes)

    for _ in range(rounds):
        start = ledger.mark()
        stalling = frozenset(state.offloader.stalling)
        recomputed = state.ledger.recomputed()
        if not recomputed:
            break
        worst = int(np.argmax(excess_bytes + ledger.delta_bytes))
        _drop_all(state, _nearest(recomputed, worst, draw.choice(effort.NEIGHBOURHOOD_SIZES), draw))
        _relieve(state, excess_bytes, draw)
        left = _lacking(state, excess_bytes)
        if left < lacking:
            lacking = left
            unmeasured += 1
        else:
            ledger.undo(start)
            state.offloader.stalling = set(stalling)
        if unmeasured >= effort.MEASURE_AFTER or (unmeasured and not lacking):
            settle()
            if not lacking:
                break
    if unmeasured:
        settle()
    return smallest


def _lacking(state: RematState, excess_bytes: NDArray[np.int64]) -> int:
    """Return the sum over all regions of the bytes by which they exceed the available bytes, by the ledger."""
    return int(np.maximum(excess_bytes + state.ledger.delta_bytes, 0).sum())


def _relieve(state: RematState, excess_bytes: NDArray[np.int64], draw: random.Random) -> None:
    """Free bytes at perturbed prices, so that other decisions are made than the last time."""
    # The keys -1, -2, ... are for the workspaces of regions 0, 1, ...
    priced = (*state.ledger.movable, *range(-len(state.regions), 0))
    noise = effort.PRICE_NOISE
    drawn, least, width = draw.random, 1 - noise, (1 + noise) - (1 - noise)
    state.price_perturbations = {
        b: least + width * drawn() for b in priced
    }  # the same factors as those of uniform(), in a third of the time
    state.relieve(excess_bytes)
    state.price_perturbations = {}


def _nearest(
    recomputed: Sequence[Recomputation], position: int, count: int, draw: random.Random
) -> list[Recomputation]:
    """Return the `count` recomputations before regions nearest to a position; equally near ones at random."""
    return sorted(recomputed, key=lambda decision: abs(decision[1] - position) + draw.random())[:count]


def _drop_all(state: RematState, chosen: Sequence[Recomputation]) -> None:
    for buffer, position in chosen:
        if state.ledger.is_recomputed(buffer, position):  # it may be dropped together with another one
            state.ledger.drop_recompute(buffer, position)


def _settled(state: RematState) -> Evaluated:
    """Return the measured decisions. If they do not fit, free a few more bytes and measure again."""
    state.max_recompute_us = math.inf
    for _ in range(effort.SETTLE_ROUNDS):
        state.offloader.schedule()
        residency, excess_bytes = state.measured()
        if excess_bytes.max() <= 0:
            break
        state.relieve(excess_bytes)
    else:
        residency, excess_bytes = state.measured()
    return Evaluated(residency, excess_bytes, state.costs_us())


def drop_unneeded_recomputes(state: RematState, excess_bytes: NDArray[np.int64], most: int) -> None:
    """Drop recomputations without which the step still fits by the ledger, of the `most` that take longest."""
    ledger = state.ledger
    order = sorted(
        [(-ledger.recompute_us_of(ledger.defined_at[b], before), before, b) for b, before in ledger.recomputed()]
    )
    taken = excess_bytes + ledger.delta_bytes
    for _, before, buffer in order[:most]:
        if not ledger.is_recomputed(buffer, before):
            continue
        first, last = ledger.absent(buffer, before)
        if first < last and taken[first:last].max() + ledger.size_bytes[buffer] > 0:
            continue
        start = ledger.mark()
        ledger.drop_recompute(buffer, before)
        if _fits(state, excess_bytes):
            taken = excess_bytes + ledger.delta_bytes
        else:
            ledger.undo(start)
    for region in sorted(ledger.workspace_cuts, key=lambda region: (-ledger.workspace_cuts[region].more_us, region)):
        start = ledger.mark()
        ledger.cut_workspace(region, None)
        if not _fits(state, excess_bytes):
            ledger.undo(start)


def drop_unneeded_offloads(state: RematState, excess_bytes: NDArray[np.int64]) -> None:
    """Drop offloads without which the step still fits by the ledger, the smallest first."""
    ledger = state.ledger
    for buffer in sorted(state.offloader.overlapped(), key=lambda b: (ledger.size_bytes[b], b)):
        start = ledger.mark()
        ledger.keep(buffer)
        if not _fits(state, excess_bytes):
            ledger.undo(start)


def _fits(state: RematState, excess_bytes: NDArray[np.int64]) -> bool:
    return (excess_bytes + state.ledger.delta_bytes).max() <= 0


def _destroy(state: RematState, draw: random.Random) -> bool:
    """Undo some decisions, anywhere or before regions near each other; return False if there are none."""
    ledger = state.ledger
    recomputed = state.ledger.recomputed()
    stalling = sorted(state.offloader.stalling)
    workspace_cuts = sorted(ledger.workspace_cuts)
    if not recomputed and not stalling and not workspace_cuts:
        return False
    count = draw.choice(effort.NEIGHBOURHOOD_SIZES)
    for region in draw.sample(workspace_cuts, min(draw.randrange(count + 1), len(workspace_cuts))):
        ledger.cut_workspace(region, None)
    if recomputed and draw.random() < 0.5:
        _, centre = draw.choice(recomputed)
        chosen = _nearest(recomputed, centre, count, draw)
    else:
        chosen = draw.sample(recomputed, min(count, len(recomputed)))
    _drop_all(state, chosen)
    overlapped = state.offloader.overlapped()
    if overlapped and draw.random() < effort.SWAP_OFFLOAD_SHARE:
        # The link may save more time with other values.
        stays = draw.sample(overlapped, min(len(overlapped), draw.choice(effort.NEIGHBOURHOOD_SIZES[:2])))
        for buffer in stays:
            ledger.keep(buffer)
        state.offloader.offload_more((*draw.sample([b for b, _ in chosen], len(chosen)), *stays))
    for buffer in draw.sample(stalling, min(draw.randrange(count + 1), len(stalling))):
        state.offloader.stalling.discard(buffer)
        ledger.keep(buffer)
    return True

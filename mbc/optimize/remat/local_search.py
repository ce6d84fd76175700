"""Improve what was chosen for the gaps: take some of it back, make room again in another way, keep what is faster.

A large neighbourhood search (Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998): what is chosen one by one where most is taken is not what is best together, and a round costs little,
since the books follow it. What they find is measured before it counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.state import RematState, Residency

Again = tuple[int, int]  # a value, and the run before which it is recomputed


@dataclass(frozen=True, slots=True)
class Found:
    """Decisions as they were measured. `over`: by how much each run exceeds the room; `costs_us`: what they cost."""

    residency: Residency
    over: NDArray[np.int64]
    costs_us: float


def improve(state: RematState, best: Found, rounds: int) -> Found:
    """What was found from `best`, which fits and is what the books say.

    Seeded and counted in rounds, never in seconds: the same step gets the same decisions.
    """
    draw = random.Random(0)
    ledger = state.ledger
    least_us = best.costs_us
    known, known_forced = ledger.mark(), frozenset(state.offloader.forced)  # as `best` was measured
    unmeasured, most_unmeasured = 0, effort.MEASURE_AFTER

    def settle() -> None:
        nonlocal best, least_us, known, known_forced, unmeasured, most_unmeasured
        found = _settled(state)
        unmeasured = 0
        if found.over.max() <= 0 and found.costs_us < best.costs_us:
            best = found
            known, known_forced = ledger.mark(), frozenset(state.offloader.forced)
            most_unmeasured = min(2 * most_unmeasured, effort.MEASURE_AFTER)
        else:  # the books are further off than that
            ledger.undo(known)
            ledger.measured()
            state.offloader.forced = set(known_forced)
            most_unmeasured = max(1, most_unmeasured // 2)
        least_us = best.costs_us

    for _ in range(rounds):
        start = ledger.mark()
        forced = frozenset(state.offloader.forced)
        if not _take_back(state, draw):
            break
        state.most_again_us = least_us
        _relieve(state, best.over, draw)
        if _fits(state, best.over):
            keep_after_all(state, best.over, len(state.runs))
        if _fits(state, best.over) and state.costs_us() < least_us - effort.IMPROVEMENT_US:
            least_us = state.costs_us()
            unmeasured += 1
        else:
            ledger.undo(start)
            state.offloader.forced = set(forced)
        if unmeasured >= most_unmeasured:
            settle()
    if unmeasured:
        settle()
    return best


def squeeze(state: RematState, smallest: Found, rounds: int) -> Found:
    """What fits, found from what does not and is what the books say; else what is smallest.

    Where room is lacking decisions are taken back and others are made, as long as less is lacking then in all.
    """
    draw = random.Random(0)
    ledger = state.ledger
    over = smallest.over
    lacking = _lacking(state, over)
    unmeasured = 0

    def settle() -> None:
        nonlocal over, lacking, smallest, unmeasured
        found = _settled(state)
        over, unmeasured = found.over, 0
        lacking = _lacking(state, over)
        smallest = min(smallest, found, key=lambda found: found.residency.live_bytes)

    for _ in range(rounds):
        start = ledger.mark()
        forced = frozenset(state.offloader.forced)
        again = state.ledger.repeated()
        if not again:
            break
        worst = int(np.argmax(over + ledger.delta_bytes))
        _drop(state, _nearest(again, worst, draw.choice(effort.NEIGHBOURHOOD_SIZES), draw))
        _relieve(state, over, draw)
        left = _lacking(state, over)
        if left < lacking:
            lacking = left
            unmeasured += 1
        else:
            ledger.undo(start)
            state.offloader.forced = set(forced)
        if unmeasured >= effort.MEASURE_AFTER or (unmeasured and not lacking):
            settle()
            if not lacking:
                break
    if unmeasured:
        settle()
    return smallest


def _lacking(state: RematState, over: NDArray[np.int64]) -> int:
    """By how much all runs together exceed the room, by the books."""
    return int(np.maximum(over + state.ledger.delta_bytes, 0).sum())


def _relieve(state: RematState, over: NDArray[np.int64], draw: random.Random) -> None:
    """Make room at prices that are off, so that other decisions are made than the last time."""
    # Runs with less workspace count down from -1.
    priced = (*state.ledger.movable, *range(-len(state.runs), 0))
    noise = effort.PRICE_NOISE
    drawn, least, width = draw.random, 1 - noise, (1 + noise) - (1 - noise)
    state.price_perturbations = {
        b: least + width * drawn() for b in priced
    }  # what uniform() is, in a third of the time
    state.relieve(over)
    state.price_perturbations = {}


def _nearest(again: Sequence[Again], position: int, count: int, draw: random.Random) -> list[Again]:
    """Of what is recomputed before runs near a position; of equally near ones any."""
    return sorted(again, key=lambda decision: abs(decision[1] - position) + draw.random())[:count]


def _drop(state: RematState, chosen: Sequence[Again]) -> None:
    for buffer, position in chosen:
        if state.ledger.repeats(buffer, position):  # not gone with another
            state.ledger.drop(buffer, position)


def _settled(state: RematState) -> Found:
    """The decisions as they are measured; where that does not fit, with a little more room made."""
    state.most_again_us = math.inf
    for _ in range(effort.SETTLE_ROUNDS):
        state.offloader.schedule()
        residency, over = state.measured()
        if over.max() <= 0:
            break
        state.relieve(over)
    else:
        residency, over = state.measured()
    return Found(residency, over, state.costs_us())


def keep_after_all(state: RematState, over: NDArray[np.int64], most: int) -> None:
    """Keep after all, by the books, of what takes longest to make again and so many what fits."""
    ledger = state.ledger
    order = sorted([(-ledger.again_us_of(ledger.made[b], before), before, b) for b, before in ledger.repeated()])
    taken = over + ledger.delta_bytes
    for _, before, buffer in order[:most]:
        if not ledger.repeats(buffer, before):
            continue
        first, last = ledger.absent(buffer, before)
        if first < last and taken[first:last].max() + ledger.size_bytes[buffer] > 0:
            continue
        start = ledger.mark()
        ledger.drop(buffer, before)
        if _fits(state, over):
            taken = over + ledger.delta_bytes
        else:
            ledger.undo(start)
    for run in sorted(ledger.leaner, key=lambda run: (-ledger.leaner[run].more_us, run)):
        start = ledger.mark()
        ledger.lean(run, None)
        if not _fits(state, over):
            ledger.undo(start)


def drop_offloads(state: RematState, over: NDArray[np.int64]) -> None:
    """Leave in the arena, by the books, what went to the host without need, the smallest first."""
    ledger = state.ledger
    for buffer in sorted(state.offloader.unhurried(), key=lambda b: (ledger.size_bytes[b], b)):
        start = ledger.mark()
        ledger.stay(buffer)
        if not _fits(state, over):
            ledger.undo(start)


def _fits(state: RematState, over: NDArray[np.int64]) -> bool:
    return (over + state.ledger.delta_bytes).max() <= 0


def _take_back(state: RematState, draw: random.Random) -> bool:
    """Take some decisions back: anywhere, or before runs near each other. Whether there was any."""
    ledger = state.ledger
    again = state.ledger.repeated()
    sent = sorted(state.offloader.forced)
    leaner = sorted(ledger.leaner)
    if not again and not sent and not leaner:
        return False
    count = draw.choice(effort.NEIGHBOURHOOD_SIZES)
    for run in draw.sample(leaner, min(draw.randrange(count + 1), len(leaner))):
        ledger.lean(run, None)
    if again and draw.random() < 0.5:
        _, centre = draw.choice(again)
        chosen = _nearest(again, centre, count, draw)
    else:
        chosen = draw.sample(again, min(count, len(again)))
    _drop(state, chosen)
    unhurried = state.offloader.unhurried()
    if unhurried and draw.random() < effort.SWAP_OFFLOAD_SHARE:
        # Others may be worth more of the link.
        stays = draw.sample(unhurried, min(len(unhurried), draw.choice(effort.NEIGHBOURHOOD_SIZES[:2])))
        for buffer in stays:
            ledger.stay(buffer)
        state.offloader.send((*draw.sample([b for b, _ in chosen], len(chosen)), *stays))
    for buffer in draw.sample(sent, min(draw.randrange(count + 1), len(sent))):
        state.offloader.forced.discard(buffer)
        ledger.stay(buffer)
    return True

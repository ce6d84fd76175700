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
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mbc.optimize.remat.greedy import Chooser, Residency

# Decisions that are taken back in a round, and by how much a price may be off in it.
TAKEN_BACK = (2, 4, 8, 16, 32)
WHIM = 0.5
SWAPPED = 0.3  # rounds that send something else to the host
MEASURED_AFTER = 8  # so many improvements by the books
MOST_SETTLING = 3  # rounds of making room where these prove wrong
LESS_US = 1e-3  # an improvement

Again = tuple[int, int]  # a value, and the run before which it is made again


@dataclass(frozen=True, slots=True)
class Found:
    """Decisions as they were measured. `over`: by how much each run exceeds the room; `costs_us`: what they cost."""

    residency: Residency
    over: NDArray[np.int64]
    costs_us: float


def improve(chooser: Chooser, best: Found, rounds: int) -> Found:
    """What was found from `best`, which fits and is what the books say.

    Seeded and counted in rounds, never in seconds: the same step gets the same decisions.
    """
    draw = random.Random(0)
    ledger = chooser.ledger
    least_us = best.costs_us
    known, known_forced = ledger.mark(), frozenset(chooser.offloader.forced)  # as `best` was measured
    unmeasured, most_unmeasured = 0, MEASURED_AFTER

    def settle() -> None:
        nonlocal best, least_us, known, known_forced, unmeasured, most_unmeasured
        found = _settled(chooser)
        unmeasured = 0
        if found.over.max() <= 0 and found.costs_us < best.costs_us:
            best = found
            known, known_forced = ledger.mark(), frozenset(chooser.offloader.forced)
            most_unmeasured = min(2 * most_unmeasured, MEASURED_AFTER)
        else:  # the books are further off than that
            ledger.undo(known)
            ledger.measured()
            chooser.offloader.forced = set(known_forced)
            most_unmeasured = max(1, most_unmeasured // 2)
        least_us = best.costs_us

    for _ in range(rounds):
        start = ledger.mark()
        forced = frozenset(chooser.offloader.forced)
        if not _take_back(chooser, draw):
            break
        chooser.most_again_us = least_us
        _relieve(chooser, best.over, draw)
        if _fits(chooser, best.over):
            keep_after_all(chooser, best.over, len(chooser.runs))
        if _fits(chooser, best.over) and chooser.costs_us() < least_us - LESS_US:
            least_us = chooser.costs_us()
            unmeasured += 1
        else:
            ledger.undo(start)
            chooser.offloader.forced = set(forced)
        if unmeasured >= most_unmeasured:
            settle()
    if unmeasured:
        settle()
    return best


def squeeze(chooser: Chooser, smallest: Found, rounds: int) -> Found:
    """What fits, found from what does not and is what the books say; else what is smallest.

    Where room is lacking decisions are taken back and others are made, as long as less is lacking then in all.
    """
    draw = random.Random(0)
    ledger = chooser.ledger
    over = smallest.over
    lacking = _lacking(chooser, over)
    unmeasured = 0

    def settle() -> None:
        nonlocal over, lacking, smallest, unmeasured
        found = _settled(chooser)
        over, unmeasured = found.over, 0
        lacking = _lacking(chooser, over)
        smallest = min(smallest, found, key=lambda found: found.residency.live_bytes)

    for _ in range(rounds):
        start = ledger.mark()
        forced = frozenset(chooser.offloader.forced)
        again = chooser.ledger.repeated()
        if not again:
            break
        worst = int(np.argmax(over + ledger.delta_bytes))
        _drop(chooser, _nearest(again, worst, draw.choice(TAKEN_BACK), draw))
        _relieve(chooser, over, draw)
        left = _lacking(chooser, over)
        if left < lacking:
            lacking = left
            unmeasured += 1
        else:
            ledger.undo(start)
            chooser.offloader.forced = set(forced)
        if unmeasured >= MEASURED_AFTER or (unmeasured and not lacking):
            settle()
            if not lacking:
                break
    if unmeasured:
        settle()
    return smallest


def _lacking(chooser: Chooser, over: NDArray[np.int64]) -> int:
    """By how much all runs together exceed the room, by the books."""
    return int(np.maximum(over + chooser.ledger.delta_bytes, 0).sum())


def _relieve(chooser: Chooser, over: NDArray[np.int64], draw: random.Random) -> None:
    """Make room at prices that are off, so that other decisions are made than the last time."""
    # Runs with less workspace count down from -1.
    priced = (*chooser.ledger.movable, *range(-len(chooser.runs), 0))
    drawn, least, width = draw.random, 1 - WHIM, (1 + WHIM) - (1 - WHIM)
    chooser.price_perturbations = {
        b: least + width * drawn() for b in priced
    }  # what uniform() is, in a third of the time
    chooser.relieve(over)
    chooser.price_perturbations = {}


def _nearest(again: Sequence[Again], position: int, count: int, draw: random.Random) -> list[Again]:
    """Of what is made again before runs near a position; of equally near ones any."""
    return sorted(again, key=lambda decision: abs(decision[1] - position) + draw.random())[:count]


def _drop(chooser: Chooser, chosen: Sequence[Again]) -> None:
    for buffer, position in chosen:
        if chooser.ledger.repeats(buffer, position):  # not gone with another
            chooser.ledger.drop(buffer, position)


def _settled(chooser: Chooser) -> Found:
    """The decisions as they are measured; where that does not fit, with a little more room made."""
    chooser.most_again_us = math.inf
    for _ in range(MOST_SETTLING):
        chooser.offloader.schedule()
        residency, over = chooser.measured()
        if over.max() <= 0:
            break
        chooser.relieve(over)
    else:
        residency, over = chooser.measured()
    return Found(residency, over, chooser.costs_us())


def keep_after_all(chooser: Chooser, over: NDArray[np.int64], most: int) -> None:
    """Keep after all, by the books, of what takes longest to make again and so many what fits."""
    ledger = chooser.ledger
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
        if _fits(chooser, over):
            taken = over + ledger.delta_bytes
        else:
            ledger.undo(start)
    for run in sorted(ledger.leaner, key=lambda run: (-ledger.leaner[run].more_us, run)):
        start = ledger.mark()
        ledger.lean(run, None)
        if not _fits(chooser, over):
            ledger.undo(start)


def drop_offloads(chooser: Chooser, over: NDArray[np.int64]) -> None:
    """Leave in the arena, by the books, what went to the host without need, the smallest first."""
    ledger = chooser.ledger
    for buffer in sorted(chooser.offloader.unhurried(), key=lambda b: (ledger.size_bytes[b], b)):
        start = ledger.mark()
        ledger.stay(buffer)
        if not _fits(chooser, over):
            ledger.undo(start)


def _fits(chooser: Chooser, over: NDArray[np.int64]) -> bool:
    return (over + chooser.ledger.delta_bytes).max() <= 0


def _take_back(chooser: Chooser, draw: random.Random) -> bool:
    """Take some decisions back: anywhere, or before runs near each other. Whether there was any."""
    ledger = chooser.ledger
    again = chooser.ledger.repeated()
    sent = sorted(chooser.offloader.forced)
    leaner = sorted(ledger.leaner)
    if not again and not sent and not leaner:
        return False
    count = draw.choice(TAKEN_BACK)
    for run in draw.sample(leaner, min(draw.randrange(count + 1), len(leaner))):
        ledger.lean(run, None)
    if again and draw.random() < 0.5:
        _, centre = draw.choice(again)
        chosen = _nearest(again, centre, count, draw)
    else:
        chosen = draw.sample(again, min(count, len(again)))
    _drop(chooser, chosen)
    unhurried = chooser.offloader.unhurried()
    if unhurried and draw.random() < SWAPPED:
        # Others may be worth more of the link.
        stays = draw.sample(unhurried, min(len(unhurried), draw.choice(TAKEN_BACK[:2])))
        for buffer in stays:
            ledger.stay(buffer)
        chooser.offloader.send((*draw.sample([b for b, _ in chosen], len(chosen)), *stays))
    for buffer in draw.sample(sent, min(draw.randrange(count + 1), len(sent))):
        chooser.offloader.forced.discard(buffer)
        ledger.stay(buffer)
    return True

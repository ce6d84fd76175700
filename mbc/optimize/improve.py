"""Improve what was chosen for the gaps: take some of it back, make room again in another way, keep what is faster.

A large neighbourhood search (Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", 1998): what is chosen one by one where most is taken is not what is best together, and a round costs little,
since the books follow it. What they find is measured before it counts.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mbc.optimize.reside import Chooser, Resided

# Decisions that are taken back in a round, and by how much a price may be off in it.
TAKEN_BACK = (1, 2, 4, 8)
WHIM = 0.5
LESS_US = 1e-3  # an improvement


def improve(
    chooser: Chooser, best: tuple[Resided, NDArray[np.int64]], rounds: int
) -> tuple[Resided, NDArray[np.int64]]:
    """What was found from `best`, which fits: how it is, and by how much each run exceeds the room then.

    Seeded and counted in rounds, never in seconds: the same step gets the same decisions.
    """
    draw = random.Random(0)
    ledger = chooser.ledger
    over = best[1]
    least_us = chooser.costs_us()
    for _ in range(rounds):
        start = ledger.mark()
        forced = frozenset(chooser.forced)
        if not _take_back(chooser, draw):
            break
        chooser.whims = {b: draw.uniform(1 - WHIM, 1 + WHIM) for b in ledger.movable}
        chooser.most_again_us = least_us
        chooser.relieve(over)
        chooser.whims = {}
        if _fits(chooser, over):
            keep_again(chooser, over, len(chooser.runs))
            if chooser.costs_us() < least_us - LESS_US:
                chooser.schedule()
                found = chooser.measure(ledger.decisions())
                if found[1].max() <= 0:
                    best, over, least_us = found, found[1], chooser.costs_us()
                    ledger.delta_bytes[:] = 0
                    continue
        ledger.undo(start)
        chooser.forced = set(forced)
    return best


def keep_again(chooser: Chooser, over: NDArray[np.int64], most: int) -> None:
    """Keep after all, by the books, of what takes longest to make again and so many what fits."""
    ledger, runs = chooser.ledger, chooser.runs
    order = sorted(((runs[ledger.made[d.buffer]].time_us, d) for d in ledger.decisions().recomputes),
                   key=lambda pair: (-pair[0], pair[1].before, pair[1].buffer))  # fmt: skip
    for _, decision in order[:most]:
        if not ledger.repeats(decision.buffer, decision.before):
            continue
        start = ledger.mark()
        ledger.drop(decision.buffer, decision.before)
        if not _fits(chooser, over):
            ledger.undo(start)


def _fits(chooser: Chooser, over: NDArray[np.int64]) -> bool:
    return (over + chooser.ledger.delta_bytes).max() <= 0


def _take_back(chooser: Chooser, draw: random.Random) -> bool:
    """Take some decisions back: anywhere, or before runs near each other. Whether there was any."""
    ledger = chooser.ledger
    again = [(d.buffer, d.before) for d in ledger.decisions().recomputes]
    sent = sorted(chooser.forced)
    if not again and not sent:
        return False
    count = draw.choice(TAKEN_BACK)
    if again and draw.random() < 0.5:
        _, centre = draw.choice(again)
        chosen = sorted(again, key=lambda decision: abs(decision[1] - centre) + draw.random())[:count]
    else:
        chosen = draw.sample(again, min(count, len(again)))
    for buffer, position in chosen:
        if ledger.repeats(buffer, position):
            ledger.drop(buffer, position)
    for buffer in draw.sample(sent, min(draw.randrange(count + 1), len(sent))):
        chooser.forced.discard(buffer)
        ledger.stay(buffer)
    return True

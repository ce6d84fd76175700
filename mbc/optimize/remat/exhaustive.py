"""Exhaustive search over all sets of recomputations, where few values can be recomputed.

The fastest set that fits is then proved to be optimal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import Decisions
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger


def fastest_first(ledger: Ledger, excess_bytes: NDArray[np.int64], limit_us: float) -> Sequence[Decisions]:
    """Return the sets of recomputations that take less than `limit_us`, fastest first; none if there are too many.

    The sets are those of gaps over regions that exceed the available bytes, each recomputed where the gap ends.

    Args:
        ledger: A ledger without entries.
        excess_bytes: Bytes by which each region exceeds the available bytes, with everything kept.
        limit_us: Time of recomputations.
    """
    gaps: dict[Gap, None] = {}
    for position in np.flatnonzero(excess_bytes > 0):
        over = (ledger.gap(b, int(position)) for b in ledger.movable if ledger.can_recompute(b))
        gaps |= dict.fromkeys(gap for gap in over if gap is not None)
        if len(gaps) > effort.EXHAUSTIVE_GAPS:
            return ()
    # Sets grow from the last gap to the first: recomputing one value may need another that is defined earlier.
    ordered = sorted(gaps, key=lambda gap: (-gap.after, gap.before, gap.buffer))
    sets: list[tuple[float, Decisions]] = []

    def extend(index: int) -> None:
        if ledger.recompute_us >= limit_us:
            return
        if index == len(ordered):
            sets.append((ledger.recompute_us, ledger.decisions()))
            return
        extend(index + 1)
        start = ledger.mark()
        ledger.recompute_chain(ordered[index].buffer, ordered[index].before)
        extend(index + 1)
        ledger.undo(start)

    extend(0)
    return [decisions for _, decisions in sorted(sets, key=lambda timed: timed[0])[: effort.EXHAUSTIVE_MEASURED]]

"""Exhaustive search over all sets of recomputations, where few values can be recomputed: the fastest that fits is then
proved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import Decisions
from mbc.optimize.remat.live_bytes_ledger import Gap, Ledger


def fastest_first(ledger: Ledger, excess_bytes: NDArray[np.int64], limit_us: float) -> Sequence[Decisions]:
    """The sets of gaps over regions that exceed the available bytes (`excess_bytes`, with everything kept), each
    recomputed where it ends, that take less than `limit_us`; none where there are too many. `ledger`: one without
    entries."""
    gaps: dict[Gap, None] = {}
    for position in np.flatnonzero(excess_bytes > 0):
        found = (ledger.gap(b, int(position)) for b in ledger.movable if ledger.can_recompute(b))
        gaps |= dict.fromkeys(gap for gap in found if gap is not None)
        if len(gaps) > effort.EXHAUSTIVE_GAPS:
            return ()
    # A value that is defined earlier may be needed to recompute the others.
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
    return [decisions for _, decisions in sorted(sets, key=lambda found: found[0])[: effort.EXHAUSTIVE_MEASURED]]

"""Segment rematerialization: the forward pass is cut into segments, and only what a later segment reads is kept.

Where the budget is a small part of what a step without a limit takes, choosing gap by gap ends in values that are
recomputed over and over. This starts at the other end (Chen et al., "Training deep nets with sublinear memory cost",
2016): a segment is recomputed as a whole when the backward pass arrives at it. What fits the budget is kept after all.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mbc.optimize import effort
from mbc.optimize.remat.live_bytes_ledger import Ledger


def cut_into_segments(ledger: Ledger, peak: int, segment_bytes: int) -> None:
    """Enter that everything needed on both sides of run `peak` is recomputed, except the values between segments of
    `segment_bytes`, what cannot be recomputed, and what is offloaded."""
    movable = [b for b in ledger.movable if 0 <= ledger.made[b] < peak and ledger.gap(b, peak) is not None]
    kept = _depth_first_values(ledger, movable, peak, segment_bytes)
    # The last value first: its operands are live, and are then needed at the same moment.
    for buffer in sorted(movable, key=lambda b: (-ledger.made[b], -b)):
        gap = ledger.gap(buffer, peak)
        if buffer not in kept and gap is not None and ledger.can_repeat(buffer):
            ledger.recompute(buffer, gap.before)


def _depth_first_values(ledger: Ledger, movable: Collection[int], peak: int, segment_bytes: int) -> frozenset[int]:
    made_bytes = np.zeros(peak + 1, np.int64)
    crossing_bytes = np.zeros(peak + 1, np.int64)  # what is read behind a run of what was made up to it
    last = {b: ledger.last_touch(b, peak) for b in movable}
    for b in movable:
        made_bytes[ledger.made[b]] += ledger.size_bytes[b]
        crossing_bytes[ledger.made[b] : last[b]] += ledger.size_bytes[b]
    total = np.cumsum(made_bytes)
    found: set[int] = set()
    start = 0
    while total[peak] - start > segment_bytes:
        first = int(np.searchsorted(total, start + segment_bytes))
        stop = int(np.searchsorted(total, start + effort.SEGMENT_STRETCH * segment_bytes))
        cut = first + int(np.argmin(crossing_bytes[first : max(stop, first + 1)]))
        found.update(b for b in movable if ledger.made[b] <= cut < last[b])
        start = int(total[cut])
    return frozenset(found)

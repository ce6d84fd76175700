"""Segment rematerialization: the forward pass is cut into segments, and only values that later segments read are kept.

Where the budget is a small part of the bytes of a step without a limit, the greedy choice ends in values that are
recomputed many times. Segments start from the other extreme (Chen et al., "Training deep nets with sublinear memory
cost", 2016): a segment is recomputed as a whole when the backward pass arrives at it. Values that then fit the budget
are kept.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mbc.optimize import effort
from mbc.optimize.remat.live_bytes_ledger import Ledger


def cut_into_segments(ledger: Ledger, peak: int, segment_bytes: int) -> None:
    """Enter that everything needed on both sides of region `peak` is recomputed, except values between segments.

    Values that cannot be recomputed, or that are offloaded, are not recomputed either.

    Args:
        ledger: The decisions.
        peak: The region where the forward pass ends.
        segment_bytes: Bytes of the values that a segment defines.
    """
    movable = [b for b in ledger.movable if 0 <= ledger.defined_at[b] < peak and ledger.gap(b, peak) is not None]
    kept = _boundary_values(ledger, movable, peak, segment_bytes)
    # The last value is entered first: its operands are still live then, and are needed at the same position.
    for buffer in sorted(movable, key=lambda b: (-ledger.defined_at[b], -b)):
        gap = ledger.gap(buffer, peak)
        if buffer not in kept and gap is not None and ledger.can_recompute(buffer):
            ledger.recompute_chain(buffer, gap.before)


def _boundary_values(ledger: Ledger, movable: Collection[int], peak: int, segment_bytes: int) -> frozenset[int]:
    made_bytes = np.zeros(peak + 1, np.int64)
    crossing_bytes = np.zeros(peak + 1, np.int64)  # by region: bytes of values defined up to it and read after it
    last = {b: ledger.last_touch(b, peak) for b in movable}
    for b in movable:
        made_bytes[ledger.defined_at[b]] += ledger.size_bytes[b]
        crossing_bytes[ledger.defined_at[b] : last[b]] += ledger.size_bytes[b]
    total = np.cumsum(made_bytes)
    boundary: set[int] = set()
    start = 0
    while total[peak] - start > segment_bytes:
        first = int(np.searchsorted(total, start + segment_bytes))
        stop = int(np.searchsorted(total, start + effort.SEGMENT_STRETCH * segment_bytes))
        cut = first + int(np.argmin(crossing_bytes[first : max(stop, first + 1)]))
        boundary.update(b for b in movable if ledger.defined_at[b] <= cut < last[b])
        start = int(total[cut])
    return frozenset(boundary)

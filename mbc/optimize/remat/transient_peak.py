"""The transient peak: bytes that are live only just before a region, while values are recomputed one after another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mbc.optimize.schedule.regions import Region


@dataclass(frozen=True, slots=True)
class SizedRegions:
    """The regions of a program, the bytes of each value, and the workspace of each region."""

    regions: Sequence[Region]
    value_bytes: Sequence[int]
    scratch_bytes: Sequence[int]


def transient_bytes(sized: SizedRegions, recomputed: Sequence[int], before: int, staying: Collection[int]) -> int:
    """Return the bytes by which the peak of recomputations before a region exceeds that of the region itself.

    Args:
        sized: The regions of the program.
        recomputed: Regions that are executed again, in order.
        before: The region.
        staying: Recomputed values that are live at region `before` or later. Others are freed after their last read.
    """
    regions, sizes, scratch_bytes = sized.regions, sized.value_bytes, sized.scratch_bytes
    last = {b: i for i, region in enumerate(recomputed) for b in regions[region].reads} if len(recomputed) > 1 else {}
    # Bytes relative to the region's live bytes: its outputs, its workspace and the staying values are not live yet.
    live_bytes = -sum([sizes[b] for b in regions[before].writes]) - scratch_bytes[before]
    live_bytes -= sum([sizes[b] for b in staying])
    freed_bytes = [0] * len(recomputed)
    peak_bytes = 0
    for i, region in enumerate(recomputed):
        for b in regions[region].writes:
            live_bytes += sizes[b]
            # A value that region `before` overwrites is live to the end.
            if b not in staying and b not in regions[before].reads:
                freed_bytes[last.get(b, i)] += sizes[b]
        peak_bytes = max(peak_bytes, live_bytes + scratch_bytes[region])
        live_bytes -= freed_bytes[i]
    return peak_bytes

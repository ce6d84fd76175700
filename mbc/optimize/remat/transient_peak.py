"""The transient peak: bytes that are live just before a run only, while values are recomputed there one after
another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mbc.optimize.schedule.regions import Run


def transient_bytes(
    again: Sequence[int],
    runs: Sequence[Run],
    sizes: Sequence[int],
    scratch_bytes: Sequence[int],
    before: int,
    staying: Collection[int],
) -> int:
    """By how many bytes the peak, while the runs of `again` are repeated in this order, exceeds that of run `before`
    itself.

    `sizes`: bytes by value; `scratch_bytes`: workspace by run; `staying`: recomputed values that stay live for run
    `before` or later. The others are freed after their last read.
    """
    last = {b: i for i, run in enumerate(again) for b in runs[run].reads} if len(again) > 1 else {}
    # On top of what is live for the run: its own outputs and workspace, and what will stay, are still to come.
    level = -sum([sizes[b] for b in runs[before].writes]) - scratch_bytes[before]
    level -= sum([sizes[b] for b in staying])
    gone = [0] * len(again)
    most = 0
    for i, run in enumerate(again):
        for b in runs[run].writes:
            level += sizes[b]
            # What run `before` writes over is there to the end.
            if b not in staying and b not in runs[before].reads:
                gone[last.get(b, i)] += sizes[b]
        most = max(most, level + scratch_bytes[run])
        level -= gone[i]
    return most

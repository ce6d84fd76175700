"""Lower bound of the peak live bytes of one draft under any decisions: each launch needs its operands.

Where the bound exceeds the available bytes no decision makes the draft fit, so that no search is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from mbc.hardware.streams import Space, aligned
from mbc.optimize.remat.optimizer_offload import persistent_bytes
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.in_place import InPlace, overwritten
from mbc.optimize.schedule.liveness import owners
from mbc.optimize.schedule.regions import Region


def operand_peak_bytes(
    draft: Draft,
    regions: Sequence[Region],
    in_place: InPlace,
    saved_bytes: Mapping[tuple[str, ...], int],
    replaceable: Collection[int],
) -> int:
    """Return the most bytes that the launches of a region touch at once, with workspace and everything persistent.

    Decisions give a value other live ranges, but each serves whole regions: a buffer that a region touches in two of
    its launches is live in between.

    Args:
        draft: Launches and buffers.
        regions: Regions of the training program.
        in_place: Operands that launches may overwrite.
        saved_bytes: Bytes by which the workspace of a launch may shrink, by the launch's operations.
        replaceable: Regions some of whose operands another launch may not need.
    """
    launches, buffers, owner = draft.train.launches, draft.buffers, owners(draft.buffers)
    counted = [buffer.space is Space.ARENA for buffer in buffers]
    for buffer in draft.persistent:
        counted[buffer] = False
    changes = [0] * (len(launches) + 1)

    def count(size_bytes: int, first: int, last: int) -> None:
        changes[first] += size_bytes
        changes[last + 1] -= size_bytes

    for number, region in enumerate(regions):
        if number in replaceable:
            continue
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i in range(region.start, region.stop):
            count(-saved_bytes.get(launches[i].operations, 0), i, i)
            for access in launches[i].accesses:
                first.setdefault(owner[access.buffer], i)
                last[owner[access.buffer]] = i
        for buffer, start in first.items():
            if counted[buffer]:
                count(aligned(buffers[buffer].size_bytes), start, last[buffer])
        for old, new in set(_in_place_pairs(draft, region, in_place, owner)):
            if counted[new] and first[new] <= last[old]:  # `old` and `new` share their bytes
                count(-aligned(buffers[new].size_bytes), first[new], min(last[old], last[new]))
    return max(accumulate(changes)) + persistent_bytes(draft)


def _in_place_pairs(draft: Draft, region: Region, in_place: InPlace, owner: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the buffers that launches of the region may overwrite, and those that they write there."""
    for launch in draft.train.launches[region.start : region.stop]:
        for old, new in overwritten(launch, draft.buffers, in_place):
            if draft.buffers[new].alias is None and draft.buffers[old].size_bytes == draft.buffers[new].size_bytes:
                yield owner[old], new

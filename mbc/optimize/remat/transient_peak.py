"""The transient peak: bytes that are live only just before a region, while values are recomputed one after another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from mbc.optimize.schedule.regions import Region


@dataclass(frozen=True, slots=True)
class SizedRegions:
    """The regions of a program, where each value is defined and read, its bytes, and the workspace of each region."""

    regions: Sequence[Region]
    defined_at: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    value_bytes: Sequence[int]
    scratch_bytes: Sequence[int]


class TransientPeak:
    """The bytes by which the peak of recomputations before a region exceeds that of the region itself.

    A segment may recompute thousands of values before one region. So after a change only the regions that it affects
    are looked at again. The object is mutable.
    """

    def __init__(self, sized: SizedRegions, before: int) -> None:
        """Start without recomputations.

        Args:
            sized: The regions of the program.
            before: The region.
        """
        self._sized = sized
        self._before = before
        self._staying: set[int] = set()
        self._staying_bytes = 0
        # The recomputed regions in order, and for each: the bytes live after it, and at it, less those before it.
        self._order: list[int] = []
        self._after_bytes: list[int] = []
        self._peak_bytes: list[int] = []

    def update(self, recomputed: Collection[int], changed: Iterable[int], staying: Collection[int]) -> None:
        """Take changes into account.

        Args:
            recomputed: All regions that are executed again, as a set.
            changed: Values whose region was or is recomputed, or that are freed elsewhere than before.
            staying: Those of them that are live at the region or later. Others are freed after their last read.
        """
        sized, order = self._sized, self._order
        regions = sized.regions
        pending: list[int] = []
        for value in changed:
            if (value in staying) != (value in self._staying):
                self._staying ^= {value}
                self._staying_bytes += sized.value_bytes[value] * (1 if value in staying else -1)
            pending += self._touching(value)
        done: set[int] = set()
        while pending:
            region = pending.pop()
            if region in done:
                continue
            done.add(region)
            at = bisect_left(order, region)
            is_listed = at < len(order) and order[at] == region
            if (region in recomputed) != is_listed:  # its operands are freed elsewhere than before
                for value in (*regions[region].reads, *regions[region].writes):
                    pending += self._touching(value)
            if is_listed:
                del order[at], self._after_bytes[at], self._peak_bytes[at]
            if region in recomputed:
                made_bytes = sum([sized.value_bytes[value] for value in regions[region].writes])
                order.insert(at, region)
                self._after_bytes.insert(at, made_bytes - self._freed_bytes(region, recomputed))
                self._peak_bytes.insert(at, made_bytes + sized.scratch_bytes[region])

    @property
    def bytes(self) -> int:
        """Bytes of the peak above the live bytes of the region; 0 if it is not above."""
        sized, before = self._sized, self._before
        # The region's outputs, its workspace and the staying values are not live yet.
        missing_bytes = sum([sized.value_bytes[value] for value in sized.regions[before].writes])
        missing_bytes += sized.scratch_bytes[before] + self._staying_bytes
        before_bytes = accumulate(self._after_bytes, initial=-missing_bytes)
        return max(0, max(map(add, before_bytes, self._peak_bytes), default=0))

    def _touching(self, value: int) -> Sequence[int]:
        """Return the regions that define and read a value."""
        return self._sized.defined_at[value], *self._sized.readers.get(value, ())

    def _freed_bytes(self, region: int, recomputed: Collection[int]) -> int:
        """Return the bytes of the recomputed values that are freed after a region."""
        sized, held = self._sized, self._sized.regions[self._before].reads
        touched = [b for b in sized.regions[region].reads if sized.defined_at[b] in recomputed]
        return sum(
            sized.value_bytes[b]
            for b in (*touched, *sized.regions[region].writes)
            # A value that region `before` overwrites is live to the end.
            if b not in self._staying
            and b not in held
            and not any(reader > region and reader in recomputed for reader in sized.readers.get(b, ()))
        )

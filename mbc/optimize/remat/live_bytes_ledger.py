"""The live-bytes ledger: the uses and decisions of every value, and the bytes that are live at each region.

Positions are indices of regions. A value has one live range from its definition, and one from every position where it
is recomputed or prefetched. A read belongs to the live range that started last, and a live range ends with its last
read. In-place operations count in the regions themselves, not in recomputations, so that a decision is entered within
microseconds; `rewrite` and `blocks` give the exact live bytes. `mbc.optimize.remat.undo_log` keeps the entries.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import Space
from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import Decisions, Offload, Recompute
from mbc.optimize.remat.undo_log import Away, UndoLog, WorkspaceCut

NO_CHAIN: tuple[float, Sequence[int]] = (math.inf, ())


@dataclass(frozen=True, slots=True)
class Gap:
    """A region that does not touch a value is between two uses of the value, at regions `after` and `before`."""

    buffer: int
    after: int
    before: int


class Ledger(UndoLog):
    """The ledger. It is mutable: decisions are entered one by one."""

    def decisions(self) -> Decisions:
        """Return all decisions that are entered."""
        offloads = (Offload(b, *away) for b, away in sorted(self.offloads.items()))
        return Decisions(tuple(Recompute(b, p) for b, p in self.recomputed()), tuple(offloads))

    def recomputed(self) -> list[tuple[int, int]]:
        """Return the recomputed values, each with the region before which it is recomputed, in the order of regions."""
        return [(b, p) for p, b in sorted([(p, b) for (_, p), outputs in self._recomputed.items() for b in outputs])]

    def recomputed_us(self) -> NDArray[np.float64]:
        """Return the time of the recomputations just before each region."""
        times_us = np.zeros(len(self.regions) + 1)
        for region, position in self._recomputed:
            times_us[position] += self.recompute_us_of(region, position)
        return times_us

    def workspace_cuts_us(self) -> float:
        """Return the additional time of regions with less workspace, recomputations included."""
        if not self.workspace_cuts:
            return 0.0
        times = Counter(region for region, _ in self._recomputed)
        return sum(cut.more_us * (1 + times.get(region, 0)) for region, cut in sorted(self.workspace_cuts.items()))

    def times(self, region: int) -> int:
        """Return how often a region is executed, recomputations included."""
        return 1 + len(self._recomputed_before.get(region, ()))

    def cut_workspace(self, region: int, cut: WorkspaceCut | None) -> None:
        """Enter that a region has less workspace; None: as much as was selected."""
        if region in self.workspace_cuts:
            self._enter_workspace_cut(False, region, self.workspace_cuts[region])
        if cut is not None:
            self._enter_workspace_cut(True, region, cut)

    def gap(self, buffer: int, position: int) -> Gap | None:
        """Return the gap of a value over a region that does not touch it; None if it is not live there."""
        reads, defined_at = self.reads[buffer], self.defined_at[buffer]
        k = bisect_left(reads, position)
        if k == len(reads) or reads[k] == position or defined_at >= position:
            return None
        starts, before = self.starts.get(buffer), reads[k]
        s = bisect_right(starts, before) if starts else 0
        started = starts[s - 1] if starts and s else defined_at
        if started >= position:
            return None
        return Gap(buffer, max(reads[k - 1] if k else started, started), before)

    def gaps(self, position: int) -> list[tuple[int, int, float]]:
        """Return the movable values that have a gap over a region.

        Each has the position where the gap ends, and the least time to recompute the value before it.
        """
        gaps: list[tuple[int, int, float]] = []
        for buffer in self.across(position):  # values that are defined before the region and read after it
            reads, starts, defined_at = self.reads[buffer], self.starts.get(buffer), self.defined_at[buffer]
            before = reads[bisect_left(reads, position)]
            if before == position:
                continue
            if starts:
                s = bisect_right(starts, before)
                if s and starts[s - 1] >= position:
                    continue
            key = defined_at, before
            if not self._recomputable[defined_at]:
                least_us = math.inf
            elif key in self._recomputed:
                least_us = 0.0
            else:
                least_us = (
                    self.recompute_us_of(defined_at, before)
                    if key in self._fused_remat
                    else self._own_launch_us[defined_at]
                )
            gaps.append((buffer, before, least_us))
        return gaps

    def can_recompute(self, buffer: int) -> bool:
        """Return whether a value can be recomputed."""
        return self._recomputable[self.defined_at[buffer]]

    def chain(self, buffer: int, position: int) -> tuple[float, Sequence[int]]:
        """Return the recomputation chain of a value before a region.

        Returns:
            Microseconds in addition to the recomputations that are already entered, and the values of the chain. The
                time is
            infinite if there is no chain.
        """
        asked = buffer, position
        if asked not in self._chains:  # a chain is usually priced several times before it is entered
            self._chains[asked] = self._find_chain(buffer, position)
        return self._chains[asked]

    def _find_chain(self, buffer: int, position: int) -> tuple[float, Sequence[int]]:
        most_chain = max(effort.CHAIN_MIN_VALUES, effort.CHAIN_WORK // max(1, len(self.regions)))
        chain: dict[int, None] = {}
        total_us = 0.0
        paid: set[tuple[int, int]] = set()
        pending = [buffer]
        while pending:
            wanted = pending.pop()
            if wanted in chain:
                continue
            chain[wanted] = None
            region = self.defined_at[wanted]
            if len(chain) > most_chain or region >= position or not self._recomputable[region]:
                return NO_CHAIN
            key = region, position
            if key in paid or key in self._recomputed:
                continue
            paid.add(key)
            if position > self._valid_until_all[region] and not self._readable(region, position):
                return NO_CHAIN
            later = self._next_recompute(wanted, position) if wanted != buffer else None
            if key in self._displaced:
                total_us += self.displaced_us(region, position)
            recompute_us = (
                self.recompute_us_of(region, position, paid)
                if key in self._fused_remat
                else self._own_launch_us[region]
            )
            total_us += recompute_us - (0.0 if later is None else self.recompute_us_of(region, later))
            for source in (
                self.live_operands(region, position) if key in self._fused_remat else self._movable_reads[region]
            ):
                # Most values have a single live range; this test is the first part of `resident`, inlined.
                there = not self.starts.get(source) and self.reads[source][-1] >= position
                if not there and not self.resident(source, position) and not self._can_prefetch(source, position):
                    pending.append(source)
        return total_us, list(chain)

    def resident(self, buffer: int, position: int) -> bool:
        """Return whether the value is live for a read just before a region."""
        starts, reads = self.starts.get(buffer), self.reads[buffer]
        if not starts:  # most values have a single live range
            return reads[-1] >= position > self.defined_at[buffer]
        s = bisect_right(starts, position)
        if s and starts[s - 1] == position:
            return True
        if buffer in self.offloads and position < self.offloads[buffer].out and self.defined_at[buffer] < position:
            return True
        end = starts[s] if s < len(starts) else len(self.regions) + 1
        k = bisect_left(reads, position)
        return k < len(reads) and reads[k] < end and self.defined_at[buffer] < position

    def recompute_chain(self, buffer: int, position: int) -> None:
        """Enter the chain that recomputes `buffer`.

        Values of the chain that would be recomputed later are recomputed now, and kept.
        """
        _, chain = self.chain(buffer, position)
        for wanted in chain if self.offloads else ():
            for source in self.live_operands(self.defined_at[wanted], position):
                if not self.resident(source, position) and self._can_prefetch(source, position):
                    self.offload(source, self.offloads[source].out, position)
        for wanted in chain:
            self.recompute_value(wanted, position)
        for wanted in chain:
            later = self._next_recompute(wanted, position) if wanted != buffer else None
            if later is not None:
                self.drop_recompute(wanted, later)

    def recompute_value(self, buffer: int, position: int) -> None:
        """Enter that a value is recomputed before a region, from the values that are live then."""
        region = self.defined_at[buffer]
        outputs = self._recomputed.get((region, position))
        if not outputs:
            for source in self.live_operands(region, position):
                self._enter_read(True, source, position)
        if not outputs or buffer not in outputs:
            self._enter_recompute(True, buffer, position)

    def offload(self, buffer: int, out: int, back: int, space: Space | None = None) -> None:
        """Enter, or move, the offload of a value.

        Args:
            buffer: The value.
            out: Region before which the copy out is listed.
            back: Region before which the copy back is listed.
            space: Where to; by default the space where the value is offloaded already, else the host.
        """
        current = self.offloads.get(buffer)
        if current is not None:
            self._enter_offload(False, buffer, current)
        self._enter_offload(True, buffer, Away(out, back, space or (current.space if current else Space.HOST)))

    def keep(self, buffer: int) -> None:
        """Undo the offload of a value."""
        self._enter_offload(False, buffer, self.offloads[buffer])

    def first_read(self, buffer: int, position: int) -> int:
        """Return the first region at or after a position that reads the value."""
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        return reads[k] if k < len(reads) else len(self.regions)

    def last_touch(self, buffer: int, position: int) -> int:
        """Return the last region before a position that reads or defines the value."""
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        return max(self.defined_at[buffer], reads[k - 1] if k else -1)

    def recomputed_at(self, position: int) -> list[int]:
        """Return the values that are recomputed just before a region."""
        return sorted(b for (_, at), outputs in self._recomputed.items() if at == position for b in outputs)

    def operand_bytes(self, buffer: int) -> int:
        """Return the bytes of the operands and results of the region that defines the value."""
        region = self.regions[self.defined_at[buffer]]
        return sum(self.size_bytes[b] for b in {*region.reads, *region.writes})

    def is_recomputed(self, buffer: int, position: int) -> bool:
        """Return whether a value is recomputed before a region."""
        return buffer in self._recomputed.get((self.defined_at[buffer], position), ())

    def absent(self, buffer: int, position: int) -> tuple[int, int]:
        """Return the regions [start, stop) over which a value that is recomputed at a position is not live."""
        keep = bisect_right(self.starts[buffer], position) - 1
        return self._live_range(buffer, keep)[1], position

    def drop_recompute(self, buffer: int, position: int) -> None:
        """Undo a recomputation, with those of its chain that nothing else reads."""
        pending = [buffer]  # a chain may be longer than Python's stack
        while pending:
            buffer = pending.pop()
            if not self.is_recomputed(buffer, position):
                continue
            region = self.defined_at[buffer]
            self._enter_recompute(False, buffer, position)
            if (region, position) in self._recomputed:
                continue
            for source in self.live_operands(region, position):
                self._enter_read(False, source, position)
                # The source was recomputed for this recomputation only.
                if self.is_recomputed(source, position) and not self._used(source, position):
                    pending.append(source)

    def _can_prefetch(self, buffer: int, position: int) -> bool:
        """Return whether the value is offloaded then and prefetched later: it could be prefetched earlier."""
        if buffer not in self.offloads:
            return False
        out, back, _ = self.offloads[buffer]
        starts = self.starts[buffer]
        s = bisect_right(starts, position)
        return out <= position < back and starts[s] == back and self.first_read(buffer, position) >= back

    def _next_recompute(self, buffer: int, position: int) -> int | None:
        """Return the next position at which the value is recomputed, if that comes before its prefetch."""
        starts = self.starts.get(buffer)
        s = bisect_right(starts, position) if starts else 0
        if starts and s < len(starts) and buffer in self._recomputed.get((self.defined_at[buffer], starts[s]), ()):
            return starts[s]
        return None

    def _used(self, buffer: int, start: int) -> bool:
        """Return whether the live range that starts there is read."""
        reads, starts = self.reads[buffer], self.starts[buffer]
        k, s = bisect_left(reads, start), bisect_right(starts, start)
        return k < len(reads) and (s == len(starts) or reads[k] < starts[s])

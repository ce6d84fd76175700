"""The undo log of decisions (recomputations, reads, offloads, smaller workspaces), and the live bytes they lead to.

Every entry can be undone, newest first, within microseconds: a round of local search makes a hundred, and most rounds
are undone. An operand that a region overwrites in place counts once with its result. Values that are live only between
recomputations are counted by `mbc.optimize.remat.transient_peak`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import STREAM_TO, Space, aligned
from mbc.optimize.remat.fused_remat import FusedRematLaunches
from mbc.optimize.remat.transient_peak import SizedRegions, TransientPeak
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region

_Span = tuple[int, int]  # regions [start, stop)


class Away(NamedTuple):
    """An offload of a value.

    Attributes:
        out: Region just before which the value is copied out of the arena.
        back: Region just before which it is copied back.
        space: Where it is in between.
    """

    out: int
    back: int
    space: Space


@dataclass(frozen=True, slots=True)
class WorkspaceCut:
    """Less workspace for a region, and its additional time."""

    freed_bytes: int
    more_us: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the log to return to.

    It has the number of entries, and copies of the data that are restored faster as a whole than entry by entry.
    """

    entries: int
    touched: int
    live_bytes: NDArray[np.int64]
    spans: NDArray[np.int64]
    transient_bytes: dict[int, int]
    changed: frozenset[int]


class UndoLog:
    """The log. It is mutable: entries are added and undone."""

    def __init__(
        self,
        draft: Draft,
        regions: Sequence[Region],
        small_bytes: int,
        in_place: Collection[tuple[int, int]] = (),
        fused_remat: FusedRematLaunches | None = None,
    ) -> None:
        """Start an empty log.

        Args:
            draft: Launches and buffers.
            regions: Regions of the training program.
            small_bytes: Size up to which values are always kept.
            in_place: Regions and the values that they overwrite if nothing needs them any more.
            fused_remat: Fused rematerializations, which cost less than recomputing their region.
        """
        self.regions = regions
        self._fused_remat = fused_remat or {}
        # For each recomputation: the fused rematerializations that it changes.
        self._displaced: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for key, launch in self._fused_remat.items():
            for other in launch.conflicts:
                self._displaced.setdefault(other, []).append(key)
        self.size_bytes = [aligned(b.size_bytes) if b.space is Space.ARENA else 0 for b in draft.buffers]
        self.defined_at: dict[int, int] = dict.fromkeys(draft.train.entry, -1)
        self.reads: dict[int, list[int]] = {}
        self.starts: dict[int, list[int]] = {}
        self.offloads: dict[int, Away] = {}
        self.offloaded_bytes = dict.fromkeys(STREAM_TO, 0)  # bytes of `offloads` by space
        self._own_launch_us = [region.recompute_us for region in regions]  # time to recompute each by its own launch
        self._recomputable = [
            *(region.recomputable for region in regions),
            False,
        ]  # the last entry: values of no region
        self._recomputed: dict[tuple[int, int], set[int]] = {}  # (region, position) -> outputs that are read
        self.recompute_us = 0.0  # time of all recomputations
        self._journal: list[tuple[Callable[..., None], Any]] = []  # functions that undo entries
        self._chains: dict[tuple[int, int], tuple[float, Sequence[int]]] = {}  # computed since the last entry
        valid = self._valid_until = dict[int, int]()  # by state: the region that overwrites it with its next version
        for i, region in enumerate(regions):
            for buffer in region.reads:
                self.reads.setdefault(buffer, []).append(i)
            for buffer in region.writes:
                self.defined_at[buffer] = i
                alias = draft.buffers[buffer].alias
                if alias is not None:
                    self._valid_until[alias] = i
        # Outputs that a recomputation of their region does not compute are kept.
        kept = (b for region in regions for b in region.writes if b not in region.recomputed_outputs)
        fixed = frozenset((*draft.persistent, *draft.train.exit, *self._valid_until, *kept))
        self.movable = [
            b
            for b in sorted(self.reads)
            if b not in fixed and draft.buffers[b].alias is None and self.size_bytes[b] > small_bytes
        ]
        self._is_movable = frozenset(self.movable)
        self._movable_reads = [tuple(b for b in region.reads if b in self._is_movable) for region in regions]
        self._valid_until_all = [
            min((valid.get(b, len(regions)) for b in region.reads), default=len(regions)) for region in regions
        ]
        self._row = {b: i for i, b in enumerate(self.movable)}
        self._defined_at = np.array([self.defined_at[b] for b in self.movable], np.int64)
        # For each movable value: where it is read last, and the regions [from, until] of its first absence.
        self._spans: NDArray[np.int64] = np.zeros((3, len(self.movable)), np.int64)
        self._in_place = frozenset(in_place)
        self._scratch_bytes = [_scratch_bytes(draft, region) for region in regions]
        readers = {buffer: tuple(reads) for buffer, reads in self.reads.items()}
        self._sized = SizedRegions(regions, self.defined_at, readers, self.size_bytes, self._scratch_bytes)
        # Live bytes of each region, less those with everything kept.
        self._live_bytes: NDArray[np.int64] = np.zeros(len(regions) + 1, np.int64)
        self._measured_bytes = self._live_bytes.copy()  # `_live_bytes` when the program was measured last
        self._recomputed_regions: dict[int, set[int]] = {}  # position -> regions
        self._recomputed_before: dict[int, set[int]] = {}  # region -> positions
        self._transient_bytes: dict[int, int] = {}  # by position, as they count in `_live_bytes`
        self._changed: set[int] = set()  # positions whose transient bytes are out of date
        self._transients: dict[int, TransientPeak] = {}  # by position
        self._touched: list[tuple[int, int]] = []  # values and positions whose transient peaks entries may have changed
        self._stale: dict[int, set[int]] = {}  # by position: values that its transient peak has to look at again
        self.workspace_cuts: dict[int, WorkspaceCut] = {}  # by region
        for buffer in self.movable:
            self._update_spans(buffer)
        self.empty = self.mark()  # the log without entries

    @property
    def delta_bytes(self) -> NDArray[np.int64]:
        """Live bytes of each region, less those when the program was measured last."""
        for position in tuple(self._changed):
            self._count_transient(position)
        return self._live_bytes - self._measured_bytes

    def delta_at(self, position: int) -> int:
        """Return the live bytes of one region less its live bytes when the program was last measured.

        Transient bytes at other regions are counted only when they are read.
        """
        if position in self._changed:
            self._count_transient(position)
        return int(self._live_bytes[position]) - int(self._measured_bytes[position])

    def measured(self) -> None:
        """Record that the live bytes of each region have been measured with all present entries."""
        for position in tuple(self._changed):
            self._count_transient(position)
        self._measured_bytes = self._live_bytes.copy()

    def recompute_us_of(self, region: int, position: int, given: Collection[tuple[int, int]] = ()) -> float:
        """Return the microseconds to recompute a region just before another, or fused with the launch there.

        Args:
            region: The recomputed region.
            position: The region before which it is recomputed.
            given: Other recomputations that will be entered.
        """
        fused_remat = self._fused_remat.get((region, position))
        possible = fused_remat is not None and fused_remat.is_possible(self._recomputed, given)
        return fused_remat.more_us if fused_remat and possible else self._own_launch_us[region]

    def live_operands(self, region: int, position: int) -> Sequence[int]:
        """Return the movable values that have to be live where a region is recomputed.

        Args:
            region: The recomputed region.
            position: The region before which it is recomputed, or whose launch recomputes it.
        """
        fused_remat = self._fused_remat.get((region, position))
        reads = self._movable_reads[region]
        return [b for b in reads if b not in fused_remat.never_read] if fused_remat else reads

    def _readable(self, region: int, position: int) -> bool:
        """Return whether no operand of a region has been overwritten where the region is recomputed."""
        fused_remat = self._fused_remat.get((region, position))
        never_read = fused_remat.never_read if fused_remat else ()
        return all(
            self._valid_until.get(b, position) >= position or b in never_read for b in self.regions[region].reads
        )

    def displaced_us(self, region: int, position: int) -> float:
        """Return the additional time of other fused rematerializations if a region is recomputed at a position."""
        key = region, position
        if key not in self._displaced:
            return 0.0
        others = (other for other in self._displaced[key] if other in self._recomputed)
        return sum(self.recompute_us_of(*other, given=(key,)) - self.recompute_us_of(*other) for other in others)

    def _recompute_us_around(self, key: tuple[int, int]) -> float:
        """Return the time of a recomputation, if it is entered, and of those that it changes."""
        if key not in self._displaced:
            return self.recompute_us_of(*key) if key in self._recomputed else 0.0
        return sum(self.recompute_us_of(*other) for other in (key, *self._displaced[key]) if other in self._recomputed)

    def across(self, position: int) -> list[int]:
        """Return the movable values that may be live over a region that does not touch them, by a vectorized test."""
        last, away, back = self._spans
        there = self._defined_at < position
        there &= last > position
        there &= (position < away) | (position > back)
        return [self.movable[row] for row in there.nonzero()[0].tolist()]

    def scratch_bytes(self, region: int) -> int:
        """Return the workspace of a region."""
        return self._scratch_bytes[region]

    def mark(self) -> Mark:
        """Return the present state of the log, for `undo`."""
        copies = self._live_bytes.copy(), self._spans.copy(), self._transient_bytes.copy(), frozenset(self._changed)
        return Mark(len(self._journal), len(self._touched), *copies)

    def undo(self, mark: Mark) -> None:
        """Undo every entry since a mark."""
        journal = self._journal
        self._chains.clear()
        while len(journal) > mark.entries:
            undo_entry, entry = journal.pop()
            undo_entry(*entry)
        for position, buffer in self._touched[mark.touched :]:
            self._stale.setdefault(position, set()).add(buffer)
        del self._touched[mark.touched :]
        self._live_bytes[:] = mark.live_bytes
        self._spans[:] = mark.spans
        self._transient_bytes = mark.transient_bytes.copy()
        self._changed = set(mark.changed)

    # Entries, and the functions with which the journal undoes them.

    def _enter_recompute(self, added: bool, buffer: int, position: int) -> None:
        key = self.defined_at[buffer], position
        starts = self.starts.setdefault(buffer, [])
        before_us = self._recompute_us_around(key)
        self._list_recompute(added, buffer, key)
        more_us = self._recompute_us_around(key) - before_us
        self.recompute_us += more_us
        if added:
            number = bisect_right(starts, position)
            whole = self._live_range(buffer, number)
            starts.insert(number, position)
            self._split_live_range(
                1, buffer, number, whole, (self._live_range(buffer, number), self._live_range(buffer, number + 1))
            )
        else:
            number = bisect_right(starts, position) - 1
            parts = self._live_range(buffer, number), self._live_range(buffer, number + 1)
            del starts[number]
            self._split_live_range(-1, buffer, number, self._live_range(buffer, number), parts)
        self._update_spans(buffer)
        self._chains.clear()
        self._journal.append((self._undo_recompute, (added, buffer, key, more_us)))

    def _undo_recompute(self, added: bool, buffer: int, key: tuple[int, int], more_us: float) -> None:
        self._list_recompute(not added, buffer, key)
        self.recompute_us -= more_us
        if added:
            self.starts[buffer].remove(key[1])
        else:
            insort(self.starts[buffer], key[1])

    def _list_recompute(self, added: bool, buffer: int, key: tuple[int, int]) -> None:
        region, position = key
        if added:
            if key not in self._recomputed:
                self._recomputed[key] = set()
                self._recomputed_regions.setdefault(position, set()).add(region)
                self._recomputed_before.setdefault(region, set()).add(position)
            self._recomputed[key].add(buffer)
        else:
            self._recomputed[key].remove(buffer)
            if not self._recomputed[key]:
                del self._recomputed[key]
                self._recomputed_regions[position].remove(region)
                self._recomputed_before[region].remove(position)

    def _split_live_range(self, sign: int, buffer: int, number: int, whole: _Span, parts: tuple[_Span, _Span]) -> None:
        """Count that one live range becomes two, or, with sign -1, that two become one.

        Live ranges are regions [start, stop). The second one starts where the value is recomputed.
        """
        size_bytes = sign * self.size_bytes[buffer]
        (start, stop), (recompute_at, end) = parts
        live_bytes = self._live_bytes
        if (start, end) == whole and stop <= recompute_at:  # nearly always
            live_bytes[stop:recompute_at] -= size_bytes
        else:
            live_bytes[whole[0] : whole[1]] -= size_bytes
            live_bytes[start:stop] += size_bytes
            live_bytes[recompute_at:end] += size_bytes
        self._touch(recompute_at, buffer)
        if number:
            self._touch(start, buffer)

    def _enter_read(self, added: bool, buffer: int, position: int) -> None:
        if buffer not in self._is_movable:
            return  # always live
        reads, starts = self.reads[buffer], self.starts.get(buffer, ())
        number = bisect_right(starts, position) if starts else 0
        at = bisect_left(reads, position)
        later = at if added else at + 1
        last = later == len(reads) or (number < len(starts) and reads[later] >= starts[number])
        before = self._live_range(buffer, number)[1] if last else 0
        if added:
            reads.insert(at, position)
        else:
            del reads[at]
        if last:  # the read is the last of its live range, which now ends elsewhere
            self._update_spans(buffer)
            start, after = self._live_range(buffer, number)
            if after > before:
                self._live_bytes[before:after] += self.size_bytes[buffer]
            elif after < before:
                self._live_bytes[after:before] -= self.size_bytes[buffer]
            if number and after != before:
                self._touch(start, buffer)
        self._chains.clear()
        self._journal.append((self._undo_read, (added, reads, position)))

    def _undo_read(self, added: bool, reads: list[int], position: int) -> None:
        if added:
            reads.remove(position)
        else:
            insort(reads, position)

    def _enter_offload(self, added: bool, buffer: int, away: Away) -> None:
        self._count_live_ranges(buffer, -1)
        self._list_offload(added, buffer, away)
        self._count_live_ranges(buffer, 1)
        self._update_spans(buffer)
        self._chains.clear()
        self._journal.append((self._list_offload, (not added, buffer, away)))

    def _list_offload(self, added: bool, buffer: int, away: Away) -> None:
        if added:
            self.offloads[buffer] = away
            self.offloaded_bytes[away.space] += self.size_bytes[buffer]
            insort(self.starts.setdefault(buffer, []), away.back)
        else:
            del self.offloads[buffer]
            self.offloaded_bytes[away.space] -= self.size_bytes[buffer]
            self.starts[buffer].remove(away.back)

    def _enter_workspace_cut(self, added: bool, region: int, cut: WorkspaceCut) -> None:
        self._list_workspace_cut(added, region, cut)
        self._live_bytes[region] -= cut.freed_bytes if added else -cut.freed_bytes
        self._changed.add(region)
        for position in self._recomputed_before.get(region, ()):
            self._touch(position, self.regions[region].writes[0])
        self._chains.clear()
        self._journal.append((self._list_workspace_cut, (not added, region, cut)))

    def _list_workspace_cut(self, added: bool, region: int, cut: WorkspaceCut) -> None:
        if added:
            self.workspace_cuts[region] = cut
            self._scratch_bytes[region] -= cut.freed_bytes
        else:
            del self.workspace_cuts[region]
            self._scratch_bytes[region] += cut.freed_bytes

    def _update_spans(self, buffer: int) -> None:
        """Keep the spans of a value up to date."""
        row = self._row.get(buffer)
        if row is not None:
            starts = self.starts.get(buffer)
            spans = self._spans
            spans[0, row] = self.reads[buffer][-1]
            spans[1, row] = self._live_range(buffer, 0)[1] if starts else len(self.regions) + 1
            spans[2, row] = starts[0] if starts else -1

    def _count_live_ranges(self, buffer: int, sign: int) -> None:
        for number in range(len(self.starts.get(buffer, ())) + 1):
            self._count_live_range(buffer, number, sign)

    def _count_live_range(self, buffer: int, number: int, sign: int) -> None:
        """Count the bytes of one live range of a value at its regions; ranges are numbered from 0."""
        start, stop = self._live_range(buffer, number)
        self._live_bytes[start:stop] += sign * self.size_bytes[buffer]
        if number:
            self._touch(start, buffer)

    def _touch(self, position: int, buffer: int) -> None:
        """Record that a value may be recomputed before a region, or freed after it, otherwise than so far."""
        self._changed.add(position)
        self._touched.append((position, buffer))
        self._stale.setdefault(position, set()).add(buffer)

    def _live_range(self, buffer: int, number: int) -> tuple[int, int]:
        """Return the regions [start, stop) of one live range of a value; ranges are numbered from 0."""
        reads, starts = self.reads[buffer], self.starts.get(buffer, ())
        start = starts[number - 1] if number else max(self.defined_at[buffer], 0)
        k = bisect_left(reads, starts[number]) if number < len(starts) else len(reads)
        last = reads[k - 1] if k and reads[k - 1] > start else start
        stop = last + 1
        if number and stop == start + 1 and buffer not in self.regions[start].reads:
            return start, start  # an intermediate of a recomputation chain, freed before the region
        if not number and buffer in self.offloads and self.offloads[buffer].out > last:
            return start, max(stop, self.offloads[buffer].out)
        return start, stop - ((last, buffer) in self._in_place)

    def _count_transient(self, position: int) -> None:
        taken = self._transient_at(position)
        self._live_bytes[position] += taken - self._transient_bytes.pop(position, 0)
        if taken:
            self._transient_bytes[position] = taken
        self._changed.remove(position)

    def _transient_at(self, position: int) -> int:
        stale = self._stale.pop(position, ())
        regions = self._recomputed_regions.get(position)
        if not regions:
            self._transients.pop(position, None)
            return 0
        transient = self._transients.get(position)
        if transient is None:
            transient = self._transients[position] = TransientPeak(self._sized, position)
            stale = {buffer for region in regions for buffer in self._recomputed[region, position]}
        recomputed = (b for b in stale if b in self._recomputed.get((self.defined_at[b], position), ()))
        staying = {b for b in recomputed if self._live_range(b, bisect_right(self.starts[b], position))[1] > position}
        transient.update(regions, stale, staying)
        return transient.bytes


def _scratch_bytes(draft: Draft, region: Region) -> int:
    """Return the largest workspace of a launch of a region."""
    return max(
        sum(
            aligned(draft.buffers[a.buffer].size_bytes)
            for a in launch.accesses
            if draft.buffers[a.buffer].value is None
        )
        for launch in draft.train.launches[region.start : region.stop]
    )

"""The undo log of decisions (recomputations, reads, offloads, smaller workspaces), and the live bytes that they lead
to.

Every entry can be taken back in the order in which it was made, within microseconds: a round of local search makes a
hundred, and most rounds are undone. An operand that a run overwrites counts as one value where nothing needs it any
more; what exists between repetitions only is counted where they are (`mbc.optimize.remat.transient_peak`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.optimize.remat.fused_remat import FusedRematRuns
from mbc.optimize.remat.transient_peak import transient_bytes
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Run
from mbc.plan.model import Space, aligned


@dataclass(frozen=True, slots=True)
class Leaner:
    """A run with less workspace, and what it takes longer for that."""

    less_bytes: int
    more_us: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the log to return to: the number of entries, and what is restored faster by a copy than entry by
    entry."""

    entries: int
    taken_bytes: NDArray[np.int64]
    spans: NDArray[np.int64]
    transient_bytes: dict[int, int]
    changed: frozenset[int]


class UndoLog:
    """Mutable. `small_bytes`: values up to that size are always kept. `in_place`: runs and the values that they
    overwrite if nothing needs them any more. `fused_remat`: fused rematerializations, which cost less than their
    run."""

    def __init__(
        self,
        draft: Draft,
        runs: Sequence[Run],
        small_bytes: int,
        in_place: Collection[tuple[int, int]] = (),
        fused_remat: FusedRematRuns | None = None,
    ) -> None:
        self.runs = runs
        self._fused_remat = fused_remat or {}
        self._displaced: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by a repetition: what it changes
        for key, run in self._fused_remat.items():
            for other in run.matters:
                self._displaced.setdefault(other, []).append(key)
        self.size_bytes = [aligned(b.size_bytes) if b.space is Space.ARENA else 0 for b in draft.buffers]
        self.made: dict[int, int] = dict.fromkeys(draft.train.entry, -1)
        self.reads: dict[int, list[int]] = {}
        self.starts: dict[int, list[int]] = {}
        self.offloads: dict[int, tuple[int, int]] = {}  # buffer -> (out, back)
        self.sent_bytes = 0  # of `offloads`
        self._alone_us = [run.again_us for run in runs]  # what each takes to be repeated by itself
        self._can_again = [*(run.again for run in runs), False]  # the last one: what no run makes
        self._again: dict[tuple[int, int], set[int]] = {}  # (run, position) -> outputs that are wanted of it
        self.again_us = 0.0  # of all repetitions
        self._journal: list[tuple[Callable[..., None], Any]] = []  # what takes entries back
        self._chains: dict[tuple[int, int], tuple[float, Sequence[int]]] = {}  # found since the last entry
        valid = self._valid_until = dict[int, int]()  # of states: the run that writes their next version over them
        for i, run in enumerate(runs):
            for buffer in run.reads:
                self.reads.setdefault(buffer, []).append(i)
            for buffer in run.writes:
                self.made[buffer] = i
                alias = draft.buffers[buffer].alias
                if alias is not None:
                    self._valid_until[alias] = i
        left_out = (b for run in runs for b in run.writes if b not in run.made_again)  # of what is recomputed
        fixed = frozenset((*draft.persistent, *draft.train.exit, *self._valid_until, *left_out))
        self.movable = [
            b
            for b in sorted(self.reads)
            if b not in fixed and draft.buffers[b].alias is None and self.size_bytes[b] > small_bytes
        ]
        self._is_movable = frozenset(self.movable)
        self._moves = [tuple(b for b in run.reads if b in self._is_movable) for run in runs]
        self._valid_until_all = [min((valid.get(b, len(runs)) for b in run.reads), default=len(runs)) for run in runs]
        self._row = {b: i for i, b in enumerate(self.movable)}
        self._made_at = np.array([self.made[b] for b in self.movable], np.int64)
        # Of each movable value: where it is read last, and the runs [from, until] over which it is first away.
        self._spans: NDArray[np.int64] = np.zeros((3, len(self.movable)), np.int64)
        self._in_place = frozenset(in_place)
        self._scratch_bytes = [_scratch_bytes(draft, run) for run in runs]
        self._taken_bytes: NDArray[np.int64] = np.zeros(len(runs) + 1, np.int64)  # more at each run than at first
        self._measured_bytes = self._taken_bytes.copy()  # the same when it was measured last
        self._runs_again: dict[int, set[int]] = {}  # position -> runs
        self._transient_bytes: dict[int, int] = {}  # by position, as they are counted
        self._changed: set[int] = set()  # positions at which they may be others by now
        self.leaner: dict[int, Leaner] = {}  # by run
        for buffer in self.movable:
            self._note(buffer)
        self.empty = self.mark()  # nothing is entered

    @property
    def delta_bytes(self) -> NDArray[np.int64]:
        """What more is taken at each run than when it was measured last."""
        for position in tuple(self._changed):
            self._count_transient(position)
        return self._taken_bytes - self._measured_bytes

    def delta_at(self, position: int) -> int:
        """The same at one run; what exists between repetitions at others is left to be counted when it is asked for."""
        if position in self._changed:
            self._count_transient(position)
        return int(self._taken_bytes[position]) - int(self._measured_bytes[position])

    def measured(self) -> None:
        """What is taken at each run has been measured with all that is entered."""
        for position in tuple(self._changed):
            self._count_transient(position)
        self._measured_bytes = self._taken_bytes.copy()

    def again_us_of(self, run: int, position: int, beside: Collection[tuple[int, int]] = ()) -> float:
        """Microseconds of repeating a run just before another, or fused with the launch there. `beside`: other
        repetitions that there will be."""
        fused_remat = self._fused_remat.get((run, position))
        found = fused_remat.beside(self._again, beside) if fused_remat else None
        return found.more_us if found else self._alone_us[run]

    def moved_by(self, run: int, position: int) -> Sequence[int]:
        """The movable values that have to be live where a run is repeated just before another, or fused with the launch
        there."""
        fused_remat = self._fused_remat.get((run, position))
        return [b for b in self._moves[run] if b not in fused_remat.spared] if fused_remat else self._moves[run]

    def _readable(self, run: int, position: int) -> bool:
        """Whether nothing that a run reads where it is repeated has been written over by then."""
        fused_remat = self._fused_remat.get((run, position))
        spared = fused_remat.spared if fused_remat else ()
        return all(self._valid_until.get(b, position) >= position or b in spared for b in self.runs[run].reads)

    def displaced_us(self, run: int, position: int) -> float:
        """Additional time of other fused rematerializations where a run is repeated just before another."""
        key = run, position
        if key not in self._displaced:
            return 0.0
        others = (other for other in self._displaced[key] if other in self._again)
        return sum(self.again_us_of(*other, beside=(key,)) - self.again_us_of(*other) for other in others)

    def _again_us_around(self, key: tuple[int, int]) -> float:
        """What a repetition takes, if it is entered, and those to which it makes a difference."""
        if key not in self._displaced:
            return self.again_us_of(*key) if key in self._again else 0.0
        return sum(self.again_us_of(*other) for other in (key, *self._displaced[key]) if other in self._again)

    def across(self, position: int) -> list[int]:
        """The movable values that may be there over a run that does not touch them, found without a look at each."""
        last, away, back = self._spans
        there = self._made_at < position
        there &= last > position
        there &= (position < away) | (position > back)
        return [self.movable[row] for row in there.nonzero()[0].tolist()]

    def scratch_bytes(self, run: int) -> int:
        """The workspace of a run."""
        return self._scratch_bytes[run]

    def mark(self) -> Mark:
        """For `undo`: the state of the log now."""
        copies = self._taken_bytes.copy(), self._spans.copy(), self._transient_bytes.copy(), frozenset(self._changed)
        return Mark(len(self._journal), *copies)

    def undo(self, mark: Mark) -> None:
        """Undo every entry since."""
        journal = self._journal
        self._chains.clear()
        while len(journal) > mark.entries:
            take_back, entry = journal.pop()
            take_back(*entry)
        self._taken_bytes[:] = mark.taken_bytes
        self._spans[:] = mark.spans
        self._transient_bytes = mark.transient_bytes.copy()
        self._changed = set(mark.changed)

    # Entries, and what the journal takes them back with.

    def _enter_repeat(self, added: bool, buffer: int, position: int) -> None:
        key = self.made[buffer], position
        starts = self.starts.setdefault(buffer, [])
        before_us = self._again_us_around(key)
        self._list_again(added, buffer, key)
        more_us = self._again_us_around(key) - before_us
        self.again_us += more_us
        if added:
            stay = bisect_right(starts, position)
            whole = self._stay(buffer, stay)
            starts.insert(stay, position)
            self._divide(1, buffer, stay, whole, (self._stay(buffer, stay), self._stay(buffer, stay + 1)))
        else:
            stay = bisect_right(starts, position) - 1
            parts = self._stay(buffer, stay), self._stay(buffer, stay + 1)
            del starts[stay]
            self._divide(-1, buffer, stay, self._stay(buffer, stay), parts)
        self._note(buffer)
        self._chains.clear()
        self._journal.append((self._take_back_repeat, (added, buffer, key, more_us)))

    def _take_back_repeat(self, added: bool, buffer: int, key: tuple[int, int], more_us: float) -> None:
        self._list_again(not added, buffer, key)
        self.again_us -= more_us
        if added:
            self.starts[buffer].remove(key[1])
        else:
            insort(self.starts[buffer], key[1])

    def _list_again(self, added: bool, buffer: int, key: tuple[int, int]) -> None:
        run, position = key
        if added:
            if key not in self._again:
                self._again[key] = set()
                self._runs_again.setdefault(position, set()).add(run)
            self._again[key].add(buffer)
        else:
            self._again[key].remove(buffer)
            if not self._again[key]:
                del self._again[key]
                self._runs_again[position].remove(run)

    def _divide(
        self, sign: int, buffer: int, stay: int, whole: tuple[int, int], parts: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        """Count that one stay is two, over runs [start, stop), the second one from where the value is recomputed; -1:
        that these are one."""
        size_bytes = sign * self.size_bytes[buffer]
        (start, stop), (again, end) = parts
        taken_bytes = self._taken_bytes
        if (start, end) == whole and stop <= again:  # nearly always
            taken_bytes[stop:again] -= size_bytes
        else:
            taken_bytes[whole[0] : whole[1]] -= size_bytes
            taken_bytes[start:stop] += size_bytes
            taken_bytes[again:end] += size_bytes
        self._changed.add(again)
        if stay:
            self._changed.add(start)

    def _enter_read(self, added: bool, buffer: int, position: int) -> None:
        if buffer not in self._is_movable:
            return  # it is there anyway
        reads, starts = self.reads[buffer], self.starts.get(buffer, ())
        stay = bisect_right(starts, position) if starts else 0
        at = bisect_left(reads, position)
        later = at if added else at + 1
        last = later == len(reads) or (stay < len(starts) and reads[later] >= starts[stay])
        before = self._stay(buffer, stay)[1] if last else 0
        if added:
            reads.insert(at, position)
        else:
            del reads[at]
        if last:  # of its stay, which ends elsewhere now
            self._note(buffer)
            start, after = self._stay(buffer, stay)
            if after > before:
                self._taken_bytes[before:after] += self.size_bytes[buffer]
            elif after < before:
                self._taken_bytes[after:before] -= self.size_bytes[buffer]
            if stay and after != before:
                self._changed.add(start)
        self._chains.clear()
        self._journal.append((self._take_back_read, (added, reads, position)))

    def _take_back_read(self, added: bool, reads: list[int], position: int) -> None:
        if added:
            reads.remove(position)
        else:
            insort(reads, position)

    def _enter_offload(self, added: bool, buffer: int, places: tuple[int, int]) -> None:
        self._take_all(buffer, -1)
        self._list_offload(added, buffer, places)
        self._take_all(buffer, 1)
        self._note(buffer)
        self._chains.clear()
        self._journal.append((self._list_offload, (not added, buffer, places)))

    def _list_offload(self, added: bool, buffer: int, places: tuple[int, int]) -> None:
        if added:
            self.offloads[buffer] = places
            self.sent_bytes += self.size_bytes[buffer]
            insort(self.starts.setdefault(buffer, []), places[1])
        else:
            del self.offloads[buffer]
            self.sent_bytes -= self.size_bytes[buffer]
            self.starts[buffer].remove(places[1])

    def _enter_leaner(self, added: bool, run: int, how: Leaner) -> None:
        self._list_leaner(added, run, how)
        self._taken_bytes[run] -= how.less_bytes if added else -how.less_bytes
        self._changed.add(run)
        self._changed.update(position for position, runs in self._runs_again.items() if run in runs)
        self._chains.clear()
        self._journal.append((self._list_leaner, (not added, run, how)))

    def _list_leaner(self, added: bool, run: int, how: Leaner) -> None:
        if added:
            self.leaner[run] = how
            self._scratch_bytes[run] -= how.less_bytes
        else:
            del self.leaner[run]
            self._scratch_bytes[run] += how.less_bytes

    def _note(self, buffer: int) -> None:
        """Keep the spans of a value up to date."""
        row = self._row.get(buffer)
        if row is not None:
            starts = self.starts.get(buffer)
            spans = self._spans
            spans[0, row] = self.reads[buffer][-1]
            spans[1, row] = self._stay(buffer, 0)[1] if starts else len(self.runs) + 1
            spans[2, row] = starts[0] if starts else -1

    def _take_all(self, buffer: int, sign: int) -> None:
        for stay in range(len(self.starts.get(buffer, ())) + 1):
            self._take(buffer, stay, sign)

    def _take(self, buffer: int, stay: int, sign: int) -> None:
        """Count the bytes of one stay of a value, the first being 0, at the runs at which they are taken."""
        start, stop = self._stay(buffer, stay)
        self._taken_bytes[start:stop] += sign * self.size_bytes[buffer]
        if stay:
            self._changed.add(start)

    def _stay(self, buffer: int, stay: int) -> tuple[int, int]:
        """The runs [start, stop) at which the bytes of one stay are taken."""
        reads, starts = self.reads[buffer], self.starts.get(buffer, ())
        start = starts[stay - 1] if stay else max(self.made[buffer], 0)
        k = bisect_left(reads, starts[stay]) if stay < len(starts) else len(reads)
        last = reads[k - 1] if k and reads[k - 1] > start else start
        stop = last + 1
        if stay and stop == start + 1 and buffer not in self.runs[start].reads:
            return start, start  # an intermediate of a recomputation chain, freed before the run
        if not stay and buffer in self.offloads and self.offloads[buffer][0] > last:
            return start, max(stop, self.offloads[buffer][0])
        return start, stop - ((last, buffer) in self._in_place)

    def _count_transient(self, position: int) -> None:
        taken = self._transient_at(position)
        self._taken_bytes[position] += taken - self._transient_bytes.pop(position, 0)
        if taken:
            self._transient_bytes[position] = taken
        self._changed.remove(position)

    def _transient_at(self, position: int) -> int:
        again = self._runs_again.get(position)
        if not again:
            return 0
        made = [buffer for run in again for buffer in self._again[run, position]]
        staying = {b for b in made if self._stay(b, bisect_right(self.starts[b], position))[1] > position}
        return transient_bytes(sorted(again), self.runs, self.size_bytes, self._scratch_bytes, position, staying)


def _scratch_bytes(draft: Draft, run: Run) -> int:
    """The most workspace of a launch of a run."""
    return max(
        sum(
            aligned(draft.buffers[a.buffer].size_bytes)
            for a in launch.accesses
            if draft.buffers[a.buffer].value is None
        )
        for launch in draft.train.launches[run.start : run.stop]
    )

"""Entries of what is made again, read, sent away and run with less workspace, and the bytes that they take.

Every entry can be taken back in the order in which it was made, within microseconds. What a run writes over counts as
one value where nobody needs it any more; what exists between repetitions only is counted where they are
(`mbc.optimize.passing`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.optimize.along import AlongRuns
from mbc.optimize.lifetimes import aligned
from mbc.optimize.order import Draft
from mbc.optimize.passing import passing_bytes
from mbc.optimize.runs import Run
from mbc.plan.model import Space


@dataclass(frozen=True, slots=True)
class Leaner:
    """A run with less workspace, and what it takes longer for that."""

    less_bytes: int
    more_us: float


class Books:
    """Mutable. `small_bytes`: values up to that size are always kept. `in_place`: runs and the values that they write
    over if nobody needs them any more. `along`: repetitions that cost less than their run."""

    def __init__(
        self,
        draft: Draft,
        runs: Sequence[Run],
        small_bytes: int,
        in_place: Collection[tuple[int, int]] = (),
        along: AlongRuns | None = None,
    ) -> None:
        self.runs = runs
        self._along = along or {}
        self._displaced: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by a repetition: what it changes
        for key, run in self._along.items():
            for other in run.matters:
                self._displaced.setdefault(other, []).append(key)
        self.size_bytes = [aligned(b.size_bytes) if b.space is Space.ARENA else 0 for b in draft.buffers]
        self.made: dict[int, int] = dict.fromkeys(draft.train.entry, -1)
        self.reads: dict[int, list[int]] = {}
        self.starts: dict[int, list[int]] = {}
        self.offloads: dict[int, tuple[int, int]] = {}  # buffer -> (out, back)
        self.sent_bytes = 0  # of `offloads`
        self._again: dict[tuple[int, int], set[int]] = {}  # (run, position) -> outputs that are wanted of it
        self.again_us = 0.0  # of all repetitions
        self._journal: list[tuple[Any, bool, int, Any]] = []
        self._valid_until: dict[int, int] = {}  # of states: the run that writes their next version over them
        for i, run in enumerate(runs):
            for buffer in run.reads:
                self.reads.setdefault(buffer, []).append(i)
            for buffer in run.writes:
                self.made[buffer] = i
                alias = draft.buffers[buffer].alias
                if alias is not None:
                    self._valid_until[alias] = i
        fixed = frozenset((*draft.persistent, *draft.train.exit, *self._valid_until))
        self.movable = [
            b
            for b in sorted(self.reads)
            if b not in fixed and draft.buffers[b].alias is None and self.size_bytes[b] > small_bytes
        ]
        self._is_movable = frozenset(self.movable)
        self._row = {b: i for i, b in enumerate(self.movable)}
        # Of each movable value: where it is made and read last, and the runs [from, until] over which it is first away.
        self._spans: NDArray[np.int64] = np.zeros((4, len(self.movable)), np.int64)
        self._in_place = frozenset(in_place)
        self._scratch_bytes = [_scratch_bytes(draft, run) for run in runs]
        self._delta_bytes: NDArray[np.int64] = np.zeros(len(runs) + 1, np.int64)
        self._runs_again: dict[int, set[int]] = {}  # position -> runs
        self._passing_bytes: dict[int, int] = {}  # by position, as they are counted
        self._changed: set[int] = set()  # positions at which they may be others by now
        self.leaner: dict[int, Leaner] = {}  # by run
        for buffer in self.movable:
            self._note(buffer)

    @property
    def delta_bytes(self) -> NDArray[np.int64]:
        """What more is taken at each run than when this was last set to 0."""
        for position in tuple(self._changed):
            self._count_passing(position)
        return self._delta_bytes

    def delta_at(self, position: int) -> int:
        """The same at one run; what exists between repetitions at others is left to be counted when it is asked for."""
        if position in self._changed:
            self._count_passing(position)
        return int(self._delta_bytes[position])

    def again_us_of(self, run: int, position: int, beside: Collection[tuple[int, int]] = ()) -> float:
        """Microseconds of a run just before another, or along with what stands there. `beside`: other repetitions that
        there will be."""
        along = self._along.get((run, position))
        found = along.beside(self._again, beside) if along else None
        return found.more_us if found else self.runs[run].again_us

    def read_by(self, run: int, position: int) -> Sequence[int]:
        """What has to be there where a run is repeated just before another, or along with what stands there."""
        along = self._along.get((run, position))
        reads = self.runs[run].reads
        return [b for b in reads if b not in along.spared] if along else reads

    def displaced_us(self, run: int, position: int) -> float:
        """What others that are made again along take more beside a run just before another."""
        key = run, position
        others = (other for other in self._displaced.get(key, ()) if other in self._again)
        return sum(self.again_us_of(*other, beside=(key,)) - self.again_us_of(*other) for other in others)

    def _again_us_around(self, key: tuple[int, int]) -> float:
        """What a repetition takes, if it is entered, and those to which it makes a difference."""
        return sum(self.again_us_of(*other) for other in (key, *self._displaced.get(key, ())) if other in self._again)

    def across(self, position: int) -> list[int]:
        """The movable values that may be there over a run that does not touch them, found without a look at each."""
        made, last, away, back = self._spans
        rows = np.flatnonzero((made < position) & (last > position) & ((position < away) | (position > back)))
        return [self.movable[row] for row in rows.tolist()]

    def scratch_bytes(self, run: int) -> int:
        """The workspace of a run."""
        return self._scratch_bytes[run]

    def mark(self) -> int:
        """For `undo`: the books as they are now."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Take back everything that was entered since."""
        while len(self._journal) > mark:
            entry, added, buffer, position = self._journal.pop()
            entry(not added, buffer, position)
            self._journal.pop()

    # Entries, each of which the journal can take back.

    def _enter_repeat(self, added: bool, buffer: int, position: int) -> None:
        key = self.made[buffer], position
        starts = self.starts.setdefault(buffer, [])
        at = bisect_right(starts, position)
        if added:
            before_us = self._again_us_around(key)
            if key not in self._again:
                self._runs_again.setdefault(position, set()).add(key[0])
            self._again.setdefault(key, set()).add(buffer)
            self.again_us += self._again_us_around(key) - before_us
            self._take(buffer, at, -1)
            starts.insert(at, position)
            self._take(buffer, at, 1)
            self._take(buffer, at + 1, 1)
        else:
            self._take(buffer, at - 1, -1)
            self._take(buffer, at, -1)
            del starts[at - 1]
            self._take(buffer, at - 1, 1)
            before_us = self._again_us_around(key)
            self._again[key].remove(buffer)
            if not self._again[key]:
                del self._again[key]
                self._runs_again[position].remove(key[0])
            self.again_us += self._again_us_around(key) - before_us
        self._note(buffer)
        self._journal.append((self._enter_repeat, added, buffer, position))

    def _enter_read(self, added: bool, buffer: int, position: int) -> None:
        stay = bisect_right(self.starts.get(buffer, ()), position) if buffer in self._is_movable else -1
        before = self._stay(buffer, stay) if stay >= 0 else None
        if added:
            insort(self.reads[buffer], position)
        else:
            self.reads[buffer].remove(position)
        if before is not None:
            self._note(buffer)
            if self._stay(buffer, stay) != before:
                self._delta_bytes[before[0] : before[1]] -= self.size_bytes[buffer]
                self._take(buffer, stay, 1)
        self._journal.append((self._enter_read, added, buffer, position))

    def _enter_offload(self, added: bool, buffer: int, places: tuple[int, int]) -> None:
        self._take_all(buffer, -1)
        if added:
            self.offloads[buffer] = places
            self.sent_bytes += self.size_bytes[buffer]
            insort(self.starts.setdefault(buffer, []), places[1])
        else:
            del self.offloads[buffer]
            self.sent_bytes -= self.size_bytes[buffer]
            self.starts[buffer].remove(places[1])
        self._take_all(buffer, 1)
        self._note(buffer)
        self._journal.append((self._enter_offload, added, buffer, places))

    def _enter_leaner(self, added: bool, run: int, how: Leaner) -> None:
        if added:
            self.leaner[run] = how
        else:
            del self.leaner[run]
        less_bytes = how.less_bytes if added else -how.less_bytes
        self._delta_bytes[run] -= less_bytes
        self._scratch_bytes[run] -= less_bytes
        self._changed.add(run)
        self._changed.update(position for position, runs in self._runs_again.items() if run in runs)
        self._journal.append((self._enter_leaner, added, run, how))

    def _note(self, buffer: int) -> None:
        """Keep the spans of a value up to date."""
        if buffer in self._row:
            starts = self.starts.get(buffer)
            away, back = (self._stay(buffer, 0)[1], starts[0]) if starts else (len(self.runs) + 1, -1)
            self._spans[:, self._row[buffer]] = self.made[buffer], self.reads[buffer][-1], away, back

    def _take_all(self, buffer: int, sign: int) -> None:
        for stay in range(len(self.starts.get(buffer, ())) + 1):
            self._take(buffer, stay, sign)

    def _take(self, buffer: int, stay: int, sign: int) -> None:
        """Count the bytes of one stay of a value, the first being 0, at the runs at which they are taken."""
        start, stop = self._stay(buffer, stay)
        self._delta_bytes[start:stop] += sign * self.size_bytes[buffer]
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
            return start, start  # a step on the way to something else, gone again before the run
        if not stay and buffer in self.offloads and self.offloads[buffer][0] > last:
            return start, max(stop, self.offloads[buffer][0])
        return start, stop - ((last, buffer) in self._in_place)

    def _count_passing(self, position: int) -> None:
        taken = self._passing_at(position)
        self._delta_bytes[position] += taken - self._passing_bytes.pop(position, 0)
        if taken:
            self._passing_bytes[position] = taken
        self._changed.remove(position)

    def _passing_at(self, position: int) -> int:
        again = sorted(self._runs_again.get(position, ()))
        if not again:
            return 0

        staying: set[int] = set()
        for run in again:
            for buffer in self._again[run, position]:
                start, stop = self._stay(buffer, bisect_right(self.starts[buffer], position))
                if start < stop:
                    staying.add(buffer)
        return passing_bytes(again, self.runs, self.size_bytes, self._scratch_bytes, position, staying)


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

"""The books of what is kept: for every value when it is made, read, made again, sent away and fetched back.

Positions are indices of runs. A value has one *stay* from where it is made and one from every position where it is
made again or is back; a read belongs to the stay that started last, and a stay ends with its last read. Of what is done
in place only runs themselves count, not repetitions, so that the books follow a decision within microseconds; how much
is really taken is found by `rewrite` and `blocks`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.optimize.lifetimes import aligned
from mbc.optimize.order import Draft
from mbc.optimize.passing import passing_bytes
from mbc.optimize.residence import Decisions, Offload, Recompute
from mbc.optimize.runs import Run
from mbc.plan.model import Space

# Values that are made again for one, times runs: each may be moved with each. In a deep network some values between
# stay where they are, from which the others are made again.
CHAIN_WORK = 1_500_000
SHORTEST_CHAIN = 60


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two uses of a value, at runs `after` and `before`, that lie on either side of a run."""

    buffer: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class Leaner:
    """A run with less workspace, and what it takes longer for that."""

    less_bytes: int
    more_us: float


class Ledger:
    """Mutable: decisions are entered one by one. `small_bytes`: values up to that size are always kept. `in_place`:
    runs and the values that they write over if nobody needs them any more."""

    def __init__(
        self, draft: Draft, runs: Sequence[Run], small_bytes: int, in_place: Collection[tuple[int, int]] = ()
    ) -> None:
        self.runs = runs
        self.size_bytes = [aligned(b.size_bytes) if b.space is Space.ARENA else 0 for b in draft.buffers]
        self.made: dict[int, int] = dict.fromkeys(draft.train.entry, -1)
        self.reads: dict[int, list[int]] = {}
        self.starts: dict[int, list[int]] = {}
        self.offloads: dict[int, tuple[int, int]] = {}  # buffer -> (out, back)
        self.sent_bytes = 0  # of `offloads`
        self._again: dict[tuple[int, int], set[int]] = {}  # (run, position) -> outputs that are wanted of it
        self.again_us = 0.0  # of all repetitions
        self._journal: list[tuple[Any, bool, int, Any]] = []
        self._most_chain = max(SHORTEST_CHAIN, CHAIN_WORK // max(1, len(runs)))
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
        self._in_place = frozenset(in_place)
        self._scratch_bytes = [_scratch_bytes(draft, run) for run in runs]
        self._delta_bytes: NDArray[np.int64] = np.zeros(len(runs) + 1, np.int64)
        self._runs_again: dict[int, set[int]] = {}  # position -> runs
        self._passing_bytes: dict[int, int] = {}  # by position, as they are counted
        self._changed: set[int] = set()  # positions at which they may be others by now
        self.leaner: dict[int, Leaner] = {}  # by run

    @property
    def delta_bytes(self) -> NDArray[np.int64]:
        """What more is taken at each run than when this was last set to 0."""
        for position in self._changed:
            taken = self._passing_at(position)
            self._delta_bytes[position] += taken - self._passing_bytes.pop(position, 0)
            if taken:
                self._passing_bytes[position] = taken
        self._changed.clear()
        return self._delta_bytes

    def decisions(self) -> Decisions:
        recomputes = sorted((p, b) for (_, p), outputs in self._again.items() for b in outputs)
        offloads = sorted((b, out, back) for b, (out, back) in self.offloads.items())
        return Decisions(tuple(Recompute(b, p) for p, b in recomputes), tuple(Offload(*o) for o in offloads))

    def recomputed_us(self) -> NDArray[np.float64]:
        """Time of the repetitions just before each run."""
        found = np.zeros(len(self.runs) + 1)
        for run, position in self._again:
            found[position] += self.runs[run].time_us
        return found

    def leaner_us(self) -> float:
        """What runs with less workspace take longer, repetitions included."""
        times = Counter(run for run, _ in self._again)
        return sum(found.more_us * (1 + times.get(run, 0)) for run, found in sorted(self.leaner.items()))

    def scratch_bytes(self, run: int) -> int:
        """The workspace of a run."""
        return self._scratch_bytes[run]

    def lean(self, run: int, how: Leaner | None) -> None:
        """Enter that a run has less workspace; None: as much as it was chosen with."""
        if run in self.leaner:
            self._enter_leaner(False, run, self.leaner[run])
        if how is not None:
            self._enter_leaner(True, run, how)

    def gap(self, buffer: int, position: int) -> Gap | None:
        """The gap of a value over a run that does not touch it; None where its bytes are not taken then."""
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        if k == len(reads) or reads[k] == position or self.made[buffer] >= position:
            return None
        before = reads[k]
        starts = self.starts.get(buffer, ())
        s = bisect_right(starts, before)
        started = starts[s - 1] if s else self.made[buffer]
        if started >= position:
            return None
        return Gap(buffer, max(reads[k - 1] if k else started, started), before)

    def can_repeat(self, buffer: int) -> bool:
        made = self.made[buffer]
        return made >= 0 and self.runs[made].again

    def chain(self, buffer: int, position: int) -> tuple[float, list[int]]:
        """What making a value again before a run takes: microseconds beyond what is made again anyway, and the values
        that are. Infinite where it cannot be."""
        found: dict[int, None] = {}
        total_us = 0.0
        paid: set[int] = set()
        pending = [buffer]
        while pending:
            wanted = pending.pop()
            if wanted in found:
                continue
            found[wanted] = None
            if len(found) > self._most_chain:
                return math.inf, []
            if not self.can_repeat(wanted) or self.made[wanted] >= position:
                return math.inf, []
            run = self.made[wanted]
            if run in paid or (run, position) in self._again:
                continue
            paid.add(run)
            moves = wanted != buffer and self._next_again(wanted, position) is not None
            total_us += 0.0 if moves else self.runs[run].time_us
            for source in self.runs[run].reads:
                if source in self._is_movable:
                    if not self.resident(source, position) and not self._can_fetch(source, position):
                        pending.append(source)
                elif self._valid_until.get(source, position) < position:
                    return math.inf, []
        return total_us, list(found)

    def least_us(self, buffer: int, position: int) -> float:
        """What `chain` takes at least."""
        made = self.made[buffer]
        if not self.can_repeat(buffer):
            return math.inf
        return 0.0 if (made, position) in self._again else self.runs[made].time_us

    def resident(self, buffer: int, position: int) -> bool:
        """Whether its bytes are there for a read just before a run."""
        starts = self.starts.get(buffer, [])
        s = bisect_right(starts, position)
        if s and starts[s - 1] == position:
            return True
        if buffer in self.offloads and position < self.offloads[buffer][0] and self.made[buffer] < position:
            return True
        end = starts[s] if s < len(starts) else len(self.runs) + 1
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        return k < len(reads) and reads[k] < end and self.made[buffer] < position

    def recompute(self, buffer: int, position: int) -> None:
        """Enter the chain that makes `buffer` again; what of it would be made again later is so now, and kept."""
        _, chain = self.chain(buffer, position)
        for wanted in chain:
            for source in self.runs[self.made[wanted]].reads:
                there = source not in self._is_movable or self.resident(source, position)
                if not there and self._can_fetch(source, position):
                    self.offload(source, self.offloads[source][0], position)
        for wanted in chain:
            self.repeat(wanted, position)
        for wanted in chain:
            later = self._next_again(wanted, position) if wanted != buffer else None
            if later is not None:
                self._unrepeat(wanted, later)

    def repeat(self, buffer: int, position: int) -> None:
        """Enter that a value is made again before a run, of what is there then."""
        run = self.made[buffer]
        outputs = self._again.get((run, position))
        if not outputs:
            for source in self.runs[run].reads:
                self._enter_read(True, source, position)
        if not outputs or buffer not in outputs:
            self._enter_repeat(True, buffer, position)

    def offload(self, buffer: int, out: int, back: int) -> None:
        """Enter, or move, the way of a value to the host and back."""
        if buffer in self.offloads:
            self._enter_offload(False, buffer, self.offloads[buffer])
        self._enter_offload(True, buffer, (out, back))

    def stay(self, buffer: int) -> None:
        """Take the way of a value to the host and back, back."""
        self._enter_offload(False, buffer, self.offloads[buffer])

    def first_read(self, buffer: int, position: int) -> int:
        """The first run at or after a position that reads the value."""
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        return reads[k] if k < len(reads) else len(self.runs)

    def last_touch(self, buffer: int, position: int) -> int:
        """The last run before a position that reads or makes the value."""
        reads = self.reads[buffer]
        k = bisect_left(reads, position)
        return max(self.made[buffer], reads[k - 1] if k else -1)

    def repeated_at(self, position: int) -> list[int]:
        """The values that are made again just before a run."""
        return sorted(b for (_, at), outputs in self._again.items() if at == position for b in outputs)

    def taken_by(self, buffer: int) -> int:
        """Bytes that making the value takes while it is made."""
        run = self.runs[self.made[buffer]]
        return sum(self.size_bytes[b] for b in {*run.reads, *run.writes})

    def repeats(self, buffer: int, position: int) -> bool:
        return buffer in self._again.get((self.made[buffer], position), ())

    def absent(self, buffer: int, position: int) -> tuple[int, int]:
        """The runs [start, stop) over which a value is not there that is made again at a position."""
        stay = bisect_right(self.starts[buffer], position) - 1
        return self._stay(buffer, stay)[1], position

    def mark(self) -> int:
        """For `undo`: the books as they are now."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Take back everything that was entered since."""
        while len(self._journal) > mark:
            entry, added, buffer, position = self._journal.pop()
            entry(not added, buffer, position)
            self._journal.pop()

    def drop(self, buffer: int, position: int) -> None:
        """Take a repetition back."""
        self._unrepeat(buffer, position)

    def _can_fetch(self, buffer: int, position: int) -> bool:
        """Whether the value is on the host then, to be back later: it could be back earlier."""
        if buffer not in self.offloads:
            return False
        out, back = self.offloads[buffer]
        starts = self.starts[buffer]
        s = bisect_right(starts, position)
        return out <= position < back and starts[s] == back and self.first_read(buffer, position) >= back

    def _next_again(self, buffer: int, position: int) -> int | None:
        """The next position after this one at which the value is made again, if that comes before it is back."""
        starts = self.starts.get(buffer, [])
        s = bisect_right(starts, position)
        if s < len(starts) and buffer in self._again.get((self.made[buffer], starts[s]), ()):
            return starts[s]
        return None

    def _unrepeat(self, buffer: int, position: int) -> None:
        run = self.made[buffer]
        self._enter_repeat(False, buffer, position)
        if (run, position) in self._again:
            return
        for source in self.runs[run].reads:
            self._enter_read(False, source, position)
            # A value that was made again for this repetition only.
            if self.repeats(source, position) and not self._used(source, position):
                self._unrepeat(source, position)

    # Entries, each of which the journal can take back.

    def _enter_repeat(self, added: bool, buffer: int, position: int) -> None:
        key = self.made[buffer], position
        starts = self.starts.setdefault(buffer, [])
        at = bisect_right(starts, position)
        if added:
            if key not in self._again:
                self.again_us += self.runs[key[0]].time_us
                self._runs_again.setdefault(position, set()).add(key[0])
            self._again.setdefault(key, set()).add(buffer)
            self._take(buffer, at, -1)
            starts.insert(at, position)
            self._take(buffer, at, 1)
            self._take(buffer, at + 1, 1)
        else:
            self._take(buffer, at - 1, -1)
            self._take(buffer, at, -1)
            del starts[at - 1]
            self._take(buffer, at - 1, 1)
            self._again[key].remove(buffer)
            if not self._again[key]:
                del self._again[key]
                self._runs_again[position].remove(key[0])
                self.again_us -= self.runs[key[0]].time_us
        self._journal.append((self._enter_repeat, added, buffer, position))

    def _enter_read(self, added: bool, buffer: int, position: int) -> None:
        stay = bisect_right(self.starts.get(buffer, ()), position) if buffer in self._is_movable else -1
        if stay >= 0:
            self._take(buffer, stay, -1)
        if added:
            insort(self.reads[buffer], position)
        else:
            self.reads[buffer].remove(position)
        if stay >= 0:
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

    def _used(self, buffer: int, start: int) -> bool:
        """Whether the stay that starts there is read."""
        reads, starts = self.reads[buffer], self.starts[buffer]
        k, s = bisect_left(reads, start), bisect_right(starts, start)
        return k < len(reads) and (s == len(starts) or reads[k] < starts[s])

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

    def _passing_at(self, position: int) -> int:
        again = sorted(self._runs_again.get(position, ()))
        if not again:
            return 0

        def stays(buffer: int) -> bool:
            if buffer not in self._again.get((self.made[buffer], position), ()):
                return False
            start, stop = self._stay(buffer, bisect_right(self.starts[buffer], position))
            return start < stop

        return passing_bytes(again, self.runs, self.size_bytes, self._scratch_bytes, position, stays)


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

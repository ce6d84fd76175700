"""The live-bytes ledger: for every value when it is computed, read, recomputed, offloaded and fetched, and the bytes
that are live at each run.

Positions are indices of runs. A value has one *stay* from where it is computed and one from every position where it is
recomputed or fetched; a read belongs to the stay that started last, and a stay ends with its last read. Of in-place
operations only runs themselves count, not repetitions, so that a decision is entered within microseconds; the exact
live bytes are found by `rewrite` and `blocks`. What is entered is in `mbc.optimize.remat.undo_log`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mbc.optimize import effort
from mbc.optimize.remat.apply_decisions import Decisions, Offload, Recompute
from mbc.optimize.remat.undo_log import Leaner, UndoLog

NO_CHAIN: tuple[float, Sequence[int]] = (math.inf, ())


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two uses of a value, at runs `after` and `before`, that lie on either side of a run."""

    buffer: int
    after: int
    before: int


class Ledger(UndoLog):
    """Mutable: decisions are entered one by one."""

    def decisions(self) -> Decisions:
        offloads = sorted((b, out, back) for b, (out, back) in self.offloads.items())
        return Decisions(tuple(Recompute(b, p) for b, p in self.repeated()), tuple(Offload(*o) for o in offloads))

    def repeated(self) -> list[tuple[int, int]]:
        """The values that are recomputed, each with the run before which it is, in the order of runs."""
        return [(b, p) for p, b in sorted([(p, b) for (_, p), outputs in self._again.items() for b in outputs])]

    def recomputed_us(self) -> NDArray[np.float64]:
        """Time of the repetitions just before each run."""
        found = np.zeros(len(self.runs) + 1)
        for run, position in self._again:
            found[position] += self.again_us_of(run, position)
        return found

    def leaner_us(self) -> float:
        """What runs with less workspace take longer, repetitions included."""
        if not self.leaner:
            return 0.0
        times = Counter(run for run, _ in self._again)
        return sum(found.more_us * (1 + times.get(run, 0)) for run, found in sorted(self.leaner.items()))

    def times(self, run: int) -> int:
        """How often a run is executed, repetitions included."""
        return 1 + sum(again == run for again, _ in self._again)

    def lean(self, run: int, how: Leaner | None) -> None:
        """Enter that a run has less workspace; None: as much as it was chosen with."""
        if run in self.leaner:
            self._enter_leaner(False, run, self.leaner[run])
        if how is not None:
            self._enter_leaner(True, run, how)

    def gap(self, buffer: int, position: int) -> Gap | None:
        """The gap of a value over a run that does not touch it; None where its bytes are not taken then."""
        reads, made = self.reads[buffer], self.made[buffer]
        k = bisect_left(reads, position)
        if k == len(reads) or reads[k] == position or made >= position:
            return None
        starts, before = self.starts.get(buffer), reads[k]
        s = bisect_right(starts, before) if starts else 0
        started = starts[s - 1] if starts and s else made
        if started >= position:
            return None
        return Gap(buffer, max(reads[k - 1] if k else started, started), before)

    def gaps(self, position: int) -> list[tuple[int, int, float]]:
        """The movable values that have a gap over a run, each with where that ends and the least time of recomputing it
        before that."""
        found: list[tuple[int, int, float]] = []
        for buffer in self.across(position):  # which is read behind, and made before
            reads, starts, made = self.reads[buffer], self.starts.get(buffer), self.made[buffer]
            before = reads[bisect_left(reads, position)]
            if before == position:
                continue
            if starts:
                s = bisect_right(starts, before)
                if s and starts[s - 1] >= position:
                    continue
            key = made, before
            if not self._can_again[made]:
                least_us = math.inf
            elif key in self._again:
                least_us = 0.0
            else:
                least_us = self.again_us_of(made, before) if key in self._fused_remat else self._alone_us[made]
            found.append((buffer, before, least_us))
        return found

    def can_repeat(self, buffer: int) -> bool:
        return self._can_again[self.made[buffer]]

    def chain(self, buffer: int, position: int) -> tuple[float, Sequence[int]]:
        """The recomputation chain of a value before a run: microseconds beyond what is recomputed anyway, and the
        values of the chain. Infinite where there is none."""
        asked = buffer, position
        if asked not in self._chains:  # what is priced may be priced again, and is then entered
            self._chains[asked] = self._find_chain(buffer, position)
        return self._chains[asked]

    def _find_chain(self, buffer: int, position: int) -> tuple[float, Sequence[int]]:
        most_chain = max(effort.CHAIN_MIN_VALUES, effort.CHAIN_WORK // max(1, len(self.runs)))
        found: dict[int, None] = {}
        total_us = 0.0
        paid: set[tuple[int, int]] = set()
        pending = [buffer]
        while pending:
            wanted = pending.pop()
            if wanted in found:
                continue
            found[wanted] = None
            run = self.made[wanted]
            if len(found) > most_chain or run >= position or not self._can_again[run]:
                return NO_CHAIN
            key = run, position
            if key in paid or key in self._again:
                continue
            paid.add(key)
            if position > self._valid_until_all[run] and not self._readable(run, position):
                return NO_CHAIN
            later = self._next_again(wanted, position) if wanted != buffer else None
            if key in self._displaced:
                total_us += self.displaced_us(run, position)
            again_us = self.again_us_of(run, position, paid) if key in self._fused_remat else self._alone_us[run]
            total_us += again_us - (0.0 if later is None else self.again_us_of(run, later))
            for source in self.moved_by(run, position) if key in self._fused_remat else self._moves[run]:
                # Of most values nothing is listed; the rest of this is what `resident` says, too.
                there = not self.starts.get(source) and self.reads[source][-1] >= position
                if not there and not self.resident(source, position) and not self._can_fetch(source, position):
                    pending.append(source)
        return total_us, list(found)

    def resident(self, buffer: int, position: int) -> bool:
        """Whether its bytes are there for a read just before a run."""
        starts, reads = self.starts.get(buffer), self.reads[buffer]
        if not starts:  # of most
            return reads[-1] >= position > self.made[buffer]
        s = bisect_right(starts, position)
        if s and starts[s - 1] == position:
            return True
        if buffer in self.offloads and position < self.offloads[buffer][0] and self.made[buffer] < position:
            return True
        end = starts[s] if s < len(starts) else len(self.runs) + 1
        k = bisect_left(reads, position)
        return k < len(reads) and reads[k] < end and self.made[buffer] < position

    def recompute(self, buffer: int, position: int) -> None:
        """Enter the chain that recomputes `buffer`; those of it that would be recomputed later are recomputed now, and
        kept."""
        _, chain = self.chain(buffer, position)
        for wanted in chain if self.offloads else ():
            for source in self.moved_by(self.made[wanted], position):
                if not self.resident(source, position) and self._can_fetch(source, position):
                    self.offload(source, self.offloads[source][0], position)
        for wanted in chain:
            self.repeat(wanted, position)
        for wanted in chain:
            later = self._next_again(wanted, position) if wanted != buffer else None
            if later is not None:
                self._unrepeat(wanted, later)

    def repeat(self, buffer: int, position: int) -> None:
        """Enter that a value is recomputed before a run, from what is live then."""
        run = self.made[buffer]
        outputs = self._again.get((run, position))
        if not outputs:
            for source in self.moved_by(run, position):
                self._enter_read(True, source, position)
        if not outputs or buffer not in outputs:
            self._enter_repeat(True, buffer, position)

    def offload(self, buffer: int, out: int, back: int) -> None:
        """Enter, or move, the offload of a value."""
        if buffer in self.offloads:
            self._enter_offload(False, buffer, self.offloads[buffer])
        self._enter_offload(True, buffer, (out, back))

    def stay(self, buffer: int) -> None:
        """Undo the offload of a value."""
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
        """The values that are recomputed just before a run."""
        return sorted(b for (_, at), outputs in self._again.items() if at == position for b in outputs)

    def taken_by(self, buffer: int) -> int:
        """Bytes that computing the value takes while it runs."""
        run = self.runs[self.made[buffer]]
        return sum(self.size_bytes[b] for b in {*run.reads, *run.writes})

    def repeats(self, buffer: int, position: int) -> bool:
        return buffer in self._again.get((self.made[buffer], position), ())

    def absent(self, buffer: int, position: int) -> tuple[int, int]:
        """The runs [start, stop) over which a value that is recomputed at a position is not live."""
        stay = bisect_right(self.starts[buffer], position) - 1
        return self._stay(buffer, stay)[1], position

    def drop(self, buffer: int, position: int) -> None:
        """Undo a repetition."""
        self._unrepeat(buffer, position)

    def _can_fetch(self, buffer: int, position: int) -> bool:
        """Whether the value is offloaded then and fetched later: it could be fetched earlier."""
        if buffer not in self.offloads:
            return False
        out, back = self.offloads[buffer]
        starts = self.starts[buffer]
        s = bisect_right(starts, position)
        return out <= position < back and starts[s] == back and self.first_read(buffer, position) >= back

    def _next_again(self, buffer: int, position: int) -> int | None:
        """The next position after this one at which the value is recomputed, if that comes before it is fetched."""
        starts = self.starts.get(buffer)
        s = bisect_right(starts, position) if starts else 0
        if starts and s < len(starts) and buffer in self._again.get((self.made[buffer], starts[s]), ()):
            return starts[s]
        return None

    def _unrepeat(self, buffer: int, position: int) -> None:
        pending = [buffer]  # a chain may be longer than Python's stack
        while pending:
            buffer = pending.pop()
            if not self.repeats(buffer, position):
                continue
            run = self.made[buffer]
            self._enter_repeat(False, buffer, position)
            if (run, position) in self._again:
                continue
            for source in self.moved_by(run, position):
                self._enter_read(False, source, position)
                # A value that was recomputed for this repetition only.
                if self.repeats(source, position) and not self._used(source, position):
                    pending.append(source)

    def _used(self, buffer: int, start: int) -> bool:
        """Whether the stay that starts there is read."""
        reads, starts = self.reads[buffer], self.starts[buffer]
        k, s = bisect_left(reads, start), bisect_right(starts, start)
        return k < len(reads) and (s == len(starts) or reads[k] < starts[s])

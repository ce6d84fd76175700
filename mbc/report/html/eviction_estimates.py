"""The saving and the cost of not keeping a value in the arena between two of its uses.

These are estimates from the plan's own launches, for one value at a time; only a search can say what else would
change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mbc.hardware.streams import Space, Stream
from mbc.plan.model import Mode
from mbc.report.html.facts import Facts


@dataclass(frozen=True, slots=True)
class LettingGo:
    """The cost of letting a buffer go in its gap [`start`, `stop`) between two uses.

    Attributes:
        start: First launch of the gap.
        stop: Launch after the gap.
        recompute_us: Time of the launches that wrote the buffer, in microseconds.
        lacks: Inputs of these launches that are not in the arena at the end of the gap, and would be recomputed first.
        offload_us: Time of both copies over the host link alone, in microseconds; None for an unknown GPU.
    """

    start: int
    stop: int
    recompute_us: float
    lacks: tuple[str, ...]
    offload_us: float | None


class Gaps:
    """The gaps of the buffers of a program."""

    def __init__(self, facts: Facts) -> None:
        """Collect the lifetimes of all values."""
        self._facts = facts
        plan, program = facts.plan, facts.program
        self._reads: dict[int, Sequence[str]] = {}
        self._copies_us: dict[int, float] = {}
        self._live: dict[str, list[tuple[int, int]]] = {}
        entry = frozenset(program.entry)
        end = len(program.launches)
        for buffer, (start, stop) in facts.held.lives.items():
            value = plan.buffers[buffer].value
            if value is not None and plan.buffers[buffer].space is Space.ARENA:
                lasts = buffer in entry and plan.graph.values[value].role.persistent
                self._live.setdefault(value, []).append((0, end) if lasts else (start, stop))

    def letting_go(self, buffer: int) -> LettingGo | None:
        """Return the cost of letting a buffer go in its gap at the peak, else in its longest gap.

        Returns None for a buffer without a gap, with workspace, or with a state.
        """
        facts, plan = self._facts, self._facts.plan
        writers, readers = facts.writers.get(buffer, ()), facts.readers.get(buffer, ())
        name = plan.buffers[buffer].value
        if name is None or not writers or plan.graph.values[name].role.persistent:
            return None
        touches = sorted({*writers, *readers})
        gaps = [(a + 1, b) for a, b in pairwise(touches) if b > a + 1]
        if not gaps:
            return None
        start, stop = max(gaps, key=lambda gap: (gap[0] <= facts.peak < gap[1], gap[1] - gap[0], -gap[0]))
        written_by = writers[: bisect_left(writers, start)]
        if not written_by:
            return None
        recompute_us = sum(facts.program.launches[i].work.time_us for i in written_by)
        offload_us = self._offload_us(plan.buffers[buffer].size_bytes)
        return LettingGo(start, stop, recompute_us, self._lacks(written_by, name, stop), offload_us)

    def _offload_us(self, size_bytes: int) -> float | None:
        if self._facts.device is None:
            return None
        if size_bytes not in self._copies_us:
            links = self._facts.device.links
            ways = (Stream.TO_HOST, Stream.TO_DEVICE)
            self._copies_us[size_bytes] = sum(links.copy_us(size_bytes, way) for way in ways)
        return self._copies_us[size_bytes]

    def _lacks(self, written_by: Sequence[int], name: str, at: int) -> tuple[str, ...]:
        wanted = dict.fromkeys(value for i in written_by for value in self._read(i) if value != name)
        return tuple(v for v in wanted if not any(a <= at < b for a, b in self._live.get(v, ())))

    def _read(self, launch: int) -> Sequence[str]:
        """Return the values that a launch reads."""
        if launch not in self._reads:
            buffers = self._facts.plan.buffers
            accesses = self._facts.program.launches[launch].accesses
            read = [buffers[access.buffer].value for access in accesses if access.mode is Mode.READ]
            self._reads[launch] = [value for value in read if value is not None]
        return self._reads[launch]

"""Measures the rate of one GPU's copies with the host while other GPUs of the machine copy, too.

All processes begin at one time of the machine's monotonic clock and copy for the same time. Only copies that end within
a window in the middle count, in which all GPUs are busy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mbc.hardware.streams import Stream

COPY_BYTES = 64 << 20
QUEUED = 3  # copies of each direction in the queue, so that the CPU keeps up
RAMP_S, WINDOW_S = 0.1, 0.4  # time before and after the window, and the window itself
POLL_S = 50e-6
LEAST = 3  # least number of copies that end within the window


class Mark(Protocol):
    """The end of a copy on its stream: an event of PyCUDA."""

    def query(self) -> bool:
        """Return whether the copy has ended."""
        ...

    def time_since(self, earlier: Mark) -> float:
        """Return the milliseconds since `earlier`."""
        ...


def shared_rates(
    copy: Callable[[Stream], Mark],
    directions: Sequence[Stream],
    begin_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Mapping[Stream, float]:
    """Return the rate of each direction in GB/s, 0 if too few copies ended within the window.

    Args:
        copy: Enqueues one copy of COPY_BYTES.
        directions: Directions to copy in at once.
        begin_s: Time of `clock` at which to begin.
        clock: A monotonic clock, common to all processes.
        sleep: Waits for some seconds.
    """
    while (left_s := begin_s - clock()) > 0:
        sleep(left_s)
    first_s, last_s = begin_s + RAMP_S, begin_s + RAMP_S + WINDOW_S
    queues: dict[Stream, deque[Mark]] = {direction: deque() for direction in directions}
    ended: dict[Stream, list[Mark]] = {direction: [] for direction in directions}
    while (now_s := clock()) < last_s + RAMP_S:
        for direction, queue in queues.items():
            while queue and queue[0].query():
                mark = queue.popleft()
                if first_s <= now_s < last_s:
                    ended[direction].append(mark)
            while len(queue) < QUEUED:
                queue.append(copy(direction))
        sleep(POLL_S)
    while any(not mark.query() for queue in queues.values() for mark in queue):
        sleep(POLL_S)
    return {direction: _rate(marks) for direction, marks in ended.items()}


def _rate(marks: Sequence[Mark]) -> float:
    if len(marks) < LEAST:
        return 0.0
    return (len(marks) - 1) * COPY_BYTES / (marks[-1].time_since(marks[0]) * 1e6)

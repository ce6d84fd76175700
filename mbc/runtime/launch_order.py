"""The order in which the interpreter runs launches of several streams."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from mbc.hardware.streams import Stream
from mbc.plan.model import Program


class Transfers(StrEnum):
    """When the launches of streams other than the compute stream run.

    All three orders give the same result for a sound plan. The extremes reveal a missing wait.
    """

    IN_ORDER = "in_order"  # as the plan lists them
    EARLY = "early"  # as soon as their waits allow
    LATE = "late"  # when a launch waits for them


def execution_order(program: Program, transfers: Transfers) -> tuple[int, ...]:
    """Return an order of the launches that their streams and waits allow.

    `transfers` decides when launches of streams other than the compute stream run, which are mainly copies.
    """
    launches = program.launches
    everything = tuple(range(len(launches)))
    if transfers is Transfers.IN_ORDER:
        return everything
    before: list[list[int]] = [[] for _ in launches]
    latest: dict[Stream, int] = {}
    for index, launch in enumerate(launches):
        if launch.stream in latest:
            before[index].append(latest[launch.stream])
        latest[launch.stream] = index
    for earlier, later in program.waits:
        before[later].append(earlier)
    others = (stream for stream in Stream if stream is not Stream.COMPUTE)
    queues = [deque(i for i in everything if launches[i].stream is stream) for stream in others]
    order: dict[int, None] = {}
    for index in everything:
        if launches[index].stream is not Stream.COMPUTE:
            continue
        if transfers is Transfers.EARLY:
            _run_ready(queues, before, order)
        else:
            order.update(dict.fromkeys(_needed(index, before, order)))
        order[index] = None
    order.update(dict.fromkeys(i for i in everything if i not in order))
    return tuple(order)


def _run_ready(queues: list[deque[int]], before: list[list[int]], order: dict[int, None]) -> None:
    """Append every launch of other streams whose predecessors have run."""
    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue and all(earlier in order for earlier in before[queue[0]]):
                order[queue.popleft()] = None
                progress = True


def _needed(index: int, before: list[list[int]], order: dict[int, None]) -> list[int]:
    """Return the launches that must run before `index` and have not run yet, in launch order."""
    needed: set[int] = set()
    pending = list(before[index])
    while pending:
        earlier = pending.pop()
        if earlier not in order and earlier not in needed:
            needed.add(earlier)
            pending.extend(before[earlier])
    return sorted(needed)

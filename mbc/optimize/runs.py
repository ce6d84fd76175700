"""A training program as its runs: all launches of one operation (its micro-batches) or one conversion together.

Decisions about what stays in memory are made at the runs of a program, by their index: how an operation is divided
does not move them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.optimize.order import Draft
from mbc.plan.model import Copy, Mode, Program, Stream


@dataclass(frozen=True, slots=True)
class Run:
    """Launches [start, stop) of a program, which make `writes` of `reads`. Workspaces are in neither.

    `again`: whether running it twice gives the same bits and changes nothing else.
    """

    start: int
    stop: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_us: float
    again: bool


def runs_of(graph: TrainingGraph, draft: Draft, program: Program) -> tuple[Run, ...]:
    """The runs of a program in order; every launch is in one."""
    updating = {op.name for op in (*graph.train, *graph.infer) if KINDS[op.kind].updates}
    found: list[Run] = []
    launches = program.launches
    start = 0
    while start < len(launches):
        writes = _values(draft, program, start, write=True)
        stop = start + 1
        while stop < len(launches) and _values(draft, program, stop, write=True) == writes:
            stop += 1
        copied = isinstance(launches[start].work, Copy)
        again = not copied and updating.isdisjoint(launches[start].operations)
        # A copy takes no time of the compute stream.
        timed = (launch for launch in launches[start:stop] if launch.stream is Stream.COMPUTE)
        time_us = sum(launch.work.time_us for launch in timed)
        found.append(Run(start, stop, _values(draft, program, start, write=False), writes, time_us, again))
        start = stop
    return tuple(found)


def _values(draft: Draft, program: Program, launch: int, write: bool) -> tuple[int, ...]:
    named = (a.buffer for a in program.launches[launch].accesses if (a.mode is not Mode.READ) == write)
    return tuple(dict.fromkeys(b for b in named if draft.buffers[b].value is not None))

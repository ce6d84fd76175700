"""A training program as regions: all launches of one operation (its micro-batches), one layout conversion, or one
depth-first group.

Decisions about residency refer to the regions of a program, by their index, which does not depend on how operations are
divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbc.ir.graph import TrainingGraph
from mbc.kernels.nccl import is_collective
from mbc.ops import KINDS
from mbc.optimize.schedule.emit_launches import Draft
from mbc.plan.model import Copy, Launch, Mode, Program, Stream


@dataclass(frozen=True, slots=True)
class Region:
    """Launches [start, stop) of a program, which compute `writes` from `reads`. Workspaces are in neither, nor are
    micro-batches of values inside a depth-first group.

    `recomputable`: whether running it twice gives the same bits and changes nothing else. `remat_launch`: a launch that
    recomputes the large one of `writes`, its last operand, the others being kept; None: its own launches recompute all.
    """

    start: int
    stop: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_us: float
    recomputable: bool
    remat_launch: Launch | None = None

    @property
    def recompute_us(self) -> float:
        """Time of recomputing it."""
        return self.time_us if self.remat_launch is None else self.remat_launch.work.time_us

    @property
    def recomputed_outputs(self) -> tuple[int, ...]:
        """Those of `writes` that a recomputation computes."""
        return self.writes if self.remat_launch is None else (self.remat_launch.accesses[-1].buffer,)


def regions_of(graph: TrainingGraph, draft: Draft, program: Program) -> tuple[Region, ...]:
    """The regions of a program in order; every launch is in one."""
    updating = {op.name for op in (*graph.train, *graph.infer) if KINDS[op.kind].updates}
    whole = [is_whole(graph, draft, buffer) for buffer in range(len(draft.buffers))]
    found: list[Region] = []
    launches = program.launches
    start = 0
    for stop in _ends(draft, program, whole):
        # A collective runs once: the ranks do not recompute alike, and it overwrites its operands.
        once = any(isinstance(launch.work, Copy) or is_collective(launch) for launch in launches[start:stop])
        recomputable = not once and all(updating.isdisjoint(launch.operations) for launch in launches[start:stop])
        # A copy takes no time of the compute stream.
        timed = (launch for launch in launches[start:stop] if launch.stream is Stream.COMPUTE)
        time_us = sum(launch.work.time_us for launch in timed)
        accesses = [a for launch in launches[start:stop] for a in launch.accesses if whole[a.buffer]]
        writes = tuple(dict.fromkeys(a.buffer for a in accesses if a.mode is not Mode.READ))
        reads = tuple(dict.fromkeys(a.buffer for a in accesses if a.mode is Mode.READ and a.buffer not in writes))
        found.append(Region(start, stop, reads, writes, time_us, recomputable))
        start = stop
    return tuple(found)


def is_whole(graph: TrainingGraph, draft: Draft, buffer: int) -> bool:
    """Whether a buffer holds all rows of a value."""
    found = draft.buffers[buffer]
    if found.value is None:
        return False
    return found.rows.count == (graph.batch if graph.values[found.value].per_sample else 1)


def _ends(draft: Draft, program: Program, whole: Sequence[bool]) -> list[int]:
    """Where regions end: no value is written in parts, or needed as a part, on both sides."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            buffer = access.buffer
            if draft.buffers[buffer].value is None:
                continue
            if access.mode is not Mode.READ or not whole[buffer]:
                first.setdefault(buffer, i)
                last[buffer] = i
    reach = list(range(len(program.launches)))  # the last launch of the region of each
    for buffer, start in first.items():
        reach[start] = max(reach[start], last[buffer])
    found: list[int] = []
    until = -1
    for i, end in enumerate(reach):
        until = max(until, end)
        if until == i:
            found.append(i + 1)
    return found

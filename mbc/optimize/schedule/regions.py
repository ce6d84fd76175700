"""A training program as regions: all launches of one operation, one layout conversion, or one depth-first group.

The launches of an operation are its micro-batches. Decisions about residency refer to the regions of a program, by
their index, which does not depend on how operations are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mbc.hardware.streams import Stream
from mbc.ir.graph import TrainingGraph
from mbc.ops import KINDS
from mbc.optimize.schedule.emit_launches import Draft
from mbc.plan.collectives import is_collective
from mbc.plan.model import Copy, Launch, Mode, Program


@dataclass(frozen=True, slots=True)
class Region:
    """Launches [start, stop) of a program, which compute `writes` from `reads`.

    Neither contains workspaces, nor micro-batches of values inside a depth-first group.

    Attributes:
        start: The first launch.
        stop: The launch after the last.
        reads: Buffers that the launches read.
        writes: Buffers that the launches write.
        time_us: Time on the compute stream.
        recomputable: Whether running the region twice gives the same bits and changes nothing else.
        remat_launch: A launch that recomputes the large buffer of `writes`, its last operand, while the others are
            kept; None: the region's own launches recompute all.
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
        """Time to recompute the region."""
        return self.time_us if self.remat_launch is None else self.remat_launch.work.time_us

    @property
    def recomputed_outputs(self) -> tuple[int, ...]:
        """Buffers of `writes` that a recomputation computes."""
        return self.writes if self.remat_launch is None else (self.remat_launch.accesses[-1].buffer,)


def regions_of(graph: TrainingGraph, draft: Draft, program: Program) -> tuple[Region, ...]:
    """Return the regions of a program in order; every launch is in one."""
    updating = {op.name for op in (*graph.train, *graph.infer) if KINDS[op.kind].updates}
    whole = [is_whole(graph, draft, buffer) for buffer in range(len(draft.buffers))]
    regions: list[Region] = []
    launches = program.launches
    start = 0
    for stop in _ends(draft, program, whole):
        # A collective runs once: ranks do not all recompute the same values, and a collective overwrites its operands.
        once = any(isinstance(launch.work, Copy) or is_collective(launch) for launch in launches[start:stop])
        recomputable = not once and all(updating.isdisjoint(launch.operations) for launch in launches[start:stop])
        # A copy takes no time of the compute stream.
        timed = (launch for launch in launches[start:stop] if launch.stream is Stream.COMPUTE)
        time_us = sum(launch.work.time_us for launch in timed)
        accesses = [a for launch in launches[start:stop] for a in launch.accesses if whole[a.buffer]]
        writes = tuple(dict.fromkeys(a.buffer for a in accesses if a.mode is not Mode.READ))
        reads = tuple(dict.fromkeys(a.buffer for a in accesses if a.mode is Mode.READ and a.buffer not in writes))
        regions.append(Region(start, stop, reads, writes, time_us, recomputable))
        start = stop
    return tuple(regions)


def is_whole(graph: TrainingGraph, draft: Draft, buffer: int) -> bool:
    """Return whether a buffer holds all rows of a value."""
    buffer_ = draft.buffers[buffer]
    if buffer_.value is None:
        return False
    return buffer_.rows.count == (graph.batch if graph.values[buffer_.value].per_sample else 1)


def _ends(draft: Draft, program: Program, whole: Sequence[bool]) -> list[int]:
    """Return the ends of regions: no value is written in parts, or needed as a part, on both sides of an end."""
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
    reach = list(range(len(program.launches)))  # the last launch of each launch's region
    for buffer, start in first.items():
        reach[start] = max(reach[start], last[buffer])
    ends: list[int] = []
    until = -1
    for i, end in enumerate(reach):
        until = max(until, end)
        if until == i:
            ends.append(i + 1)
    return ends

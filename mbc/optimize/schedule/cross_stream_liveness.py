"""Liveness across streams: until which launch of the main stream launches of other streams may still run.

These are launches of the concurrent stream and collectives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from mbc.hardware.streams import Stream
from mbc.optimize.schedule.simulate import timeline
from mbc.optimize.schedule.synchronise import synchronise
from mbc.plan.model import Buffer, Program

_BESIDE = (Stream.CONCURRENT, Stream.COLLECTIVE)


def data_waits_only(program: Program, buffers: Sequence[Buffer], owner: Sequence[int]) -> Program:
    """Return the program with the waits for data alone, as if no bytes were reused."""
    touching = {(owner[access.buffer], launch.stream) for launch in program.launches for access in launch.accesses}
    streams = Counter(root for root, _ in touching)
    shared = {buffer for buffer, root in enumerate(owner) if streams[root] > 1}
    starts = [0, *accumulate(buffer.size_bytes for buffer in buffers)]
    return replace(program, waits=synchronise(program, buffers, [starts[root] for root in owner], shared))


def serial_program(program: Program) -> Program:
    """Return the program with all launches on one stream, in the order in which they are listed."""
    if all(launch.stream not in _BESIDE for launch in program.launches):
        return program
    launches = (
        replace(launch, stream=Stream.COMPUTE) if launch.stream in _BESIDE else launch for launch in program.launches
    )
    return replace(program, launches=tuple(launches))


def last_concurrent(program: Program, buffers: Sequence[Buffer], owner: Sequence[int]) -> Sequence[int]:
    """Return for each launch the last launch that runs at the same time: itself, except beside the main stream.

    If bytes are reused earlier, the streams wait for each other, which costs time but is correct.

    Args:
        program: The program.
        buffers: Its buffers.
        owner: For each buffer the buffer whose bytes it has.
    """
    launches = program.launches
    last = list(range(len(launches)))
    if all(launch.stream not in _BESIDE for launch in launches):
        return last
    times = timeline(data_waits_only(program, buffers, owner))
    compute = [i for i, launch in enumerate(launches) if launch.stream is Stream.COMPUTE]
    starts_us = [times.starts_us[i] for i in compute]
    for i, launch in enumerate(launches):
        if launch.stream in _BESIDE:
            before = bisect_left(starts_us, times.ends_us[i])
            last[i] = max(i, compute[before - 1]) if before else i
    return last

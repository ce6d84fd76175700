"""What the links of a GPU carry during a program: copies out of the arena and back, by the space at their other end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mbc.plan.model import STREAM_FROM, STREAM_TO, Launch, Plan, Program, Space, Stream


@dataclass(frozen=True, slots=True)
class Traffic:
    """One link. `out_us`, `back_us`: the time that each direction is busy, alone; `measured`: that is known of this
    machine, not estimated."""

    space: Space
    copies: int
    out_bytes: int
    back_bytes: int
    out_us: float
    back_us: float
    measured: bool


def traffic(plan: Plan, program: Program) -> Iterator[Traffic]:
    """Every link that `program` uses."""
    for space in STREAM_TO:
        out, back = (_copies(program, stream) for stream in (STREAM_TO[space], STREAM_FROM[space]))
        if out or back:
            yield Traffic(
                space,
                len(out) + len(back),
                *(sum(copied_bytes(plan, copy) for copy in lane) for lane in (out, back)),
                *(sum(copy.work.time_us for copy in lane) for lane in (out, back)),
                measured=all(copy.work.measured for copy in (*out, *back)),
            )


def direction_bytes(plan: Plan, program: Program, stream: Stream) -> int:
    """What the copies of one stream carry."""
    return sum(copied_bytes(plan, copy) for copy in _copies(program, stream))


def _copies(program: Program, stream: Stream) -> list[Launch]:
    return [launch for launch in program.launches if launch.stream is stream]


def copied_bytes(plan: Plan, copy: Launch) -> int:
    """What one copy carries."""
    access = copy.accesses[0]
    buffer = plan.buffers[access.buffer]
    return buffer.size_bytes * access.rows.count // buffer.rows.count

"""The bytes that the links of a GPU carry during a program: copies out of the arena and back, by space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space, Stream
from mbc.plan.model import Launch, Plan, Program


@dataclass(frozen=True, slots=True)
class Traffic:
    """The copies over one link.

    Attributes:
        space: The space at the other end.
        copies: Number of copies.
        out_bytes: Bytes copied out of the arena.
        back_bytes: Bytes copied back.
        out_us: Time that copies out of the arena keep the link busy.
        back_us: Time that copies back keep the link busy.
        measured: Whether all times are measured on this machine rather than estimated.
    """

    space: Space
    copies: int
    out_bytes: int
    back_bytes: int
    out_us: float
    back_us: float
    measured: bool


def traffic(plan: Plan, program: Program) -> Iterator[Traffic]:
    """Yield the traffic of every link that `program` uses."""
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
    """Return the bytes that the copies of one stream carry."""
    return sum(copied_bytes(plan, copy) for copy in _copies(program, stream))


def _copies(program: Program, stream: Stream) -> list[Launch]:
    return [launch for launch in program.launches if launch.stream is stream]


def copied_bytes(plan: Plan, copy: Launch) -> int:
    """Return the bytes that one copy carries."""
    access = copy.accesses[0]
    buffer = plan.buffers[access.buffer]
    return buffer.size_bytes * access.rows.count // buffer.rows.count

"""When the bytes of each buffer are taken, in launch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mbc.plan.model import ALIGNMENT_BYTES, Buffer, Program, Space


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that a buffer and those that take it over hold from launch `start` to before launch `stop`.

    `size_bytes` is rounded up to the alignment; `buffers` share the block, the first one is the owner.
    """

    buffers: tuple[int, ...]
    size_bytes: int
    start: int
    stop: int


def owners(buffers: Sequence[Buffer]) -> list[int]:
    """For each buffer the one whose bytes it ends up in, itself where it takes over none."""
    found: list[int] = []
    for i, buffer in enumerate(buffers):
        found.append(i if buffer.alias is None else found[buffer.alias])
    return found


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def blocks(
    program: Program, buffers: Sequence[Buffer], persistent: frozenset[int], space: Space = Space.ARENA
) -> tuple[Block, ...]:
    """The blocks of one space that a program needs beside the persistent ones, ordered by start."""
    owner = owners(buffers)
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    members: dict[int, list[int]] = {}

    def touch(buffer: int, first: int, after: int) -> None:
        root = owner[buffer]
        if root in persistent or buffers[root].space is not space:
            return
        start[root] = min(start.get(root, first), first)
        stop[root] = max(stop.get(root, after), after)
        known = members.setdefault(root, [])
        if buffer not in known:
            known.append(buffer)

    for buffer in program.entry:
        touch(buffer, 0, 1)
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            touch(access.buffer, i, i + 1)
    end = len(program.launches)
    for buffer in program.exit:
        touch(buffer, max(end - 1, 0), end)
    found: list[Block] = []
    for root in sorted(start, key=lambda root: (start[root], root)):
        others = (b for b in members[root] if b != root)
        found.append(Block((root, *others), aligned(buffers[root].size_bytes), start[root], stop[root]))
    return tuple(found)


def peak_bytes(blocks_: Sequence[Block]) -> tuple[int, int]:
    """The most bytes alive at once, and the launch at which they are."""
    changes: dict[int, int] = {}
    for block in blocks_:
        changes[block.start] = changes.get(block.start, 0) + block.size_bytes
        changes[block.stop] = changes.get(block.stop, 0) - block.size_bytes
    live = peak = where = 0
    for position in sorted(changes):
        live += changes[position]
        if live > peak:
            peak, where = live, position
    return peak, where


def live_bytes(blocks_: Sequence[Block], launches: int) -> list[int]:
    """Bytes alive at each launch."""
    changes = [0] * (launches + 1)
    for block in blocks_:
        changes[block.start] += block.size_bytes
        changes[block.stop] -= block.size_bytes
    return list(accumulate(changes[:launches]))

"""When the bytes of each buffer are taken, in launch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mbc.optimize.lasting import lasting
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
    found = list(range(len(buffers)))
    for i, buffer in enumerate(buffers):
        while buffer.alias is not None:
            found[i] = buffer.alias
            buffer = buffers[buffer.alias]
    return found


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def blocks(
    program: Program, buffers: Sequence[Buffer], persistent: frozenset[int], space: Space = Space.ARENA
) -> tuple[Block, ...]:
    """The blocks of one space that a program needs beside the persistent ones, ordered by start."""
    owner = owners(buffers)
    until = lasting(program, buffers, owner)
    end = len(program.launches)
    first = dict.fromkeys(program.entry, 0)
    last = dict.fromkeys(program.entry, 0)
    for i, launch in enumerate(program.launches):
        for access in launch.accesses:
            first.setdefault(access.buffer, i)
            last[access.buffer] = max(last.get(access.buffer, 0), until[i])
    for buffer in program.exit:
        first.setdefault(buffer, max(end - 1, 0))
        last[buffer] = max(end - 1, 0)
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for buffer, launch in first.items():
        root = owner[buffer]
        if root in persistent or buffers[root].space is not space:
            continue
        start[root] = min(start.get(root, launch), launch)
        stop[root] = max(stop.get(root, 0), last[buffer] + 1)
        members.setdefault(root, []).append(buffer)
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

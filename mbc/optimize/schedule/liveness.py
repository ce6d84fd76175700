"""Liveness: the launches during which each buffer holds bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from mbc.hardware.streams import Space, aligned
from mbc.optimize.schedule.cross_stream_liveness import last_concurrent
from mbc.plan.collectives import is_bucket
from mbc.plan.model import Buffer, Mode, Program


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of a buffer and its aliases, live from launch `start` to before launch `stop`.

    Attributes:
        buffers: Buffers that share the block; the first one is the owner. If the gradients of a bucket are one block,
            they have consecutive addresses in it.
        size_bytes: Bytes, rounded up to the alignment.
        start: The first launch.
        stop: The launch after the last.
    """

    buffers: tuple[int, ...]
    size_bytes: int
    start: int
    stop: int


def owners(buffers: Sequence[Buffer]) -> list[int]:
    """Return for each buffer the buffer whose bytes it has; a buffer without alias has its own."""
    owner = list(range(len(buffers)))
    for i, buffer in enumerate(buffers):
        while buffer.alias is not None:
            owner[i] = buffer.alias
            buffer = buffers[buffer.alias]
    return owner


def blocks(
    program: Program, buffers: Sequence[Buffer], persistent: frozenset[int], space: Space = Space.ARENA
) -> tuple[Block, ...]:
    """Return the blocks of one space that a program needs besides the persistent ones, ordered by start."""
    blocks_: list[Block] = []
    for root, (start, stop, members) in _lives(program, buffers, persistent, space).items():
        others = (b for b in members if b != root)
        blocks_.append(Block((root, *others), aligned(buffers[root].size_bytes), start, stop))
    return tuple(sorted(blocks_, key=lambda block: (block.start, block.buffers[0])))


def blocks_to_place(
    program: Program, buffers: Sequence[Buffer], persistent: frozenset[int], space: Space = Space.ARENA
) -> tuple[Block, ...]:
    """Return the blocks of one space, with the gradients of each bucket as one block.

    Such a block is live from the first start to the last stop of its gradients.
    """
    by_owner = {block.buffers[0]: block for block in blocks(program, buffers, persistent, space)}
    buckets = tuple(contiguous(program)) if space is Space.ARENA else ()
    owner = owners(buffers) if buckets else []
    for bucket in buckets:
        members = [by_owner.pop(owner[buffer]) for buffer in bucket]
        by_owner[owner[bucket[0]]] = Block(
            tuple(buffer for block in members for buffer in block.buffers),
            sum(block.size_bytes for block in members),
            min(block.start for block in members),
            max(block.stop for block in members),
        )
    return tuple(sorted(by_owner.values(), key=lambda block: (block.start, block.buffers[0])))


def contiguous(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield the buffers that need consecutive addresses, at multiples of the alignment: the operands of each bucket."""
    for launch in program.launches:
        if is_bucket(launch):
            read = tuple(access.buffer for access in launch.accesses if access.mode is Mode.READ)
            if len(read) > 1:
                yield read


def _lives(
    program: Program, buffers: Sequence[Buffer], persistent: frozenset[int], space: Space
) -> Mapping[int, tuple[int, int, list[int]]]:
    """Return, by the owner of their bytes, the launches [start, stop) over which buffers hold them, and the buffers."""
    owner = owners(buffers)
    until = last_concurrent(program, buffers, owner)
    end = len(program.launches)
    first = dict.fromkeys(program.entry, 0)
    last = dict.fromkeys(program.entry, 0)
    for i, launch in enumerate(program.launches):
        stop = until[i]
        for access in launch.accesses:
            buffer = access.buffer
            if last.get(buffer, -1) < stop:
                last[buffer] = stop
                first.setdefault(buffer, i)
    for buffer in program.exit:
        first.setdefault(buffer, max(end - 1, 0))
        last[buffer] = max(end - 1, 0)
    lives: dict[int, tuple[int, int, list[int]]] = {}
    for buffer, launch in first.items():
        root = owner[buffer]
        if root in persistent or buffers[root].space is not space:
            continue
        stop = last[buffer] + 1
        if root in lives:
            start, until_, members = lives[root]
            members.append(buffer)
            lives[root] = min(start, launch), max(until_, stop), members
        else:
            lives[root] = launch, stop, [buffer]
    return lives


def live_of(program: Program, buffers: Sequence[Buffer], persistent: frozenset[int]) -> NDArray[np.int64]:
    """Return the live bytes of the arena at each launch of a program, without the persistent ones.

    All gradients of a bucket count from the first of them on.
    """
    lives = (
        [(block.start, block.stop, block.size_bytes) for block in blocks_to_place(program, buffers, persistent)]
        if any(map(is_bucket, program.launches))
        else [
            (start, stop, aligned(buffers[root].size_bytes))
            for root, (start, stop, _) in _lives(program, buffers, persistent, Space.ARENA).items()
        ]
    )
    starts, stops, sizes = np.array(lives, np.int64).reshape(-1, 3).T
    changes = np.zeros(len(program.launches) + 1, np.int64)
    np.add.at(changes, starts, sizes)
    np.subtract.at(changes, stops, sizes)
    return changes[:-1].cumsum()


def peak_bytes(blocks_: Sequence[Block]) -> tuple[int, int]:
    """Return the peak live bytes, and the launch at which they occur."""
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
    """Return the live bytes at each launch."""
    changes = [0] * (launches + 1)
    for block in blocks_:
        changes[block.start] += block.size_bytes
        changes[block.stop] -= block.size_bytes
    return list(accumulate(changes[:launches]))

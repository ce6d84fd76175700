"""Addresses of all buffers of a draft, in the arena and outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from mbc.errors import MbcError
from mbc.hardware.streams import Space, aligned
from mbc.optimize import effort
from mbc.optimize.placement.place_blocks import place, place_around, place_lowest
from mbc.optimize.schedule.cross_stream_liveness import serial_program
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.liveness import blocks, blocks_to_place, contiguous, owners, peak_bytes
from mbc.units import show_distinct, show_enough


@dataclass(frozen=True, slots=True)
class Placed:
    """Addresses of all buffers, and the sizes that they lead to.

    Attributes:
        offsets: Offset of each buffer from the start of its space.
        arena_bytes: Bytes of the arena.
        live_bytes: Peak live bytes of the arena in listed order, without the longer live ranges by the concurrent
            stream: the lower bound of any placement.
        host_bytes: Bytes in host memory.
        peer_bytes: Bytes on peers.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    live_bytes: int
    host_bytes: int
    peer_bytes: int = 0


def assign_addresses(
    draft: Draft,
    available_bytes: int = 0,
    thorough: bool = True,
    fixed: Mapping[int, int] | None = None,
    lowest: bool = False,
) -> Placed:
    """Return an address for every buffer.

    In each space persistent buffers are at the bottom. Above them are the two programs, which never run at the same
    time.

    Args:
        draft: Launches and buffers.
        available_bytes: A size of the arena that is small enough.
        thorough: Whether placement is improved after one quick pass.
        fixed: Offsets of blocks in the arena above the persistent buffers, by owner; the program's other blocks go
            between them.
        lowest: Whether the smallest arena is searched for, which takes longest.
    """
    offsets = [0] * len(draft.buffers)
    ends: dict[Space, int] = {}
    lives: dict[Space, int] = {}
    persistent = frozenset(draft.persistent)
    for space in Space:
        base = 0
        for buffer in draft.persistent:
            if draft.buffers[buffer].space is space:
                offsets[buffer] = base
                base += aligned(draft.buffers[buffer].size_bytes)
        top = live = 0
        for program in (draft.train, draft.infer):
            program_blocks = blocks_to_place(program, draft.buffers, persistent, space)
            owned = {i: block.buffers[0] for i, block in enumerate(program_blocks)}
            there = {i: fixed[owner] for i, owner in owned.items() if owner in fixed} if fixed else {}
            if there:
                places, height = place_around(program_blocks, there)
            elif lowest and space is Space.ARENA:
                places, height = place_lowest(program_blocks, effort.SKYLINE_SEARCH_PLAN_NODES)
            else:
                enough_bytes = available_bytes - base if space is Space.ARENA else 0
                places, height = place(program_blocks, enough_bytes, thorough, effort.SKYLINE_SEARCH_PLAN_NODES)
            for i, owner in owned.items():
                offsets[owner] = base + places[i]
            serial = serial_program(program)
            same = serial is program and not any(contiguous(program))
            serial_blocks = program_blocks if same else blocks(serial, draft.buffers, persistent, space)
            top, live = max(top, height), max(live, peak_bytes(serial_blocks)[0])
        ends[space], lives[space] = base + top, base + live
    owners_ = owners(draft.buffers)
    for bucket in contiguous(draft.train):
        sizes = [aligned(draft.buffers[owners_[buffer]].size_bytes) for buffer in bucket]
        for buffer, start in zip(bucket, accumulate(sizes, initial=offsets[owners_[bucket[0]]]), strict=False):
            offsets[owners_[buffer]] = start
    for buffer, owner in enumerate(owners_):
        offsets[buffer] = offsets[owner]
    return Placed(tuple(offsets), ends[Space.ARENA], lives[Space.ARENA], ends[Space.HOST], ends[Space.PEER])


def check_outside(placed: Placed, host_bytes: int, peer_bytes: int, network: str) -> None:
    """Raise MBC210 unless a plan keeps within the limits outside the arena.

    Args:
        placed: The plan's addresses.
        host_bytes: Limit of host memory.
        peer_bytes: Limit of memory on peers.
        network: Name of the network, for the message.

    Raises:
        MbcError: MBC210, if the plan needs more than a limit.
    """
    limits = (("host", "host memory", placed.host_bytes, host_bytes), ("peers", "peers", placed.peer_bytes, peer_bytes))
    for setting, where, taken_bytes, limit_bytes in limits:
        if taken_bytes <= limit_bytes:
            continue
        kept, allowed = show_distinct(taken_bytes, limit_bytes)
        raise MbcError(
            "MBC210",
            f"the plan of '{network}' keeps {kept} in {where} at once, memory.{setting} allows {allowed}",
            f"raise memory.{setting} to {show_enough(taken_bytes)}, raise memory.device, or lower the batch",
        )

"""Addresses in the arena and in host memory: no overlap of live buffers, reuse, and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.ir.types import DType, Layout
from mbc.optimize.placement.assign_addresses import assign_addresses, check_outside
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.synchronise import synchronise
from mbc.options import UNLIMITED_BYTES
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Program, Rows
from mbc.plan.verify import verify_plan
from tests.optimize.placement.drawn_blocks import jigsaw, overlaps
from tests.plan.offload import offloaded_plan

WHOLE = Rows(0, 1)
ARENA, HOST = Space.ARENA, Space.HOST


def buffer(name: str, size_bytes: int, space: Space = ARENA) -> Buffer:
    return Buffer(name, WHOLE, Layout.CHANNELS_FIRST, DType.UINT8, size_bytes, space)


def copy(source: int, target: int, stream: Stream) -> Launch:
    accesses = (Access(source, WHOLE, Mode.READ), Access(target, WHOLE, Mode.WRITE))
    return Launch(Copy(1.0, False), (), stream, accesses)


def kernel(*accesses: tuple[int, Mode]) -> Launch:
    launch_accesses = tuple(Access(index, WHOLE, mode) for index, mode in accesses)
    return Launch(Kernel("mbc", "k", (), 1.0, False), (), Stream.COMPUTE, launch_accesses)


def two_stays() -> Draft:
    """Return a draft in which `a` goes to the host and back, and then the larger `b`.

    Host memory holds only one of them at a time.
    """
    buffers = (
        buffer("state", 256),
        buffer("a", 1000), buffer("a", 1000, HOST), buffer("a", 1000),
        buffer("b", 3000), buffer("b", 3000, HOST), buffer("b", 3000),
    )  # fmt: skip
    launches = (
        kernel((0, Mode.READ), (1, Mode.WRITE)),
        copy(1, 2, Stream.TO_HOST),
        copy(2, 3, Stream.TO_DEVICE),
        kernel((3, Mode.READ), (4, Mode.WRITE)),
        copy(4, 5, Stream.TO_HOST),
        copy(5, 6, Stream.TO_DEVICE),
        kernel((6, Mode.READ), (0, Mode.WRITE)),
    )
    return Draft(buffers, (0,), Program(launches, (), (0,), (0,)), Program((), (), (0,), (0,)))


def test_host_memory_is_used_again() -> None:
    draft = two_stays()
    placed = assign_addresses(draft)
    assert placed.host_bytes == 3072
    assert placed.offsets[2] == placed.offsets[5] == 0
    # The next user of the bytes waits for the last one, though both are on one stream with no launch between them.
    waits = synchronise(draft.train, draft.buffers, placed.offsets)
    assert {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)} == set(waits)


def test_buffers_that_live_at_the_same_time_do_not_overlap() -> None:
    draft = two_stays()
    first, to_host, back, *rest = draft.train.launches
    late = Program((first, to_host, *rest, back), (), (0,), (0,))
    placed = assign_addresses(replace(draft, train=late))
    assert placed.host_bytes == 1024 + 3072
    assert {placed.offsets[2], placed.offsets[5]} in ({0, 1024}, {0, 3072})


def test_persistent_buffers_are_at_the_bottom_of_their_space() -> None:
    draft = two_stays()
    moved = (replace(draft.buffers[0], space=HOST), *draft.buffers[1:])
    placed = assign_addresses(replace(draft, buffers=moved))
    assert placed.offsets[0] == 0 and placed.offsets[2] == 256
    assert placed.host_bytes == 256 + 3072
    assert placed.arena_bytes == assign_addresses(draft).arena_bytes - 256


@pytest.mark.parametrize(("setting", "space"), [("host", Space.HOST), ("peers", Space.PEER)])
def test_a_limit_outside_the_arena_that_is_too_small_is_refused(setting: str, space: Space) -> None:
    draft = two_stays()
    moved = (replace(buffer, space=space) if buffer.space is HOST else buffer for buffer in draft.buffers)
    placed = assign_addresses(replace(draft, buffers=tuple(moved)))
    assert (placed.host_bytes, placed.peer_bytes) == ((3072, 0) if space is HOST else (0, 3072))

    def check(limit_bytes: int) -> None:
        check_outside(placed, *((limit_bytes, 0) if space is HOST else (UNLIMITED_BYTES, limit_bytes)), "net")

    check(3072)
    with pytest.raises(MbcError) as caught:
        check(3071)
    assert caught.value.code == "MBC210"
    assert f"memory.{setting}" in caught.value.message and "3072B" in caught.value.remedy


def test_a_plan_over_its_limit_of_host_memory_is_no_plan() -> None:
    plan = offloaded_plan(3)
    verify_plan(replace(plan, host_limit_bytes=plan.predictions.host_bytes))
    with pytest.raises(MbcError) as caught:
        verify_plan(replace(plan, host_limit_bytes=plan.predictions.host_bytes - 1))
    assert caught.value.code == "MBC131" and "host memory" in caught.value.message


def test_the_smallest_arena_is_searched_for_where_it_is_asked_for() -> None:
    pieces = jigsaw(400)
    buffers = tuple(buffer(f"b{i}", piece.size_bytes) for i, piece in enumerate(pieces))
    launches = [
        kernel(*(
            (i, Mode.WRITE if piece.start == at else Mode.READ)
            for i, piece in enumerate(pieces)
            if at in (piece.start, piece.stop - 1)
        ))
        for at in range(max(piece.stop for piece in pieces))
    ]  # fmt: skip
    draft = Draft(buffers, (), Program(tuple(launches), (), (), ()), Program((), (), (), ()))
    placed, lowest = assign_addresses(draft), assign_addresses(draft, lowest=True)
    assert placed.arena_bytes > placed.live_bytes == lowest.arena_bytes
    assert not overlaps(pieces, list(lowest.offsets))

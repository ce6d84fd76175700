"""Waits for copies at fewer kernels, compared with plain definitions."""

from dataclasses import replace

from hypothesis import given, settings

from mbc.hardware.streams import Stream
from mbc.optimize.schedule.coalesce_waits import coalesce_waits
from mbc.optimize.schedule.simulate import Contention, simulate
from mbc.optimize.schedule.synchronise import synchronise
from mbc.plan.model import Buffer, Program
from tests.optimize.search.test_streams import launch, order, programs

WAIT_US = 7.0


def disturbed(program: Program) -> Contention:
    count = len(program.launches)
    alone = (1.0,) * count
    return Contention({}, (0.0,) * count, WAIT_US, WAIT_US, alone, alone)


@given(programs())
@settings(max_examples=400, deadline=None)
def test_all_waits_hold_and_nothing_takes_longer(case: tuple[Program, list[Buffer], list[int]]) -> None:
    program, buffers, offsets = case
    program = replace(program, waits=synchronise(program, buffers, offsets))
    coalesced, time_us = coalesce_waits(program, disturbed(program))
    before, after = order(program, program.waits), order(coalesced, coalesced.waits)
    assert all(old <= new for old, new in zip(before, after, strict=True))
    assert all(earlier < later for earlier, later in coalesced.waits)
    assert (
        time_us
        == simulate(coalesced, contention=disturbed(coalesced))
        <= simulate(program, contention=disturbed(program))
    )


def test_copies_back_share_the_kernels_that_wait_for_them() -> None:
    kernels, back = [launch(Stream.COMPUTE, 1000.0)] * 4, [launch(Stream.TO_DEVICE, 100.0)] * 2
    program = Program((kernels[0], *back, *kernels[1:]), ((0, 1), (1, 4), (2, 5)), (), ())
    coalesced, time_us = coalesce_waits(program, disturbed(program))
    assert coalesced.waits == ((0, 1), (2, 4))
    assert time_us == 4000.0 + 2 * WAIT_US


def test_a_copy_in_no_hurry_waits_for_a_later_kernel() -> None:
    kernels, out = [launch(Stream.COMPUTE, 1000.0)] * 5, [launch(Stream.TO_HOST, 100.0)] * 2
    # The last kernel overwrites what both carry away.
    program = Program((*kernels[:3], *out, *kernels[3:]), ((0, 3), (1, 4), (4, 6)), (), ())
    coalesced, time_us = coalesce_waits(program, disturbed(program))
    assert coalesced.waits == ((2, 3), (4, 6))
    assert time_us == 5000.0 + 2 * WAIT_US


def test_a_hurried_copy_waits_for_no_later_kernel() -> None:
    kernels, back = [launch(Stream.COMPUTE, 1000.0)] * 3, launch(Stream.TO_DEVICE, 1000.0)
    program = Program((*kernels[:2], back, kernels[2]), ((0, 2), (2, 3)), (), ())
    assert coalesce_waits(program, disturbed(program))[0] == program

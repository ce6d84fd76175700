"""Intervals of predicted times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.hardware.streams import Stream
from mbc.ir.types import DType, Layout
from mbc.kernels.calibration import INTERPOLATED, OTHER_GPU, OTHER_GPU_STEP, UNCOMPARED, WIDEST_STEP, calibration
from mbc.optimize.schedule.simulate import simulate
from mbc.optimize.search.prediction_interval import Timing, time_range_us
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Plan, Program, Rows
from tests.plan.chains import random_plan

H200, A100 = find_spec("h200"), find_spec("a100-80")
PLAN = random_plan(3, (Stream.COMPUTE,))
TIMING = Timing(PLAN.graph, PLAN.buffers)


def timed(plan: Plan, kernel: Kernel | Copy, workspace_bytes: int = 0) -> tuple[float, float]:
    """Return the interval of one launch on the operands of the plan's first launch, with this workspace."""
    accesses = plan.train.launches[0].accesses
    buffers = plan.buffers
    if workspace_bytes:
        buffers = (*buffers, Buffer(None, Rows(0, 1), Layout.CHANNELS_FIRST, DType.UINT8, workspace_bytes))
        accesses = (*accesses, Access(len(buffers) - 1, Rows(0, 1), Mode.WRITE))
    program = Program((Launch(kernel, (), Stream.COMPUTE, accesses),), (), (), ())
    return time_range_us(program, Timing(plan.graph, buffers), H200)


def estimated(provider: str, name: str, *settings: tuple[str, int]) -> Kernel:
    return Kernel(provider, name, settings, 100.0, measured=False)


def test_measured_times_have_no_range() -> None:
    measured = replace(estimated("cudnn", "convolution"), measured=True)
    assert timed(PLAN, measured) == (100.0, 100.0)


def test_the_range_is_that_of_the_kind_of_work() -> None:
    for name in ("convolution", "convolution_backward_data"):
        for workspace_bytes, bare in ((0, True), (1 << 20, False)):
            spread = calibration().spread(f"cudnn {name} fp32", bare)
            assert spread.count > 0
            low, high = timed(PLAN, estimated("cudnn", name, ("engine", -1)), workspace_bytes)
            assert (low, high) == pytest.approx((100 * min(1, spread.low), 100 * max(1, spread.high)))


def test_engines_that_a_profile_named_were_interpolated() -> None:
    spread = calibration().spreads.get(INTERPOLATED, UNCOMPARED)
    for kernel in (
        estimated("cudnn", "convolution", ("engine", 3)),
        estimated("cudnn_legacy", "convolution", ("algorithm", 6)),
    ):
        assert timed(PLAN, kernel) == pytest.approx((100 * min(1, spread.low), 100 * max(1, spread.high)))


def test_launches_without_a_profile_have_assumed_ranges() -> None:
    for work in (estimated("mbc", "no_such_kernel"), Copy(100.0, measured=False)):
        assert timed(PLAN, work) == (100 * UNCOMPARED.low, 100 * UNCOMPARED.high)


def test_a_program_is_off_in_one_direction_and_more_so_on_other_gpus() -> None:
    launches = tuple(replace(x, work=replace(x.work, measured=False)) for x in PLAN.train.launches)
    program = replace(PLAN.train, launches=launches)
    time_us = simulate(program)
    low, high = time_range_us(program, TIMING, H200)
    assert low < time_us < high
    half = tuple(replace(x, work=replace(x.work, measured=i % 2 == 0)) for i, x in enumerate(launches))
    far_low, far_high = time_range_us(replace(program, launches=half), TIMING, A100)
    assert low < far_low < time_us < far_high < high * OTHER_GPU
    inner_low, inner_high = time_range_us(replace(program, launches=half), TIMING, H200)
    assert low < inner_low < time_us < inner_high < high


@pytest.mark.parametrize("kinds", [1, 2, 20])
@pytest.mark.parametrize("name", ["no_such_kernel", "relu", "batch_statistics"])
def test_a_step_on_a_gpu_without_any_measurement(name: str, kinds: int) -> None:
    """Its interval has at most a factor of 2 between its ends, and more kinds of kernels do not widen it."""
    accesses = PLAN.train.launches[0].accesses
    works = [estimated("mbc", f"{name}{i if i else ''}") for i in range(kinds)]
    program = Program(tuple(Launch(work, (), Stream.COMPUTE, accesses) for work in works), (), (), ())
    low, high = time_range_us(program, TIMING, A100)
    assert low <= 100 * kinds / OTHER_GPU_STEP**0.5 and 100 * kinds * OTHER_GPU_STEP**0.5 <= high
    assert high / low <= WIDEST_STEP * (1 + 1e-9)
    one_low, one_high = time_range_us(replace(program, launches=program.launches[:1]), TIMING, A100)
    assert high / low <= one_high / one_low * (1 + 1e-9) or name != "no_such_kernel"

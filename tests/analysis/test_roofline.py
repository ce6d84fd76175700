"""Bytes and arithmetic of every operation, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.analysis.roofline import Bound, Ceilings, Limit, ceilings_of, limits
from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.plan.group import title
from mbc.plan.model import Access, Launch, Mode, Plan, Program
from mbc.source import Source

SOURCE = """
network net(batch = 8) {
  input image[batch, 4, 10, 6] : float
  input target[batch, 8, 5, 3] : float
  x = image |> conv(8, 3, pad=1, bias=true) @wide |> relu
  y = x |> conv(8, 1, stride=2) @thin
  output y
  loss (y, target) |> mse
}
"""
WIDE, THIN = 8 * 8 * 10 * 6, 8 * 8 * 5 * 3  # elements of the results of the two convolutions
IMAGE = 8 * 4 * 10 * 6


def planned(micro_batch: int = 0, precision: str = "fp32") -> Plan:
    options = Options(gpu="h200", settings=(("train.precision", precision),), micro_batch=micro_batch)
    return compile_plan(Source("net.mbc", SOURCE), options)


def by_name(plan: Plan, program: Program | None = None) -> dict[str, Limit]:
    return {one.summary.name: one for one in limits(plan, program or plan.train, ceilings_of(plan))}


def test_counts_of_a_step():
    limit_of = by_name(planned())
    wide, thin = limit_of["wide"], limit_of["thin"]
    assert wide.flops == 2 * WIDE * 4 * 9
    assert wide.moved_bytes == 4 * (IMAGE + 8 * 4 * 9 + WIDE)
    assert thin.flops == limit_of["thin.backward_data"].flops == limit_of["thin.backward_filter"].flops == 2 * THIN * 8
    # A stride of 2 with a kernel of 1 looks at a quarter of the image; its gradient is written whole.
    assert thin.moved_bytes == 4 * (WIDE // 4 + 64 + THIN)
    assert limit_of["thin.backward_filter"].moved_bytes == 4 * (WIDE // 4 + THIN + 64)
    assert limit_of["thin.backward_data"].moved_bytes == 4 * (THIN + 64 + WIDE)
    # Whatever it is fused with: y and dy, dx, and perhaps the gradient of eight biases.
    relu = next(one for one in limit_of.values() if "relu_backward" in one.summary.kind)
    assert (relu.flops, relu.bound) == (0, Bound.MEMORY) and relu.moved_bytes - 4 * 3 * WIDE in (0, 4 * 8)


def test_launches_of_one_kernel_are_distinguished():
    shared = tuple(f"part{i}" for i in range(6))
    assert title((*shared, "sums")) != title((*shared, "backward")) == "part0+5 more+backward"
    assert title(shared) == "part0+part1+part2+part3+part4+part5"


def test_dividing_an_operation_changes_no_limit():
    whole, divided = by_name(planned()), by_name(planned(micro_batch=2))
    assert divided["wide.backward_filter"].summary.micro_batches == (2, 2, 2, 2)
    for name in ("wide", "thin", "wide.backward_filter", "thin.backward_data", "thin.backward_filter"):
        assert (divided[name].flops, divided[name].moved_bytes) == (whole[name].flops, whole[name].moved_bytes)


def test_half_the_bytes_in_bf16():
    assert by_name(planned(precision="bf16"))["wide"].moved_bytes == 2 * (IMAGE + 8 * 4 * 9 + WIDE)


def test_a_fused_group_moves_its_operands_once():
    plan = planned()
    # By hand, for two passes of a convolution in a row, without the time between them.
    launches = {launch.operations: launch for launch in plan.train.launches}
    data, filter_ = launches["thin.backward_data",], launches["thin.backward_filter",]
    accesses = (*data.accesses[:2], filter_.accesses[0], data.accesses[2], filter_.accesses[2])
    fused = Launch(data.work, (*data.operations, *filter_.operations), data.stream, accesses)
    (limit,) = limits(plan, replace(plan.train, launches=(fused,)), ceilings_of(plan))
    assert limit.flops == 2 * (2 * THIN * 8)
    # The gradient of the result is read once for both, and of the image a quarter.
    assert limit.moved_bytes == 4 * (THIN + 64 + WIDE // 4 + WIDE + 64)


def test_rows_that_are_computed_twice_count_twice():
    plan = planned()
    launches = list(plan.train.launches)
    at = next(i for i, launch in enumerate(launches) if launch.operations == ("wide",))
    # As a recomputation does it: into a buffer of its own.
    result = launches[at].accesses[2]
    buffers = (*plan.buffers, plan.buffers[result.buffer])
    again = Access(len(buffers) - 1, result.rows, Mode.WRITE)
    launches.append(replace(launches[at], accesses=(*launches[at].accesses[:2], again)))
    plan = replace(plan, buffers=buffers, offsets=(*plan.offsets, plan.offsets[result.buffer]))
    twice = by_name(plan, replace(plan.train, launches=tuple(launches)))["wide"]
    once = by_name(plan)["wide"]
    assert twice.flops == 2 * once.flops
    assert twice.moved_bytes == once.moved_bytes + 4 * WIDE


def test_the_longer_of_two_times_binds():
    plan = planned()
    cheap = Ceilings(bytes_per_us=1.0, flops_per_us=1e9, launch_us=1.0, measured=True, in_halves=False)
    dear = replace(cheap, bytes_per_us=1e9, flops_per_us=1.0)
    by_bytes, by_flops = ({one.summary.name: one for one in limits(plan, plan.train, c)}["wide"] for c in (cheap, dear))
    assert by_bytes.bound is Bound.MEMORY and by_bytes.limit_us == by_bytes.moved_bytes
    assert by_flops.bound is Bound.ARITHMETIC and by_flops.limit_us == by_flops.flops
    assert by_flops.lost_us == by_flops.summary.time_us - by_flops.flops


def test_ceilings_are_those_of_the_precision():
    gpu = find_spec("h200")
    assert Ceilings.of(gpu, Precision.BF16).flops_per_us == gpu.bf16_tflops * 1e6
    assert Ceilings.of(gpu, Precision.TF32).flops_per_us == gpu.tf32_tflops * 1e6
    plan = planned()
    unknown = replace(plan, target=replace(plan.target, gpu="NVIDIA H200 NVL"))
    assert ceilings_of(plan).measured and not ceilings_of(unknown).measured


def test_fp32_is_emulated_where_that_is_faster():
    gpu = find_spec("h200")
    assert Ceilings.of(gpu, Precision.FP32).flops_per_us == pytest.approx(gpu.fp16_tflops * 1e6 / 3)
    assert Ceilings.of(gpu, Precision.FP32).in_halves
    whole = replace(gpu, fp32_tflops=gpu.fp16_tflops / 2)
    others = ((whole, Precision.FP32), (find_spec("a100-80"), Precision.FP32), (gpu, Precision.TF32))
    for device, precision in others:
        assert not Ceilings.of(device, precision).in_halves
    for device in (whole, find_spec("a100-80")):
        assert Ceilings.of(device, Precision.FP32).flops_per_us == device.fp32_tflops * 1e6


def test_no_roofline_in_float64():
    with pytest.raises(MbcError) as caught:
        ceilings_of(planned(precision="fp64"))
    assert caught.value.code == "MBC196"
    assert "is in fp64, which is for the CPU: a roofline needs predicted times" in caught.value.message

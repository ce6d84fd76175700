"""Estimates: their calculation, the estimates that ship, and the range that is reported for them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import device_specs, find_spec
from mbc.hardware.target import find_device
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.calibration import (
    ALL,
    OTHER_GPU,
    UNCOMPARED,
    WITHOUT_WORKSPACE,
    Calibration,
    Effort,
    Shares,
    Spread,
    busy,
    calibration,
    group,
    mma_sync_tflops,
    peak_tflops,
    shares_of,
    unfitted,
)
from mbc.kernels.convolution_shapes import PASSES, shapes_of
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.conv import mma_gemm
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.kernels.cudnn_estimates import copies_bytes
from mbc.kernels.providers import PROVIDERS
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.profile.model import calibrated
from mbc.profile.paths import bundled_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import read_signature

H200 = find_spec("h200")
ESTIMATING = (CUDNN_CONVOLUTION, CUBLASLT, OWN)


def convolution(
    rows: int = 32,
    precision: Precision = Precision.BF16,
    channels: int = 64,
    kernel: int = 3,
    stride: int = 1,
    kind: str = "convolution",
) -> Request:
    pad = kernel // 2
    a = Convolution((28, 28), (kernel, kernel), (stride, stride), (pad, pad, pad, pad))
    dtype = precision.working
    image = TensorType((rows, channels, 28, 28), dtype)
    weight = TensorType((128, channels, kernel, kernel), dtype)
    result = TensorType((rows, 128, *a.output_size), dtype)
    operands = {
        "convolution": ((image, weight), (result,)),
        "convolution_backward_data": ((result, weight), (image,)),
        "convolution_backward_filter": ((image, result), (replace(weight, dtype=DType.FP32),)),
    }
    return Request(kind, a, *operands[kind], precision)


def variants(request: Request) -> dict[tuple[Layout, bool], str]:
    estimates = CUDNN_CONVOLUTION.estimated(request, H200)
    return {(c.layouts[0], e.variant.startswith(WITHOUT_WORKSPACE)): e.variant for c, e in estimates}


def test_time_is_a_sum() -> None:
    effort = Effort("g", "v", 2.0, 10.0, 4.0)
    assert effort.time_us(Shares(1.0, 1.0)) == 16.0
    assert effort.time_us(Shares(0.5, 2.0)) == 24.0
    assert effort.time_us(Shares(1.0, 1.0, 3.0)) == 20.0
    assert effort.key == "g v" and Effort("g", "", 0, 0, 0).key == "g"


def test_a_machine_is_busy_in_whole_waves() -> None:
    four = replace(H200, multiprocessors=4)
    assert busy(128, 128, 0, four) == 1.0
    assert busy(64, 64, 0, four) == busy(64, 64, 64, four) == 0.25
    assert busy(64 * 5, 64, 0, four) == 5 / 8
    assert busy(1, 1, 0, H200) == 0.02
    assert busy(128, 128, 1 << 20, four) == 1.0  # the sum is split


def test_a_spread_is_of_ratios() -> None:
    ratios = [0.5 + 0.1 * i for i in range(11)]  # 0.5 .. 1.5
    spread = Spread.of(ratios[::-1])
    assert (spread.count, spread.median) == (11, pytest.approx(1.0))
    assert (spread.low, spread.high) == (pytest.approx(0.6), pytest.approx(1.4))
    assert (spread.error, spread.error_high) == (pytest.approx(0.3), pytest.approx(0.5))


def test_ranges_hold_the_estimate_and_are_wider_on_other_gpus() -> None:
    ours = calibration()
    spread = Spread(9, 1.0, 0.9, 1.2, 0.1, 0.2)
    assert ours.factors(spread, H200) == (0.9, 1.2)
    for name, device in device_specs().items():
        if name != "h200":
            assert ours.factors(spread, device) == (0.9 / OTHER_GPU, 1.2 * OTHER_GPU)
    # Where the estimate was always too low, it is the lower end itself.
    assert ours.factors(Spread(9, 1.5, 1.3, 2.0, 0.5, 1.0), H200) == (1.0, 2.0)


def test_the_shipped_table_is_complete() -> None:
    ours = calibration()
    assert ours.gpu == H200.name and ours.requests > 100
    assert ours.spreads[ALL].count > 100
    for spread in ours.spreads.values():
        assert spread.count > 0 and 0 < spread.low <= spread.median <= spread.high and spread.error <= spread.error_high
    assert all(s.arithmetic > 0 and s.memory > 0 for s in ours.shares.values())
    providers = {p.name for p in PROVIDERS}
    assert {key.split()[0] for key in ours.shares} <= providers


def test_estimates_on_the_gpu_they_were_fitted_to_are_of_use() -> None:
    """The limits are no goals; beyond them the estimates would be useless."""
    overall = calibration().spreads[ALL]
    assert overall.error < 0.3 and 0.8 < overall.median < 1.25


def test_work_without_a_profile_is_marked() -> None:
    empty = Calibration("X", "", 0, "", "", 0, {}, {})
    effort = Effort(group("cudnn", "convolution", Precision.BF16, H200), "straight", 1.0, 10.0, 10.0)
    assert shares_of(empty.shares, effort) == unfitted(effort)
    own = Effort(group("mbc", "relu", Precision.BF16, H200), "", 1.0, 0.0, 10.0)
    pooled, fitted = Shares(1.0, 0.7), Shares(1.0, 0.9)
    assert shares_of({"mbc": pooled}, own) == pooled
    assert shares_of({"mbc": pooled, "mbc relu": fitted}, own) == fitted
    assert shares_of({"mbc": pooled}, effort) == unfitted(effort)
    assert empty.spread("cudnn convolution half", bare=False) is UNCOMPARED
    direct = replace(effort, variant="no_workspace converted")
    assert empty.estimate_us(direct) > empty.estimate_us(effort)


def test_both_half_precisions_and_all_of_an_own_kernel_are_one_group() -> None:
    assert group("cudnn", "convolution", Precision.BF16, H200) == group("cudnn", "convolution", Precision.FP16, H200)
    pair = Precision.TF32, Precision.FP32
    h200, t4 = ({group("cudnn", "convolution", p, gpu) for p in pair} for gpu in (H200, find_spec("t4")))
    assert len(h200) == 2 and t4 == {"cudnn convolution fp32"}, "a T4 has no tf32, and libraries run fp32"
    assert group("mbc", "relu", Precision.BF16, H200) == group("mbc", "relu", Precision.FP32, H200) == "mbc relu"


def test_peaks() -> None:
    t4 = find_spec("t4")
    assert peak_tflops(t4, Precision.FP16) > peak_tflops(t4, Precision.TF32)
    with pytest.raises(KeyError):
        peak_tflops(H200, Precision.FP64)


@pytest.mark.parametrize(
    "request_, first, last",
    [
        (convolution(), "converted", "straight"),
        (convolution(precision=Precision.FP32), "straight", "converted"),
        (convolution(channels=3), "unaligned", "unaligned"),
        (convolution(kernel=1), "straight", "straight"),  # 784 pixels are whole loads
        (convolution(kernel=1, stride=2), "converted", "straight"),
        (convolution(stride=2, kind="convolution_backward_data"), "converted", "strided"),
        (convolution(kind="convolution_backward_filter"), "converted", "straight"),
    ],
)
def test_how_engines_come_at_operands(request_: Request, first: str, last: str) -> None:
    by_layout = variants(request_)
    assert by_layout[Layout.CHANNELS_FIRST, False] == first and by_layout[Layout.CHANNELS_LAST, False] == last
    assert by_layout[Layout.CHANNELS_FIRST, True] == f"no_workspace {first}"


def test_a_stride_leaves_pixels_unread() -> None:
    (_, read), *_ = CUDNN_CONVOLUTION.estimated(convolution(kernel=1, stride=2), H200)
    (_, written), *_ = CUDNN_CONVOLUTION.estimated(
        convolution(kernel=1, stride=2, kind="convolution_backward_data"), H200
    )
    assert read.memory_us < written.memory_us


@pytest.mark.parametrize("kind", ["convolution", "convolution_backward_data", "convolution_backward_filter"])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_product_of_a_pass_has_its_operations(kind: str, stride: int) -> None:
    shapes = shapes_of(convolution(kind=kind, stride=stride, kernel=4 if stride == 2 else 3))
    assert shapes is not None
    assert 2 * math.prod(shapes.product(PASSES[kind])) == pytest.approx(
        shapes.operations, rel=0.01 if stride == 1 else 0.2
    )


def requests() -> list[Request]:
    x, w = TensorType((1024, 4096), DType.BF16), TensorType((1000, 4096), DType.BF16)
    y = TensorType((64, 64, 56, 56), DType.BF16)
    return [
        convolution(),
        convolution(kind="convolution_backward_data"),
        convolution(kind="convolution_backward_filter"),
        Request("linear", Linear((4096,)), (x, w), (TensorType((1024, 1000), DType.BF16),), Precision.BF16),
        Request("relu", NoAttributes(), (y,), (y,), Precision.BF16),
    ]


@pytest.mark.parametrize("request_", requests(), ids=lambda r: r.kind)
def test_candidates_have_the_estimates(request_: Request) -> None:
    for provider in ESTIMATING:
        pairs = list(provider.estimated(request_, H200))
        assert [c for c, _ in pairs] == list(provider.candidates(request_, H200))
        for candidate, effort in pairs:
            assert candidate.time_us == calibration().estimate_us(effort) > effort.launch_us
            assert effort.group.startswith(f"{provider.name} ") and not candidate.measured


@pytest.mark.parametrize("request_", requests(), ids=lambda r: r.kind)
def test_a_slower_gpu_takes_longer(request_: Request) -> None:
    def best_us(name: str) -> float:
        device = find_spec(name)
        return min(c.time_us for p in PROVIDERS for c in p.candidates(request_, device))

    assert best_us("h200") < best_us("a100-40") < best_us("rtx-3090")


def grouped(groups: int, precision: Precision = Precision.BF16, stride: int = 1, kind: str = "convolution") -> Request:
    a = Convolution((28, 28), (3, 3), (stride, stride), (1, 1, 1, 1), groups=groups)
    image = TensorType((64, 256, 28, 28), precision.working)
    weight = TensorType((256, 256 // groups, 3, 3), precision.working)
    result = TensorType((64, 256, *a.output_size), precision.working)
    inputs, output = ((image, weight), result) if kind == "convolution" else ((result, weight), image)
    return Request(kind, a, inputs, (output,), precision)


def efforts(request: Request, bare: bool = False) -> list[Effort]:
    estimates = [effort for _, effort in CUDNN_CONVOLUTION.estimated(request, H200)]
    return [effort for effort in estimates if effort.variant.startswith(WITHOUT_WORKSPACE) == bare]


def test_narrow_groups_are_computed_as_whole_tiles():
    """Groups of 32 channels need 4 times the operations of groups of 8, and take equally long on tensor cores."""
    for groups, wider in ((32, 8), (64, 32)):
        for one, other in zip(efforts(grouped(groups)), efforts(grouped(wider)), strict=True):
            assert one.arithmetic_us == pytest.approx(other.arithmetic_us)
    for precision in (Precision.FP32, Precision.TF32):
        for one, other in zip(efforts(grouped(32, precision)), efforts(grouped(8, precision)), strict=True):
            assert 4 * one.arithmetic_us == pytest.approx(other.arithmetic_us)
    for one, other in zip(efforts(grouped(2)), efforts(grouped(1)), strict=True):
        assert 2 * one.arithmetic_us == pytest.approx(other.arithmetic_us), "as wide as a tile"


@pytest.mark.parametrize("kind", ["convolution", "convolution_backward_filter", "linear"])
def test_products_are_not_faster_than_the_peak(kind: str) -> None:
    """A large product takes the time of nine tenths of the peak, although the shares of its class may be larger."""
    rows, channels = 1 << 17, 2048
    if kind == "linear":
        image, weight = TensorType((rows, channels), DType.BF16), TensorType((channels, channels), DType.BF16)
        request = Request(kind, Linear((channels,)), (image, weight), (image,), Precision.BF16)
    else:
        a = Convolution((32, 32), (1, 1), (1, 1), (0, 0, 0, 0))
        image = TensorType((rows // 1024, channels, 32, 32), DType.BF16)
        weight = TensorType((channels, channels, 1, 1), DType.BF16)
        types = (image, weight, image) if kind == "convolution" else (image, image, weight)
        request = Request(kind, a, types[:2], types[2:], Precision.BF16)
    least_us = 2.0 * rows * channels**2 / (0.9 * H200.bf16_tflops * 1e6)
    times = [calibration().estimate_us(effort) for _, effort in CUBLASLT.estimated(request, H200)]
    assert times and all(least_us <= time <= 1.6 * least_us for time in times)


def in_groups_of(channels: int, precision: Precision = Precision.BF16) -> Effort:
    """Return the effort of a forward pass of four groups of this number of channels, with its workspace."""
    request = grouped(4, precision)
    image = TensorType((64, 4 * channels, 28, 28), precision.working)
    weight = TensorType((256, channels, 3, 3), precision.working)
    return efforts(replace(request, inputs=(image, weight)))[0]


def test_groups_of_no_power_of_two_channels_are_a_class_of_their_own() -> None:
    shares, variants = calibration().shares, {n: in_groups_of(n).variant for n in range(2, 200)}
    assert all(variant == ("grouped copied" if n.bit_count() > 1 else "grouped") for n, variant in variants.items())
    assert all(in_groups_of(24, exact).variant == "grouped" for exact in (Precision.FP32, Precision.TF32))
    narrow, wide = in_groups_of(24), in_groups_of(192)
    assert shares_of(shares, narrow) == shares_of(shares, wide) == shares["cudnn half grouped copied"]
    assert 3 * narrow.arithmetic_us == pytest.approx(wide.arithmetic_us), "one tile of 64 channels, and three"


def test_copies_of_groups_are_padded_where_the_heuristics_choose_well_with_them() -> None:
    """Filter gradients have copies of 32 channels for 24, other passes only of groups that are wider than a tile."""
    for channels, padded in ((24, {0: 24, 1: 24, 2: 32}), (168, dict.fromkeys(range(3), 256))):
        image = TensorType((64, 4 * channels, 28, 28), DType.BF16)
        weight = TensorType((4 * channels, channels, 3, 3), DType.BF16)
        shapes = shapes_of(replace(grouped(4), inputs=(image, weight), outputs=(image,)))
        assert shapes is not None
        for number, wide in padded.items():
            elements = 2 * 64 * 4 * wide * 28 * 28 + 4 * wide * wide * 9
            copies = copies_bytes(shapes, number, Precision.BF16, Layout.CHANNELS_LAST)
            assert copies == 2 * elements + 3 * 512, (channels, number)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(("kernel", "tile"), [((3, 3), 128), ((1, 1), 1)])
def test_few_channels_of_a_result_count_as_a_tile(kind: str, kernel: tuple[int, int], tile: int) -> None:
    """A 3 x 3 convolution to 32 channels takes as long on tensor cores as one to 128; 1 x 1 ones are products."""

    def tensor_core_us(columns: int) -> list[float]:
        a = Convolution((64, 64), kernel, (1, 1), (kernel[0] // 2,) * 4)
        filters, channels = (256, columns) if kind == "convolution_backward_data" else (columns, 256)
        image, result = (TensorType((64, count, 64, 64), DType.BF16) for count in (channels, filters))
        weight = TensorType((filters, channels, *kernel), DType.BF16)
        types = {"convolution": (image, weight, result), "convolution_backward_data": (result, weight, image)}
        *inputs, output = types.get(kind, (image, result, weight))
        request = Request(kind, a, tuple(inputs), (output,), Precision.BF16)
        shapes = shapes_of(request)
        assert shapes is not None
        share = busy(*shapes.product(PASSES[kind]), H200)
        return [effort.arithmetic_us * share for effort in efforts(request)]

    for columns in (32, 128, 192):
        tiles = -(-columns // tile) * tile
        for narrow, whole in zip(tensor_core_us(columns), tensor_core_us(256), strict=True):
            assert narrow == pytest.approx(whole * tiles / 256)


def test_a_stride_makes_the_data_gradient_of_groups_slower():
    kind = "convolution_backward_data"
    assert {effort.variant for effort in efforts(grouped(32, stride=2, kind=kind))} == {"grouped strided"}
    assert {effort.variant for effort in efforts(grouped(32, stride=2))} == {"grouped"}

    def least_us(stride: int) -> float:
        return min(calibration().estimate_us(effort) for effort in efforts(grouped(32, stride=stride, kind=kind)))

    # Of a quarter of the results.
    assert least_us(2) > least_us(1) / 2


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("bare", [False, True])
def test_no_convolution_is_estimated_faster_than_the_peak(kind: str, bare: bool):
    request = convolution(512, channels=512, kind=kind)
    shapes = shapes_of(request)
    assert shapes is not None
    least_us = shapes.operations / (H200.bf16_tflops * 1e6)
    assert all(calibration().estimate_us(effort) > least_us for effort in efforts(request, bare))


def test_kernels_of_a_family_overlap_arithmetic_and_bytes() -> None:
    effort = Effort("mbc k", "v", 2.0, 10.0, 4.0, "mbc mma.sync")
    assert effort.time_us(Shares(1.0, 1.0)) == 12.0
    assert effort.time_us(Shares(1.0, 0.25, 2.0)) == 20.0
    fitted = {"mbc": Shares(0.1, 0.1), "mbc mma.sync": Shares(0.5, 1.0)}
    assert shares_of(fitted, effort) == fitted["mbc mma.sync"], "not those of kernels without a family"
    assert shares_of({"mbc": fitted["mbc"]}, effort) == unfitted(effort) == Shares(0.6, 0.85, 1.7)
    assert shares_of({**fitted, "mbc k": Shares(0.7, 0.7)}, effort) == Shares(0.7, 0.7)


@pytest.mark.parametrize(
    ("gpu", "half", "tf32"),
    [
        ("h200@sm_80", 623, 312),
        ("h200@64@sm_80", 302, 151),
        ("b200", 1402, 701),
        ("a100-80", 312, 156),
        ("a10", 125, 62),
    ],
)
def test_mma_sync_has_a_peak_of_its_own_beside_newer_instructions(gpu: str, half: float, tf32: float) -> None:
    device = find_device(gpu)
    assert mma_sync_tflops(device, Precision.BF16) == pytest.approx(half, rel=0.02)
    assert mma_sync_tflops(device, Precision.TF32) == pytest.approx(tf32, rel=0.02)
    assert mma_sync_tflops(device, Precision.FP32) == device.fp32_tflops
    if device.mma_sync_tflops:
        measured = replace(device, mma_sync_tflops=500.0)
        assert mma_sync_tflops(measured, Precision.FP16) == min(500.0, measured.fp16_tflops)


def test_a_kernel_by_mma_sync_waits_for_its_last_round_of_tiles() -> None:
    device = find_device("rtx-3060")  # 28 multiprocessors
    request = convolution(rows=32, channels=64)

    def arithmetic_us(tiles: int) -> float:
        return mma_gemm.arithmetic_us(request, device, tiles * mma_gemm.PIXELS, mma_gemm.FILTERS[0], 576)

    assert arithmetic_us(1) == arithmetic_us(28) == arithmetic_us(29) / 2 == arithmetic_us(56) / 2
    flops = 2 * 28 * mma_gemm.PIXELS * mma_gemm.FILTERS[0] * 576
    assert arithmetic_us(28) == pytest.approx(flops / (device.bf16_tflops * 1e6))


def test_all_kernels_by_mma_sync_have_estimates_by_its_rate() -> None:
    by_mma_sync = [kernel for kernel in KERNELS.values() if kernel.needs is Instruction.MMA_SYNC]
    assert len(by_mma_sync) > 30
    for kernel in by_mma_sync:
        assert (kernel.arithmetic_us is None) == kernel.by_measurement, kernel.name


def test_stems_take_as_long_as_a_gpu_that_no_fit_has_seen_measured() -> None:
    """The shares were fitted to half of the layers of an H200; an H100 has another bandwidth."""
    profile = read_profile(bundled_path("NVIDIA H100 80GB HBM3"))
    device = calibrated(find_spec("h100"), profile)
    errors: dict[str, list[float]] = defaultdict(list)
    for key in {*profile.measurements, *profile.earlier}:
        request = read_signature(key)
        times_us = {m.name: m.time_us for m in (*profile.earlier.get(key, ()), *profile.measurements.get(key, ()))}
        if any(name.startswith("stem_conv") for name in times_us):
            for candidate, _ in OWN.estimated(request, device):
                if candidate.name in times_us:
                    errors[candidate.name].append(abs(times_us[candidate.name] / candidate.time_us - 1))
    stems = {name: of_kernel for name, of_kernel in errors.items() if name.startswith("stem_conv")}
    assert len(stems) == 4 and min(map(len, stems.values())) >= 15
    assert all(median(of_kernel) < 0.2 for of_kernel in stems.values())


def test_no_share_moves_more_bytes_than_a_cards_bandwidth_and_cache_allow() -> None:
    assert Effort("mbc k", "v", 2.0, 0.0, 4.0, least_us=3.0).time_us(Shares(1.0, 2.0)) == 5.0
    device = find_device("a10")
    image = TensorType((64, 96, 112, 112), DType.BF16)
    request = Request("relu", NoAttributes(), (image,), (image,), Precision.BF16)
    (_, effort), *_ = OWN.estimated(request, device)
    assert effort.least_us == pytest.approx((2 * image.size_bytes - device.l2_bytes) / (device.copy_gb_s * 1e3))
    assert effort.time_us(Shares(1.0, 1.6)) > effort.least_us
    small = replace(request, inputs=(image.with_rows(1),), outputs=(image.with_rows(1),))
    assert next(iter(OWN.estimated(small, device)))[1].least_us == 0.0, "the cache holds all of it"
    assert next(iter(OWN.estimated(request, H200)))[1].least_us == 0.0, "shares were fitted to it"

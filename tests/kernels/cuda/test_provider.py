"""The provider's declarations of mbc's own kernels agree with their sources and with the operations."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.toolchain import find_toolchain
from mbc.errors import MbcError
from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Layout, Precision, TensorType, layout_matters
from mbc.kernels.base import Call, Candidate, Request
from mbc.kernels.cuda import KERNELS, OWN, programs_of, symbol_of, symbols_of
from mbc.kernels.cuda.base import THREADS, always, layout_of, planar
from mbc.kernels.cuda.conv import stem_volume
from mbc.kernels.cuda.generated import lowering
from mbc.kernels.cuda.norm.batch_norm import parts
from mbc.kernels.cuda.norm.reduce import LEAST_TERMS, SUM_BLOCKS, Sums
from mbc.kernels.cuda.pool.pooling import takes_pool
from mbc.kernels.launch_operands import count
from mbc.kernels.nccl import COLLECTIVES
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.loss import CrossEntropy
from mbc.ops.pointwise import Pointwise
from mbc.ops.reduce import Reduce
from mbc.profile.locate import find_profile
from mbc.profile.signature import read_signature
from mbc.resources import folder
from tests.kernels.cuda.cases import CASES, GENERATED, STATISTICS, Case
from tests.kernels.cuda.groups import GROUPS
from tests.kernels.cuda.launching import offered_anywhere

OFFERED = Path(__file__).with_name("offered.txt")
SOURCES = folder("templates") / "kernels"
H200 = find_spec("h200")
FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
LAUNCHER = re.compile(r"^(?:extern \"C\" )?const char\* (mbc_\w+)\(const MbcCall& call\) \{", re.MULTILINE)
SHORT = re.compile(r"^MBC_LAUNCHER\((\w+), (.*)\)$", re.MULTILINE)
BODY = re.compile(LAUNCHER.pattern + r"(.*?)(?:^\}| \}$)", re.MULTILINE | re.DOTALL)


def _relu(*shape: int, precision: Precision = Precision.FP32) -> Request:
    x = TensorType(shape, precision.working)
    return Request("relu", NoAttributes(), (x,), (x,), precision)


def _candidates(case: Case, precision: Precision = Precision.BF16) -> list[Candidate]:
    return offered_anywhere(case.request(precision))


def _launchers(file: str) -> set[str]:
    text = (SOURCES / file).read_text(encoding="utf-8")
    return {*LAUNCHER.findall(text), *(f"mbc_{name}" for name, _ in SHORT.findall(text))}


def test_every_kernel_has_a_launcher_in_its_file():
    for kernel in KERNELS.values():
        for file, launcher in zip(kernel.files, kernel.launchers, strict=True):
            assert not file or launcher.symbol in _launchers(file), kernel.name


def test_every_launcher_has_a_kernel_and_a_body_of_its_own():
    called = set(symbols_of(KERNELS))
    bodies: dict[str, str] = {}
    for path in SOURCES.rglob("*.cu"):
        text = path.read_text(encoding="utf-8")
        assert called >= _launchers(path.relative_to(SOURCES).as_posix())
        for name, body in (*BODY.findall(text), *((f"mbc_{name}", body) for name, body in SHORT.findall(text))):
            same = bodies.setdefault(f"{path.name} {' '.join(body.split())}", name)
            assert same == name, f"{name} is {same}: one launcher serves both kernels (`OwnKernel.named`)"
            assert not re.fullmatch(r"\s*return mbc_\w+\(call\);\s*", body), f"{name} only calls another launcher"
    assert len(bodies) > 200


def test_kernels_of_one_launcher_fill_the_same_structure_and_name_the_same_operands():
    for kernel in KERNELS.values():
        same = (other for other in KERNELS.values() if other.launchers[0].function == kernel.launchers[0].function)
        assert {other.launchers for other in same} == {kernel.launchers}, kernel.name
    assert symbols_of(["pad"]) == ["mbc_strided_slice"]


def test_files_of_kernels_have_names_of_their_own():
    """Names are unique, because packages hold all files in one flat folder and includes name no folder."""
    names = [path.name for path in SOURCES.rglob("*.cu*")]
    assert len(names) == len(set(names)) > 50
    assert all(path.parent.parent == SOURCES for path in SOURCES.rglob("*.cu*"))


def test_every_source_opens_with_its_computation_and_bottleneck():
    for path in SOURCES.rglob("*.cu"):
        head = "".join(itertools.takewhile(lambda line: line.startswith("//"), path.open(encoding="utf-8")))
        assert "GEMM" in head or "// Bytes" in head, path.name
        assert "Limit" in head and re.search(r"// (Warps|Threads|Tile|Kernels) |wgmma", head), path.name


def test_every_operation_that_runs_has_a_kernel():
    # NCCL alone moves data between ranks.
    running = {name for name, kind in KINDS.items() if kind.evaluate is not None and not kind.view} - set(COLLECTIVES)
    running.remove("detach")  # a pass takes it out of the training graph
    running -= {case.kind for case in GENERATED}  # test_generated runs their kernels
    # What takes only some requests of its kind has another beside it that takes them all.
    # A guard clips the norm of the gradients or not: a kernel for each.
    assert {kernel.name for kernel in KERNELS.values() if kernel.kind == "guard"} == {"guard", "guard_clip_norm"}
    # Spatial operations have kernels along one and two axes; along three, libraries have convolutions.
    whole = {kernel.name for kernel in KERNELS.values() if kernel.takes in (always, planar, takes_pool)}
    assert running | {"convert"} == whole | {"guard"}


def test_the_cases_use_every_kernel_in_the_types_and_layouts_of_before(update_expected: bool):
    """Cases of a kernel that is no longer offered for them would test other kernels only.

    The list has the kernels that lack a type or a layout in all cases.
    `pytest tests/kernels/cuda/test_provider.py --update-expected` writes what is offered.
    """
    precisions = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
    seen: dict[str, set[str]] = {name: set() for name in KERNELS}
    for case, precision in itertools.product((*CASES, *GENERATED, *GROUPS, *STATISTICS), precisions):
        if precision in case.precisions or precision is Precision.TF32:
            request = case.request(precision)
            for candidate in offered_anywhere(request):
                seen[candidate.name].add(f"{precision} {layout_of(request, candidate.layouts)}")
    without = sorted(name for name, ways in seen.items() if not ways)
    assert not without, f"add cases of {', '.join(without)} to tests/kernels/cuda/cases.py or groups.py"
    all_ways = {f"{precision} {layout}" for precision in precisions for layout in Layout}
    lines = [f"{name}: {', '.join(sorted(ways))}\n" for name, ways in sorted(seen.items()) if ways != all_ways]
    if update_expected:
        OFFERED.write_text("".join(lines), encoding="utf-8")
    assert lines == OFFERED.read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_candidates(case: Case):
    request = case.request(Precision.BF16)
    operands = (*request.inputs, *request.outputs)
    candidates = _candidates(case)
    assert len({(c.name, c.layouts) for c in candidates}) == len(candidates) > 0
    for candidate in candidates:
        assert len(candidate.layouts) == len(operands)
        for type_, layout in zip(operands, candidate.layouts, strict=True):
            assert layout is FIRST or layout_matters(type_.shape)
        assert candidate.deterministic and not candidate.measured
        assert candidate.time_us >= H200.launch_us
        assert candidate.accumulates == KERNELS[candidate.name].accumulates
        arguments = OWN.arguments(candidate.call(request), case.first_row)
        assert all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in arguments.integers)
        assert all(isinstance(value, float | int) and not math.isnan(value) for value in arguments.reals)


def test_names_of_operands_are_as_many_as_the_pointers_of_a_launch():
    """Every candidate of every case: what is there only for some integers is counted by them."""
    named: set[str] = set()
    for case, precision in itertools.product((*CASES, *GROUPS, *STATISTICS), (Precision.FP32, Precision.BF16)):
        for candidate in _candidates(case, precision):
            kernel, call = KERNELS[candidate.name], candidate.call(case.request(precision))
            if not kernel.operands:
                continue
            integers = dict(zip(kernel.struct.names(), OWN.arguments(call, 0).integers, strict=False))
            has_workspace = candidate.workspace_bytes > 0
            pointers = len(call.operands) + has_workspace
            assert count(kernel.launchers[0], integers, has_workspace) == pointers, case.name
            named.add(kernel.name)
    assert named == {kernel.name for kernel in KERNELS.values() if kernel.operands}


def test_parts_of_a_reduction_depend_on_the_elements_of_a_channel_alone():
    for layout in Layout:
        few, many, *others = (
            parts(TensorType(size, DType.BF16), layout)
            for size in ((8, 64, 2, 2), (1 << 18, 64, 1, 1), (4096, 64, 8, 8), (64, 64, 64, 64))
        )
        assert few < many and set(others) == {many}, layout


def test_kernels_accumulate_where_operations_may():
    for name, kind in KINDS.items():
        if kind.accumulates:
            assert KERNELS[name].accumulates, name


def _offered(
    attributes: Convolution,
    channels: int,
    filters: int,
    kind: str = "",
    precision: Precision = Precision.BF16,
    rows: int = 8,
) -> set[str]:
    """Names of the candidates of one pass."""
    x = TensorType((rows, channels, *attributes.size), precision.working)
    y = TensorType((rows, filters, *attributes.output_size), precision.working)
    w = TensorType((filters, channels // attributes.groups, *attributes.kernel), precision.working)
    inputs, output = {"": ((x, w), y), "_backward_data": ((y, w), x), "_backward_filter": ((x, y), w)}[kind]
    request = Request(f"convolution{kind}", attributes, inputs, (output,), precision)
    return {candidate.name for candidate in OWN.candidates(request, H200)}


def _depthwise(attributes: Convolution, channels: int = 32, depth_multiplier: int = 1, kind: str = "") -> set[str]:
    return _offered(attributes, channels, channels * depth_multiplier, kind)


@pytest.mark.parametrize("kind", ("", "_backward_data", "_backward_filter"))
def test_depthwise_convolutions_have_two_kernels(kind: str):
    pad, both = (1, 1, 1, 1), {f"convolution{kind}", f"depthwise{kind}"}
    assert _depthwise(Convolution((9, 8), (3, 3), (1, 1), pad, (1, 1), 32), kind=kind) == both
    assert _depthwise(Convolution((9, 8), (3, 3), (2, 2), (0, 1, 0, 1), (1, 1), 32), kind=kind) == both
    assert _depthwise(Convolution((9, 8), (3, 3), (2, 2), pad, (1, 1), 32), depth_multiplier=3, kind=kind) == both
    for other in (
        Convolution((9, 8), (3, 3), (1, 1), pad, (2, 2), 32),
        Convolution((9, 8), (3, 3), (2, 1), pad, (1, 1), 32),
        Convolution((9, 8), (3, 5), (1, 1), pad, (1, 1), 32),
        Convolution((9, 8), (3, 3), (1, 1), pad, (1, 1), 16),
        Convolution((9, 8), (3, 3), (1, 1), pad, (1, 1), 1),
        Convolution((8192, 8192), (3, 3), (1, 1), pad, (1, 1), 32),  # a sample of 2^31 elements
    ):
        assert _depthwise(other, kind=kind) & both == {f"convolution{kind}"}, other


@pytest.mark.parametrize("kind", ("", "_backward_data", "_backward_filter"))
def test_which_larger_depthwise_filters_have_kernels(kind: str):
    pad, direct = (2, 2, 2, 2), {f"convolution{kind}"}
    for name, kernel in (("5x5", (5, 5)), ("7x7", (7, 7)), ("1d", (1, 11)), ("1d", (9, 1)), ("1d", (1, 2))):
        both = direct | {f"depthwise_{name}{kind}"}
        for stride in ((1, 1), (2, 2)):
            a = Convolution((19, 18), kernel, stride, pad, (1, 1), 32)
            assert _depthwise(a, kind=kind) == both
            assert _depthwise(a, depth_multiplier=2, kind=kind) == direct
    for kernel in ((1, 1), (1, 12), (13, 1), (5, 7), (9, 9), (4, 4)):
        assert _depthwise(Convolution((19, 18), kernel, (1, 1), pad, (1, 1), 32), kind=kind) == direct, kernel
    for other in (
        Convolution((19, 18), (5, 5), (1, 1), pad, (2, 2), 32),
        Convolution((19, 18), (5, 5), (2, 1), pad, (1, 1), 32),
        Convolution((19, 18), (5, 5), (1, 1), pad, (1, 1), 16),
        Convolution((8192, 8192), (5, 5), (1, 1), pad, (1, 1), 32),  # a sample of 2^31 elements
    ):
        assert _depthwise(other, kind=kind) == direct, other
    assert _depthwise(Convolution((19, 18), (5, 5), (1, 1), pad, (1, 1), 33), channels=33, kind=kind) == direct


MANY = 200_000  # rows, with which the images below have 2^31 elements and more


@pytest.mark.parametrize("kind", ("", "_backward_data", "_backward_filter"))
def test_few_filters_are_up_to_eight_of_one_place(kind: str):
    name, a = f"conv1x1_narrow{kind}", Convolution((14, 14), (1, 1))
    for channels, filters, rows in ((8, 1, 8), (64, 8, MANY), (1024, 5, 8)):
        assert name in _offered(a, channels, filters, kind, rows=rows)
    assert name in _offered(a, 12, 8, kind, Precision.FP32)
    for channels, filters in ((64, 9), (12, 8), (1032, 8)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        Convolution((14, 14), (1, 3)),
        Convolution((14, 14), (1, 1), (2, 2)),
        Convolution((14, 14), (1, 1), pad=(1, 1, 1, 1)),
        Convolution((14, 14), (1, 1), groups=2),
    ):
        assert name not in _offered(other, 64, 8, kind), other


def test_which_transposed_convolutions_are_non_overlapping():
    name, kind, a = "conv_transpose_nonoverlapping", "_backward_data", Convolution((14, 14), (2, 2), (2, 2))
    assert name in _offered(a, 64, 192, kind) and name in _offered(a, 64, 64, kind, Precision.FP16)
    assert name not in _offered(a, 64, 64, kind, Precision.FP32)
    assert name not in _offered(a, 64, 64, kind, rows=MANY)
    for channels, filters in ((32, 64), (64, 96)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        Convolution((15, 14), (2, 2), (2, 2)),
        Convolution((14, 14), (2, 2), (1, 1)),
        Convolution((14, 14), (2, 2), (2, 2), (1, 1, 1, 1)),
        Convolution((14, 14), (2, 2), (2, 2), groups=2),
        Convolution((15, 15), (3, 3), (3, 3)),  # 576 columns of the product
        Convolution((14, 14), (1, 1)),
    ):
        assert name not in _offered(other, 64, 64, kind), other


def test_which_transposed_convolutions_of_volumes_are_non_overlapping():
    name, kind, a = "conv_transpose_nonoverlapping_volume", "_backward_data", Convolution((4, 6, 8), (2,) * 3, (2,) * 3)
    for channels in (32, 64, 128):
        assert name in _offered(a, channels, 64, kind)
    for channels, filters in ((16, 64), (32, 32)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        Convolution((5, 6, 8), (2, 2, 2), (2, 2, 2)),
        Convolution((4, 6, 8), (2, 2, 2), (2, 2, 1)),
        Convolution((4, 6, 8), (2, 2, 2), (2, 2, 2), (0, 0, 0, 0, 1, 1)),
    ):
        assert name not in _offered(other, 64, 64, kind), other


@pytest.mark.parametrize("kind", ("", "_backward_data"))
def test_weight_stationary_convolutions_keep_the_weights_of_a_block_in_shared_memory(kind: str):
    name, a = f"weight_stationary_conv{kind}", Convolution((14, 14), (3, 3), pad=(1, 1, 1, 1))
    for channels, filters in ((64, 64), (128, 64), (64, 128), (128, 128)):
        assert name in _offered(a, channels, filters, kind)
    assert name in _offered(a, 64, 64, kind, Precision.FP16)
    assert name not in _offered(a, 64, 64, kind, Precision.FP32)
    assert name not in _offered(a, 64, 64, kind, rows=MANY)
    for channels, filters in ((192, 192), (32, 64), (64, 96)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        Convolution((14, 14), (1, 1)),
        Convolution((14, 14), (3, 3), (2, 2), (1, 1, 1, 1)),
        Convolution((14, 14), (3, 3), pad=(2, 2, 2, 2), dilation=(2, 2)),
        Convolution((14, 14), (3, 3), pad=(1, 1, 1, 1), groups=2),
        Convolution((14, 14), (5, 5), pad=(2, 2, 2, 2)),  # 200 KiB of weights, beside the patches
    ):
        assert name not in _offered(other, 64, 64, kind), other


@pytest.mark.parametrize("kind", ("", "_backward_data"))
def test_which_convolutions_sweep_planes(kind: str):
    name, a = f"plane_sweep_conv{kind}", Convolution((14, 15, 16), (3, 3, 3), pad=(1,) * 6)
    for channels, filters in ((32, 32), (64, 32), (32, 64), (48, 48), (64, 64)):
        assert name in _offered(a, channels, filters, kind)
    assert name in _offered(a, 32, 32, kind, Precision.FP16)
    assert name not in _offered(a, 32, 32, kind, Precision.FP32)
    image = Convolution((14, 15), (3, 3), pad=(1, 1, 1, 1))
    assert name in _offered(image, 32, 32, kind)
    many_images = Convolution((14, 15, 16), (1, 3, 3), pad=(0, 0, 1, 1, 1, 1))
    assert name in _offered(many_images, 32, 32, kind)
    for channels, filters in ((16, 32), (128, 128), (32, 40)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        replace(a, stride=(2, 1, 1)),
        replace(a, dilation=(1, 1, 2)),
        replace(a, groups=2),
        replace(a, pad=(3, 0, 1, 1, 1, 1)),  # a plane of the output that sees padding alone
        replace(a, kernel=(3, 3, 1), pad=(1, 1, 1, 1, 0, 0)),
        replace(a, kernel=(2, 3, 3)),
        replace(many_images, pad=(0, 1, 1, 1, 1, 1)),
        Convolution((14,), (3,), pad=(1, 1)),
    ):
        assert name not in _offered(other, 32, 32, kind), other


@pytest.mark.parametrize("kind", ("", "_backward_filter"))
def test_which_stems_of_volumes_sweep_planes(kind: str):
    name, a = f"stem_volume{kind}", Convolution((14, 15, 16), (3, 3, 3), pad=(1,) * 6)
    for channels, filters in ((1, 32), (2, 16), (3, 48), (4, 64)):
        assert name in _offered(a, channels, filters, kind)
    assert stem_volume.SHARED_BYTES <= 99 << 10  # of a block on GPUs of compute capability 8.6
    assert name in _offered(a, 1, 32, kind, Precision.FP16)
    assert name not in _offered(a, 1, 32, kind, Precision.FP32)
    for channels, filters in ((5, 32), (1, 80), (1, 24)):
        assert name not in _offered(a, channels, filters, kind)
    for other in (
        replace(a, stride=(1, 1, 2)),
        replace(a, pad=(3, 0, 1, 1, 1, 1)),
        replace(a, kernel=(1, 3, 3), pad=(0, 0, 1, 1, 1, 1)),
        Convolution((14, 15), (3, 3), pad=(1, 1, 1, 1)),
    ):
        assert name not in _offered(other, 1, 32, kind), other


def test_filter_gradients_that_sweep_planes_have_few_blocks_of_channels():
    name, kind, a = (
        "plane_sweep_conv_backward_filter",
        "_backward_filter",
        Convolution((14, 15, 16), (3, 3, 3), pad=(1,) * 6),
    )
    for channels, filters in ((32, 32), (64, 32), (32, 64), (64, 64), (128, 32)):
        assert name in _offered(a, channels, filters, kind)
    for channels, filters in ((48, 32), (32, 48), (128, 64)):
        assert name not in _offered(a, channels, filters, kind)
    assert name not in _offered(a, 32, 32, kind, Precision.FP32)


def test_copies_beside_a_gemm_are_whole_vectors():
    kernel = KERNELS["conv_transpose_bias_add_concat"]
    request = next(r for c in GROUPS if c.kind == kernel.kind and kernel.takes(r := c.request(Precision.BF16)))
    *others, beside = request.inputs
    rows, channels, *size = beside.shape
    assert channels % 8 == 0
    uneven = TensorType((rows, channels - 4, *size), beside.dtype)
    assert not kernel.takes(replace(request, inputs=(*others, uneven)))


def test_depthwise_filters_split_their_sum_to_fill_the_gpu():
    def partial_results(channels: int, size: int, kernel: int = 3) -> list[int]:
        x, w = (
            TensorType((256, channels, size, size), DType.BF16),
            TensorType((channels, 1, kernel, kernel), DType.FP32),
        )
        half = kernel // 2
        a = Convolution((size, size), (kernel, kernel), (1, 1), (half, half, half, half), (1, 1), channels)
        request = Request("convolution_backward_filter", a, (x, x), (w,), Precision.BF16)
        candidates = [c for c in OWN.candidates(request, H200) if c.name.startswith("depthwise")]
        return [c.workspace_bytes // w.size_bytes for c in candidates]

    assert partial_results(32, 112) == [16, 512]  # channels first: a block a channel and part; last: one for all
    assert partial_results(960, 7) == [0, 49]
    assert partial_results(960, 7, 5) == [25]  # 480 pairs of channels are 15 blocks across
    assert partial_results(960, 7, 7) == [12]


def test_layouts_that_are_the_same_bytes_are_one_candidate():
    assert [c.layouts for c in OWN.candidates(_relu(8, 3, 1, 1), H200)] == [(FIRST, FIRST)]
    assert [c.layouts for c in OWN.candidates(_relu(8, 3, 2, 1), H200)] == [(FIRST, FIRST), (LAST, LAST)]


def test_class_numbers_stay_channels_first():
    (case,) = (c for c in CASES if c.name == "softmax_cross_entropy-smooth0.0-3x7x5x6")
    assert {c.layouts for c in _candidates(case)} == {(FIRST,) * 4, (LAST, FIRST, FIRST, FIRST)}


@pytest.mark.parametrize(("classes", "size", "few"), [(2, (5, 6), True), (32, (5, 6), True), (33, (5, 6), False)])
def test_few_classes_at_many_positions_have_a_second_kernel(classes: int, size: tuple[int, int], few: bool):
    logits, target = TensorType((3, classes, *size), DType.BF16), TensorType((3, *size), DType.INT32)
    scalar = TensorType((1,), DType.FP32)
    request = Request("softmax_cross_entropy", CrossEntropy(), (logits, target), (scalar, scalar), Precision.BF16)
    names = {c.name for c in OWN.candidates(request, H200)}
    assert names == {"softmax_cross_entropy", *(("softmax_cross_entropy_pixels",) if few else ())}


def test_a_cast_may_change_the_layout():
    (case,) = (c for c in CASES if c.name == "cast-widen-3x16x5x6")
    layouts = {c.layouts for c in _candidates(case)}
    assert layouts == {(FIRST, FIRST), (FIRST, LAST), (LAST, FIRST), (LAST, LAST)}
    struct = OWN.arguments(Call(case.request(Precision.BF16), "cast", (), (FIRST, LAST), False, 0), 0).integers
    assert struct == (1, 0, 0, 1, 3, 16, 30)


def test_a_long_sum_takes_a_workspace_and_a_short_one_does_not():
    def workspace_bytes(*shape: int) -> list[int]:
        x = TensorType(shape, DType.FP32)
        vector = TensorType((shape[1],), DType.FP32)
        request = Request("batch_statistics", NoAttributes(), (x,), (vector, vector), Precision.FP32)
        return [c.workspace_bytes for c in OWN.candidates(request, H200)]

    assert workspace_bytes(2, 8, 4, 4) == [0, 0]
    first, last = workspace_bytes(64, 64, 56, 56)
    state_bytes = 64 * 12  # of one part
    assert first % state_bytes == last % state_bytes == 0 and 2 * state_bytes <= min(first, last)
    assert max(first, last) <= 2 << 20


def test_only_requests_whose_kernels_are_generated_have_programs_to_compile():
    x, gate = TensorType((2, 8, 3, 3), DType.BF16), TensorType((2, 8, 1, 1), DType.BF16)
    by_hand = Request("broadcast_mul", NoAttributes(), (x, gate), (x,), Precision.BF16)
    assert lowering.lower(by_hand) is not None and not [*programs_of(by_hand)]
    (program,) = programs_of(_relu(2, 8, 3, 3))
    assert program.symbol == symbol_of("mbc", "relu", _relu(2, 8, 3, 3))


def test_fp64_is_not_for_the_gpu():
    assert list(OWN.candidates(_relu(2, 3, precision=Precision.FP64), H200)) == []


def test_unknown_operations_have_no_candidate():
    assert list(OWN.candidates(Request("flatten", NoAttributes(), (), (), Precision.FP32), H200)) == []


def test_mbc080_unknown_kernel():
    with pytest.raises(MbcError, match="error MBC080: this mbc has no kernel called 'sort'"):
        OWN.arguments(Call(_relu(2, 3), "sort", (), (FIRST, FIRST), False, 0), 0)


def test_mbc081_too_little_workspace():
    x, vector = TensorType((64, 64, 56, 56), DType.FP32), TensorType((64,), DType.FP32)
    request = Request("channel_sum", NoAttributes(), (x,), (vector,), Precision.FP32)
    with pytest.raises(
        MbcError, match=r"error MBC081: kernel 'channel_sum' needs 6144 bytes of workspace, .* gives it 8"
    ):
        OWN.arguments(Call(request, "channel_sum", (), (FIRST, FIRST), False, 8), 0)


def test_mbc082_cannot_accumulate():
    with pytest.raises(MbcError, match="error MBC082: kernel 'relu' cannot add to its output"):
        OWN.arguments(Call(_relu(2, 3), "relu", (), (FIRST, FIRST), True, 0), 0)


NVCC = find_toolchain().nvcc


@pytest.mark.exhaustive
@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("working", (0, 1, 2))
def test_nvcc_compiles_every_kernel(working: int, tmp_path: Path):
    """Each file is compiled alone, as for a module, because two files may use one name."""
    command = [str(NVCC), "-arch=sm_90", "-std=c++17", f"-DMBC_WORKING={working}"]
    command += ["-Xcicc", "-O0", "-Xptxas", "-Ofc=max"]  # hardly optimised, because only compiling is tested
    # nvcc 13 takes the constants of a channel in channels.cuh for a local variable of the lambda that refers to them.
    command += ["-diag-suppress=836"]
    write_launch_headers(tmp_path)
    include = (*(path for path in SOURCES.iterdir() if path.is_dir()), SOURCES.parent / "include", tmp_path)
    command += [*(f"-I{path}" for path in include), "-c", *map(str, sorted(SOURCES.rglob("*.cu")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


def _first_layer(size: int, kernel: int, stride: int, pad: int) -> Request:
    """Return the filter gradient of a first convolution with three channels and 64 filters."""
    a = Convolution((size, size), (kernel, kernel), (stride, stride), (pad, pad, pad, pad))
    out = (size + 2 * pad - kernel) // stride + 1
    shapes = ((4, 3, size, size), (4, 64, out, out), (64, 3, kernel, kernel))
    x, dy, dw = (TensorType(shape, DType.FP32) for shape in shapes)
    return Request("convolution_backward_filter", a, (x, dy), (dw,), Precision.FP32)


@pytest.mark.parametrize("gpu, small, large", [("h200", True, True), ("a100-80", True, True), ("l4", True, False)])
def test_a_gpu_is_offered_kernels_that_fit_its_shared_memory(gpu: str, small: bool, large: bool):
    def offered(request: Request) -> bool:
        return any("stem_conv" in c.name for c in OWN.candidates(request, find_spec(gpu)))

    assert offered(_first_layer(224, 7, 2, 3)) is small
    assert offered(_first_layer(224, 11, 4, 2)) is large


def test_whole_blocks_of_the_filter_pass_fit_as_they_are_meant_to():
    request = replace(_first_layer(224, 7, 2, 3), precision=Precision.TF32)
    kernel = KERNELS["stem_conv_backward_filter_fp32"]
    assert kernel.takes(request) and kernel.shared(request) + 1024 <= (228 << 10) // 3


@pytest.mark.parametrize(
    ("shape", "layout", "vector", "least_blocks"),
    [
        ((64, 96, 56, 56), LAST, 8, SUM_BLOCKS),
        ((64, 384, 14, 14), LAST, 8, SUM_BLOCKS // 2),
        ((128, 40, 56, 56), FIRST, 8, SUM_BLOCKS - 40),
        ((64, 97, 56, 56), LAST, 1, SUM_BLOCKS - 4),
    ],
)
def test_sums_by_channel_keep_a_large_gpu_busy(shape: tuple[int, ...], layout: Layout, vector: int, least_blocks: int):
    """Most threads of the blocks have work."""
    x, a = TensorType(shape, DType.BF16), Reduce((2, 3), (1, shape[1], 1, 1))
    result = TensorType((1, shape[1], 1, 1), DType.FP32)
    sums = Sums.of(Request("row_reduce_dot", a, (x, x), (result,), Precision.BF16), layout)
    adjacent = sums.tile == 0
    blocks = -(-sums.results * sums.lanes // THREADS) if adjacent else -(-sums.results // vector // sums.tile)
    reads = sums.terms // vector if adjacent else sums.terms
    assert sums.vector == vector
    assert least_blocks <= blocks * sums.parts <= SUM_BLOCKS
    assert sums.lanes * max(1, sums.tile) > THREADS * 3 // 4
    assert reads >= sums.parts * sums.lanes * LEAST_TERMS


def test_stems_by_im2col_are_estimated_near_measurements_of_an_h100():
    """Kernels with statistics are estimated like the two launches that they replace."""
    device = find_spec("h100")
    profile = find_profile(device)
    assert profile is not None
    ratios: list[float] = []
    for key, measurements in profile.measurements.items():
        for m in measurements:
            if m.name in ("stem_im2col", "stem_im2col_backward_filter"):
                offered = OWN.candidates(read_signature(key), device)
                (time_us,) = (c.time_us for c in offered if c.name == m.name)
                ratios.append(time_us / m.time_us)
    assert ratios and all(0.8 < ratio < 1.25 for ratio in ratios)


def test_an_operation_without_a_kernel_in_a_file_gets_a_generated_one(monkeypatch: pytest.MonkeyPatch):
    cube = Pointwise("cube", lambda a, x: x**3, lambda a, x, dy: 3 * x * x * dy, ("x * x * x", "3.0f * x * x * dy"))
    monkeypatch.setattr(lowering, "KINDS", {**KINDS, **{kind.name: kind for kind in cube.kinds}})
    x = TensorType((2, 8, 3, 3), DType.BF16)
    for kind, inputs in (("cube", (x,)), ("cube_backward", (x, x))):
        offered = list(OWN.candidates(Request(kind, NoAttributes(), inputs, (x,), Precision.BF16), H200))
        assert offered and all(candidate.name.startswith("map_") for candidate in offered)

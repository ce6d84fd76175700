"""Every kernel, in every layout and element type, compiled by g++ and run on the CPU thread by thread."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.render_sources import render_generated
from mbc.hardware.instructions import Instruction
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, Arguments, Candidate, Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.base import OwnKernel, shared_of
from mbc.kernels.cuda.conv import (
    conv1x1,
    conv1x1_narrow,
    conv1x1_narrow_norm,
    conv_transpose_nonoverlapping,
    direct,
    halo,
    mma_gemm,
    plane_sweep_conv,
    plane_sweep_norm,
    stem_conv,
    stem_im2col,
    stem_volume,
    tf32_filter_gradient,
    weight_stationary_conv,
)
from mbc.kernels.cuda.fp32_emulated import (
    fp32_emulated_conv,
    fp32_emulated_halo,
    fp32_emulated_halo_filter,
    fp32_emulated_linear,
)
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.measure.statistics_harness import distances, moments
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, join
from mbc.resources import folder
from tests.kernels.cuda.cases import CASES, STATISTICS, Case, w
from tests.kernels.cuda.groups import groups_in
from tests.kernels.cuda.launching import (
    REPEATED,
    SHIFTED,
    TOLERANCES,
    HostMemory,
    Library,
    Trial,
    Variant,
    check,
    check_statistics,
    from_bytes,
    launched,
    relative_error,
    repeats,
    request_of,
    to_bytes,
)
from tests.kernels.cuda.matrix import PRECISIONS, chosen, elements, is_for_a_gpu, matrix, offered
from tests.kernels.statistics import grouped
from tests.objects import shared_library

EMULATOR = Path(__file__).parent / "emulator"
GXX = shutil.which("g++")
# Notes what runs, for branches.py; conditions joined by `||` stay apart.
COVERED = (
    "-fsanitize-coverage=trace-pc,trace-cmp", "-fdisable-tree-ifcombine", "-fno-ssa-phiopt", "-fno-tree-reassoc",
    "-fno-if-conversion", "-fno-if-conversion2", "--param=logical-op-non-short-circuit=0",
)  # fmt: skip
FILTER_PASS = stem_conv.KERNELS[1]
EMULATED_FP32 = (
    *fp32_emulated_conv.KERNELS,
    *fp32_emulated_halo.KERNELS,
    *fp32_emulated_halo_filter.KERNELS,
    *fp32_emulated_linear.KERNELS,
)
GEMMS = "convolution", "linear"
MANY_ELEMENTS = 9_000  # of the operands of a case that is exhaustive
# Relative error of GEMMs of fp32 words on tensor cores: at least, and at most.
RELATIVE_ERROR = {Precision.FP32: (0.0, 1e-6), Precision.TF32: (1e-4, 4e-4)}
ONE_BLOCK = pytest.param(1, marks=pytest.mark.exhaustive)  # goes on with a next tile, as a few blocks do
pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("kernels"), DTYPE_CODES["bf16"])


def build(where: Path, working: int, names: Sequence[str] = (), flags: Sequence[str] = ()) -> Library:
    """Return a library of the sources of these names, or of all."""
    assert GXX is not None
    templates = folder("templates")
    sources = {file.name: file for file in sorted(templates.glob("*/**/*.cu"))}
    kernels = [file.name for file in sorted(templates.glob("kernels/*/*.cu"))]
    folders = sorted({file.parent for file in templates.glob("kernels/*/*.cu*")})
    write_launch_headers(where)
    include = [EMULATOR, templates / "include", templates / "host", *folders, where]
    result = where / "kernels.so"
    chosen = [sources[name] for name in names or kernels] + [EMULATOR / "coverage.cpp"] * bool(flags)
    shared_library((GXX, *flags), chosen, include, working, result)
    handle = ctypes.CDLL(str(result))
    assert hasattr(handle, "mbc_emulated_shared_bytes"), "launches would not be held to what kernels declare"
    return Library(handle, HostMemory(), generate=partial(generate, where, working))


def generate(where: Path, working: int, program: MapProgram) -> ctypes.CDLL:
    """Return a library of one generated kernel."""
    assert GXX is not None
    templates = folder("templates")
    (where / program.file).write_text(render_generated(program))
    include = [EMULATOR, *(templates / name for name in ("include", "kernels/shared", "kernels/generated")), where]
    result = where / f"{program.name}.so"
    shared_library((GXX,), [where / program.file], include, working, result)
    return ctypes.CDLL(str(result))


PAIRS = [(c, p) for c in (*CASES, *groups_in(Precision.BF16)) for p in PRECISIONS if p in c.precisions]


@pytest.mark.parametrize(("case", "precision"), matrix(PAIRS, quick=chosen(PAIRS)))
def test_kernel(case: Case, precision: Precision, library: Library):
    check(library, case, precision)


@pytest.mark.parametrize("blocks", [ONE_BLOCK, 3, weight_stationary_conv.REDUCTION_BLOCKS])
@pytest.mark.parametrize("case", STATISTICS, ids=lambda case: case.name)
def test_statistics_of_a_convolutions_result(
    case: Case, blocks: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """`blocks`: one block for all tiles of its filters, few, or as many as tiles, so that a warpgroup has no tile."""
    for module in (weight_stationary_conv, conv1x1, stem_im2col, plane_sweep_conv, stem_volume):
        monkeypatch.setattr(module, "REDUCTION_BLOCKS", blocks)
    monkeypatch.setattr(mma_gemm, "MOST_BLOCKS", blocks)
    check_statistics(library, case, Precision.BF16)


@pytest.mark.parametrize(
    "kernel", [*weight_stationary_conv.KERNELS[:2], stem_volume.KERNELS[0]], ids=lambda kernel: kernel.name
)
def test_an_infinite_element_is_seen_only_where_the_filter_reaches(kernel: OwnKernel, library: Library):
    """Elements outside the image, those left of an earlier patch, and the neighbours of a window must be zero."""
    takes = (c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.BF16)))
    case = max(takes, key=lambda c: c.request(Precision.BF16).inputs[0].elements)
    trial = Trial(library, case, Precision.BF16)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    trial.inputs[0][..., -1, -1] = math.inf
    (output,) = trial.run(candidate, Variant("plain"))
    result = from_bytes(output, trial.request.outputs[0], Layout.CHANNELS_LAST)
    assert not np.isfinite(result[..., -2:, -2:]).all()
    result[..., -2:, -2:] = trial.wanted[0][..., -2:, -2:]
    assert relative_error(result, trial.wanted[0]) <= TOLERANCES[trial.request.outputs[0].dtype]


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.exhaustive), 2,
                                   pytest.param(3, marks=pytest.mark.exhaustive)])  # fmt: skip
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.exhaustive] if elements(c) > MANY_ELEMENTS else [], id=c.name) for c in CASES
     if c.kind == FILTER_PASS.kind and FILTER_PASS.takes(c.request(Precision.BF16)) and not is_for_a_gpu(c)],
)  # fmt: skip
def test_a_block_goes_on_with_the_next_tile(case: Case, parts: int, library: Library, monkeypatch: pytest.MonkeyPatch):
    """A block that continues with its next tile fetches operands ahead, which may belong to another image."""
    monkeypatch.setattr(stem_conv, "MOST_PARTS", parts)
    check(library, case, Precision.BF16)
    check(library, case, Precision.FP32)
    check_tensor_cores(library, case, Precision.TF32)


IM2COL = [
    pytest.param(case, kernel, id=f"{kernel.name}-{case.name}")
    for kernel in stem_im2col.KERNELS[:2]
    for case in CASES
    if case.kind == kernel.kind and kernel.takes(case.request(Precision.BF16)) and not is_for_a_gpu(case)
]


@pytest.mark.parametrize(("case", "kernel"), IM2COL)
def test_a_block_goes_on_with_the_next_windows(
    case: Case, kernel: OwnKernel, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """Two blocks, or six on the emulator's multiprocessors, write the windows of all tiles."""
    monkeypatch.setattr(stem_im2col, "REDUCTION_BLOCKS", 1)
    trial = Trial(library, case, Precision.BF16)
    assert kernel.name in {candidate.name for candidate in trial.candidates()}
    check(library, case, Precision.BF16)


def test_windows_are_laid_out_for_several_tiles_of_a_block():
    """At least one case of each pass has several tiles for a block; otherwise the test above would not test this."""
    tiles = {
        kernel.kind: max(
            stem_im2col.tiles(case.request(Precision.BF16)) for case in CASES if kernel_takes(kernel, case)
        )
        for kernel in stem_im2col.KERNELS[:2]
    }
    assert min(tiles.values()) > 6


def kernel_takes(kernel: OwnKernel, case: Case) -> bool:
    return case.kind == kernel.kind and not is_for_a_gpu(case) and kernel.takes(case.request(Precision.BF16))


@pytest.mark.parametrize(
    ("size", "channels", "filters", "kernel", "stride"),
    [
        ((32, 33), 3, 64, (3, 3), (1, 1)),  # rows of the image are no multiples of 16 bytes
        ((32, 32), 3, 96, (3, 3), (1, 1)),  # filters are not by the 64
        ((64, 64), 3, 64, (11, 11), (4, 4)),  # 55 vectors of a window
        ((64, 64), 4, 64, (3, 3), (2, 2)),  # a row of a band is longer than a box
        ((64, 64), 3, 64, (3, 3), (40, 1)),  # shared memory does not hold two output rows
    ],
)
def test_stems_that_tensor_maps_do_not_take(
    size: tuple[int, int], channels: int, filters: int, kernel: tuple[int, int], stride: tuple[int, int]
):
    a = Convolution(size, kernel, stride, (1, 1, 1, 1), (1, 1), 1)
    image, weight, result = (
        TensorType(shape, DType.BF16)
        for shape in ((2, channels, *size), (filters, channels, *kernel), (2, filters, *a.output_size))
    )
    forward = Request("convolution", a, (image, weight), (result,), Precision.BF16)
    backward = Request(
        "convolution_backward_filter", a, (image, result), (replace(weight, dtype=DType.FP32),), Precision.BF16
    )
    for kernel_, request in zip(stem_im2col.KERNELS[:2], (forward, backward), strict=True):
        assert not kernel_.takes(request)
    taken = replace(a, size=(32, 32), kernel=(3, 3), stride=(1, 1))
    assert taken.output_size == (32, 32)


@pytest.mark.parametrize("blocks", [ONE_BLOCK, 3])
def test_a_block_goes_on_with_the_next_strip(blocks: int, library: Library, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tf32_filter_gradient, "REDUCTION_BLOCKS", blocks)
    (kernel,) = tf32_filter_gradient.KERNELS
    case = next(c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.TF32)))
    trial = Trial(library, case, Precision.TF32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    for variant in trial.variants(candidate):
        (error,) = trial.errors(candidate, variant)
        assert error <= RELATIVE_ERROR[Precision.TF32][1], variant.name


SWEPT = [
    pytest.param(case, kernel, id=case.name, marks=[pytest.mark.exhaustive] * (case.kind == FILTER_PASS.kind))
    for kernel in (*plane_sweep_conv.KERNELS, *stem_volume.KERNELS)
    for case in CASES
    if case.kind == kernel.kind and kernel.takes(case.request(Precision.BF16)) and len(case.operands[0].shape) == 5
]


@pytest.mark.parametrize(("case", "kernel"), SWEPT)
def test_volumes_that_sweep_planes(case: Case, kernel: OwnKernel, library: Library):
    trial = Trial(library, case, Precision.BF16)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    for variant in trial.variants(candidate):
        (error,) = trial.errors(candidate, variant)
        assert error <= TOLERANCES[trial.request.outputs[0].dtype], variant.name


NORMS = [
    case
    for case in groups_in(Precision.BF16)
    if case.kind in {kernel.kind for kernel in plane_sweep_norm.KERNELS}
    if case.operands[0].shape in ((3, 32, 2, 4, 3), (3, 32, 3, 2, 5), (3, 32, 2, 131)) and "plain" not in case.name
]


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_a_norm_in_a_prologue_gives_the_bits_of_a_launch_of_its_own(case: Case, library: Library):
    """Only elements of the image are normalised, not the zeros around it, each by the statistics of its sample."""
    trial = Trial(library, case, Precision.BF16)
    (candidate,) = trial.candidates()
    assert isinstance(case.attributes, Fused)
    types = dict(enumerate(trial.request.inputs))
    stored = {n: to_bytes(trial.inputs[n], t.dtype, candidate.layouts[n]) for n, t in types.items()}
    members = [
        Operation(str(n), m.kind, tuple(map(str, m.inputs)), tuple(map(str, m.outputs)), m.attributes)
        for n, m in enumerate(case.attributes.members)
    ]
    kernel = f"plane_sweep_conv_{members[-1].kind.removeprefix('convolution_')}"
    for together, name in ((members[:2], ""), (members[2:], kernel)):
        outputs = [value for operation in together for value in operation.outputs if operation is not members[0]]
        operation = join(together, outputs) if len(together) > 1 else together[0]
        operands = list(map(int, operation.inputs))
        request = request_of(operation, [types[n] for n in operands], Precision.BF16)
        results = launched(library, request, [stored[n] for n in operands], name=name)
        types.update(zip(map(int, operation.outputs), request.outputs, strict=True))
        stored.update(zip(map(int, operation.outputs), results, strict=True))
    assert trial.run(candidate, Variant("plain")) == [stored[n] for n in case.attributes.given]


@pytest.mark.parametrize(
    ("module", "number", "columns"), [(plane_sweep_conv, 2, 8), (stem_volume, 1, 32)], ids=["channels", "stem"]
)
def test_a_block_goes_on_with_the_next_planes(
    module: ModuleType, number: int, columns: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """One block adds up the filter gradient of several tiles, whose planes share the stages of one pipeline."""
    monkeypatch.setattr(module, "REDUCTION_BLOCKS", 1)
    monkeypatch.setattr(stem_volume, "BLOCKS", 1)
    kernel = module.KERNELS[number]
    takes = (c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.BF16)))
    case = min((c for c in takes if c.operands[0].shape[4:] > (columns,)), key=elements)
    trial = Trial(library, case, Precision.BF16)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    assert candidate.workspace_bytes == trial.request.outputs[0].size_bytes
    (error,) = trial.errors(candidate, Variant("accumulating", accumulate=True))
    assert error <= TOLERANCES[DType.FP32]


def test_stems_of_volumes_declare_the_shared_memory_of_their_largest_block(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    kernel, a = stem_volume.KERNELS[1], Convolution((2, 3, 4), (3, 3, 3), pad=(1,) * 6)
    case = Case("largest", kernel.kind, a, (w(1, 2, *a.size), w(1, 32, *a.size)))
    trial = Trial(library, case, Precision.BF16)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    trial.run(candidate, Variant("plain"))
    less = replace(kernel, shared=shared_of(stem_volume.SHARED_BYTES - 1))
    monkeypatch.setattr(trial, "kernel", lambda _: less)
    with pytest.raises(AssertionError, match=f"{stem_volume.SHARED_BYTES} bytes of shared memory"):
        trial.run(candidate, Variant("plain"))


@pytest.mark.parametrize(
    ("module", "channels"),
    [(plane_sweep_conv, 32), (stem_volume, 1), (stem_volume, 4)],
    ids=["channels-32", "stem-1", "stem-4"],
)
def test_statistics_of_a_sample_far_from_zero_do_not_depend_on_other_samples(
    module: ModuleType, channels: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """The planes of a tile are divided as for one sample, whose mean is 100 times its standard deviation."""
    monkeypatch.setattr(module, "REDUCTION_BLOCKS", 6)
    a = Convolution((5, 18, 11), (3, 3, 3))
    group = grouped(a, "instance_statistics")
    deviation = math.sqrt(channels / 32) / 8  # the fewer products are added, the nearer to one they must be

    def near_one(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        return 1 + rng.standard_normal(shape) * deviation

    results: list[list[bytes]] = []
    inputs: list[np.ndarray] = []
    for rows in (3, 1):
        operands = (w(rows, channels, *a.size, make=near_one), w(64, channels, *a.kernel, make=near_one))
        trial = Trial(library, Case("far", group.kind, group.attributes, operands), Precision.BF16)
        inputs = inputs or trial.inputs
        trial.inputs = [inputs[0][:rows], inputs[1]]
        results.append(trial.run(trial.candidates()[0], Variant("plain")))
        result, mean, variance = (
            from_bytes(data, type_, layout)
            for data, type_, layout in zip(
                results[-1], trial.request.outputs, trial.candidates()[0].layouts[2:], strict=True
            )
        )
        wanted = moments(result, rows, by_sample=True)
        assert np.median(np.abs(wanted[0]) / np.sqrt(wanted[1])) > 100
        assert max(distances(mean[:, :, 0, 0, 0], variance[:, :, 0, 0, 0], *wanted)) <= TOLERANCES[DType.FP32]
    (_, mean, variance), (_, mean_alone, variance_alone) = results
    assert mean.startswith(mean_alone) and variance.startswith(variance_alone)


@pytest.mark.parametrize("filters", [64, 128])
@pytest.mark.parametrize(
    "kernel", [k for k in EMULATED_FP32 if k.kind == FILTER_PASS.kind], ids=lambda kernel: kernel.name
)
def test_parts_of_an_emulated_gradient_are_added_up(
    kernel: OwnKernel, filters: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """Cases with 64 filters, which both warpgroups compute together, and with 128."""
    takes = (c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.FP32)))
    of_filters = (c for c in takes if c.request(Precision.FP32).outputs[0].shape[0] == filters)
    case = max(of_filters, key=lambda c: c.request(Precision.FP32).inputs[1].elements)
    whole_bytes = kernel.workspace(case.request(Precision.FP32), Layout.CHANNELS_LAST)
    monkeypatch.setattr(fp32_emulated_conv, "LEAST_STAGES", 1)
    assert kernel.workspace(case.request(Precision.FP32), Layout.CHANNELS_LAST) > whole_bytes
    trial = Trial(library, case, Precision.FP32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    for variant in trial.variants(candidate):
        (error,) = trial.errors(candidate, variant)
        assert error <= RELATIVE_ERROR[Precision.FP32][1], variant.name


@pytest.mark.parametrize("pixels", [7, 40])
def test_parts_of_a_direct_filter_gradient_are_added_up(pixels: int, library: Library, monkeypatch: pytest.MonkeyPatch):
    """Parts differ in length, and in some cases the last one is empty."""
    monkeypatch.setattr(direct, "PIXELS_PER_PART", pixels)
    (kernel,) = (k for k in direct.KERNELS if k.kind == FILTER_PASS.kind)
    cases = sorted((c for c in CASES if c.kind == kernel.kind), key=elements)
    split = [c for c in cases if kernel.workspace(c.request(Precision.BF16), Layout.CHANNELS_LAST)]
    for case in split[:4]:
        trial = Trial(library, case, Precision.BF16)
        for candidate in (c for c in trial.candidates() if c.name == kernel.name):
            for variant in trial.variants(candidate):
                (error,) = trial.errors(candidate, variant)
                assert error <= TOLERANCES[trial.request.outputs[0].dtype], (case.name, variant.name)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kernel", fp32_emulated_linear.KERNELS, ids=lambda kernel: kernel.name)
def test_a_block_goes_on_with_the_next_tile_of_a_gemm(
    kernel: OwnKernel, parts: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    """Cases without split-K, and with split-K, whose parts differ in length."""
    case = max(
        (c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.FP32))),
        key=lambda c: fp32_emulated_linear.Gemm.of(c.request(Precision.FP32)).elements,
    )
    gemm = fp32_emulated_linear.Gemm.of(case.request(Precision.FP32))
    monkeypatch.setattr(fp32_emulated_linear, "REDUCTION_BLOCKS", gemm.tiles * parts)
    assert gemm.parts == parts
    trial = Trial(library, case, Precision.FP32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    for variant in trial.variants(candidate):
        (error,) = trial.errors(candidate, variant)
        assert error <= RELATIVE_ERROR[Precision.FP32][1], variant.name


@pytest.mark.parametrize("kernel", EMULATED_FP32, ids=lambda kernel: kernel.name)
def test_an_infinite_element_leaves_its_neighbours_alone(kernel: OwnKernel, library: Library):
    """An infinity does not disturb finite elements with a common scale, neither of weights, images nor samples."""
    case = next(c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.FP32)))
    trial = Trial(library, case, Precision.FP32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    trial.inputs[0 if kernel in fp32_emulated_linear.KERNELS or kernel.accumulates else 1].flat[0] = math.inf
    (output,) = trial.run(candidate, Variant("plain"))
    result, wanted = from_bytes(output, trial.request.outputs[0], candidate.layouts[-1]), trial.wanted[0]
    if kernel in fp32_emulated_linear.KERNELS and not kernel.accumulates:
        result, wanted = result.swapaxes(0, 1), wanted.swapaxes(0, 1)  # of a sample
    assert not np.isfinite(result[:, 0]).all()
    assert relative_error(result[:, 1:], wanted[:, 1:]) <= RELATIVE_ERROR[Precision.FP32][1]


@pytest.mark.parametrize("kernel", fp32_emulated_halo.KERNELS, ids=lambda kernel: kernel.name)
def test_an_infinite_pixel_leaves_those_that_do_not_see_it_alone(kernel: OwnKernel, library: Library):
    """The scale of a halo tile follows from its finite elements alone."""
    takes = (c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.FP32)))
    case = max(takes, key=lambda c: min(c.request(Precision.FP32).outputs[0].shape[2:]))
    trial = Trial(library, case, Precision.FP32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    trial.inputs[0][0, 0, 0, 0] = math.inf
    (output,) = trial.run(candidate, Variant("plain"))
    result = from_bytes(output, trial.request.outputs[0], Layout.CHANNELS_LAST)
    assert not np.isfinite(result[0, :, :3, :3]).all()
    assert relative_error(result[:, :, 3:], trial.wanted[0][:, :, 3:]) <= RELATIVE_ERROR[Precision.FP32][1]


def test_only_eight_channels_share_a_scale(library: Library):
    """Small elements of other channels keep their digits, both of images and of gradients."""
    (kernel,) = fp32_emulated_halo_filter.KERNELS
    case = next(c for c in CASES if c.kind == kernel.kind and kernel.takes(c.request(Precision.FP32)))
    trial = Trial(library, case, Precision.FP32)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    eight = [4, 5, 6, 7, 36, 37, 38, 39]
    small = 2.0**-30
    trial.inputs[0][:, eight] *= small
    trial.inputs[1][:, eight] *= small
    (output,) = trial.run(candidate, Variant("plain"))
    result = from_bytes(output, trial.request.outputs[0], Layout.CHANNELS_LAST)
    result[:, eight] /= small
    result[eight] /= small
    assert relative_error(result[:, eight], trial.wanted[0][:, eight]) <= RELATIVE_ERROR[Precision.FP32][1]
    assert relative_error(result[eight], trial.wanted[0][eight]) <= RELATIVE_ERROR[Precision.FP32][1]


def on_tensor_cores(case: Case, precision: Precision) -> list[Candidate]:
    return [c for c in offered(case, precision) if KERNELS[c.name].needs in (Instruction.MMA_SYNC, Instruction.WGMMA)]


def check_tensor_cores(library: Library, case: Case, precision: Precision) -> None:
    """Assert that errors are between two limits. In fp32 the low part of each element must count.

    In tf32 elements must be rounded; truncation would have an error of 6e-4.
    """
    trial = Trial(library, case, precision)
    low, high = RELATIVE_ERROR[precision]
    for candidate in on_tensor_cores(case, precision):
        for variant in trial.variants(candidate):
            (error,) = trial.errors(candidate, variant)
            assert low <= error <= high, (candidate.name, variant.name)


@pytest.mark.parametrize(
    ("case", "precision"),
    matrix(
        ((c, p) for c in sorted(CASES, key=elements) if c.kind.startswith(GEMMS) for p in RELATIVE_ERROR),
        on_tensor_cores,
    ),
)
def test_words_on_tensor_cores_are_as_exact_as_asked(case: Case, precision: Precision, library: Library):
    check_tensor_cores(library, case, precision)


@pytest.mark.parametrize("name", [k.name for k in KERNELS.values() if k.aligned])
def test_a_kernel_that_needs_aligned_operands_says_so(name: str, library: Library):
    trial, candidate = _first_trial(KERNELS[name], library)
    with pytest.raises(AssertionError, match="multiples of 16 bytes"):
        trial.errors(candidate, SHIFTED)


@pytest.mark.parametrize(
    ("kernel", "field", "value", "said"),
    [
        *((k, "filters", conv1x1_narrow.MOST_FILTERS + 1, "too many filters") for k in conv1x1_narrow.KERNELS),
        *((k, "filters", 5, "too many filters") for k in conv1x1_narrow_norm.KERNELS),
        *((k, "channels", 192, "neither 64 nor 128 channels") for k in weight_stationary_conv.KERNELS),
        *((k, "channels", 96, "neither 32 nor 48 nor 64 channels") for k in plane_sweep_conv.KERNELS[:2]),
        *((k, "channels", 5, "neither one nor two nor three nor four channels") for k in stem_volume.KERNELS),
        *((k, "block_filters", 96, "neither 32 nor 48 nor 64 filters") for k in plane_sweep_conv.KERNELS[:2]),
        *((k, "flat", 0, "launcher of their own") for k in plane_sweep_conv.KERNELS[:2]),
        *(
            (k, "pitch", halo.MOST_HALO_PIXELS, "larger than shared")
            for k in (*weight_stationary_conv.KERNELS, *fp32_emulated_halo.KERNELS)
        ),
        *((k, "type", DTYPE_CODES["fp32"], "does not take fp32") for k in conv_transpose_nonoverlapping.KERNELS),
    ],
    ids=lambda value: value.name if isinstance(value, OwnKernel) else str(value),
)
def test_a_launcher_refuses_unsupported_sizes(kernel: OwnKernel, field: str, value: int, said: str, library: Library):
    """The launcher fails instead of writing nothing, or outside its result: sizes may come from a damaged plan file."""
    trial, candidate = _first_trial(kernel, library)
    request, workspace_bytes = trial.request, candidate.workspace_bytes
    arguments = OWN.arguments(candidate.call(request), 0)
    integers = list(arguments.integers)
    integers[[f.name for f in fields(kernel.struct)].index(field)] = value
    # Operands exist and are aligned, so the size is refused.
    sizes_bytes = (*(t.size_bytes for t in (*request.inputs, *request.outputs)), workspace_bytes)
    pointers = [library.memory.allocate(size_bytes) for size_bytes in sizes_bytes if size_bytes > 0]
    with pytest.raises(AssertionError, match=said):
        library.launch(kernel.symbol(request), pointers, Arguments(tuple(integers), arguments.reals))
    library.memory.free_all()


@pytest.mark.parametrize("kind", REPEATED)
def test_planes_that_repeat_have_results_that_repeat(kind: str, library: Library):
    """`tests/gpu` runs this check on samples of more than 2^31 elements."""
    assert repeats(library, kind, 3, 16, (5, 6))


def _first_trial(kernel: OwnKernel, library: Library) -> tuple[Trial, Candidate]:
    """Return the trial of the first case that a kernel takes, and the kernel's candidate."""
    cases = (c for c in (*CASES, *STATISTICS, *groups_in(Precision.BF16)) if c.kind == kernel.kind)
    case, precision = next((c, p) for c in cases for p in PRECISIONS if kernel.takes(c.request(p)))
    trial = Trial(library, case, precision)
    (candidate,) = (c for c in trial.candidates() if c.name == kernel.name)
    return trial, candidate

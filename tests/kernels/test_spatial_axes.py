"""Signals are images of height 1 to every kernel; volumes and very large samples are for the kernels that take them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cuda.base import Slice, always
from mbc.kernels.cuda.conv.direct import ConvolutionArguments
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION, ConvolutionRow, DepthRow
from mbc.ops import KINDS
from mbc.ops.adaptive_pool import AdaptivePool
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.ops.resize import Resize
from mbc.ops.shape import Upsample

GPU = find_spec("h200")
# Attributes of a signal, and of the image of height 1 that has equal bytes.
SIGNALS: dict[str, tuple[Attributes, Attributes]] = {
    "convolution": (
        Convolution((9,), (3,), (2,), (1, 2), (2,), 2),
        Convolution((1, 9), (1, 3), (1, 2), (0, 0, 1, 2), (1, 2), 2),
    ),
    "max_pool": (
        MaxPool((9,), (3,), (2,), (1, 0), True, dilation=(3,)),
        MaxPool((1, 9), (1, 3), (1, 2), (0, 0, 1, 0), True, dilation=(1, 3)),
    ),
    "avg_pool": (AveragePool((9,), (2,), (2,)), AveragePool((1, 9), (1, 2), (1, 2))),
    "adaptive_avg_pool": (AdaptivePool((9,), (4,)), AdaptivePool((1, 9), (1, 4))),
    "resize": (Resize((9,), (4,), True), Resize((1, 9), (1, 4), True)),
    "upsample": (Upsample((3,)), Upsample((1, 3))),
}


def _request(kind: str, a: Attributes, size: tuple[int, ...], kernel: tuple[int, ...] = ()) -> Request:
    types = [TensorType((2, 4, *size), DType.FP32)]
    types += [TensorType((6, 2, *kernel), DType.FP32)] * bool(kernel)
    return Request(kind, a, tuple(types), KINDS[kind].shape(a, tuple(types)), Precision.FP32)


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("layout", Layout)
def test_kernels_of_images_run_signals_as_images_of_height_one(kind: str, layout: Layout) -> None:
    signal, image = SIGNALS[kind]
    kernel = getattr(signal, "kernel", ()) if kind == "convolution" else ()
    line = _request(kind, signal, (9,), kernel)
    flat = _request(kind, image, (1, 9), (1, *kernel) if kernel else ())
    assert KERNELS[kind].takes(line)
    assert KERNELS[kind].integers(Slice(line, layout)) == KERNELS[kind].integers(Slice(flat, layout))
    if kind == "convolution":
        here, there = (
            [CUDNN_CONVOLUTION.arguments(c.call(request), 0) for c in CUDNN_CONVOLUTION.candidates(request, GPU)]
            for request in (line, flat)
        )
        assert here == there != []


@pytest.mark.parametrize("kind", ["convolution", "max_pool", "avg_pool", "adaptive_avg_pool", "resize", "upsample"])
def test_kernels_of_windows_take_volumes(kind: str) -> None:
    size, ones = (5, 9, 8), (1, 1, 1)
    a = {
        "convolution": Convolution(size, (3, 3, 3), groups=2),
        "max_pool": MaxPool(size, (2, 3, 2), ones),
        "avg_pool": AveragePool(size, (2, 3, 2), ones),
        "adaptive_avg_pool": AdaptivePool(size, (2, 4, 3)),
        "resize": Resize(size, (2, 4, 3), True),
        "upsample": Upsample((2, 1, 3)),
    }[kind]
    request = _request(kind, a, size, (3, 3, 3) if kind == "convolution" else ())
    taking = {kernel.name for kernel in KERNELS.values() if kernel.kind == kind and kernel.takes(request)}
    assert taking == (set() if kind in ("resize", "upsample") else {kind})


@pytest.mark.parametrize("kind", ["convolution", "convolution_backward_data", "convolution_backward_filter"])
@pytest.mark.parametrize("groups", [1, 64])
def test_convolutions_of_the_largest_volumes_are_for_libraries_and_the_portable_kernel(kind: str, groups: int) -> None:
    a = Convolution((448, 448, 256), (3, 3, 3), pad=(1,) * 6, groups=groups)
    image, weight = TensorType((1, 64, *a.size), DType.BF16), TensorType((64, 64 // groups, *a.kernel), DType.BF16)
    inputs = (image, image) if kind == "convolution_backward_filter" else (image, weight)
    request = Request(kind, a, inputs, KINDS[kind].shape(a, inputs), Precision.BF16)
    assert {candidate.name for candidate in OWN.candidates(request, GPU)} == {kind}
    assert list(CUDNN_CONVOLUTION.candidates(request, GPU))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_no_sample_that_their_indices_cannot_number(name: str) -> None:
    """Fast convolutions index a sample with 32 bits; the other kernels divide by reciprocals of 64 bits."""
    kernel = replace(KERNELS[name], takes=always)
    folder, _, source = kernel.file.rpartition("/")
    convolves = folder in ("conv", "fp32_emulated")
    wide = convolves and source.startswith(("conv1x1_narrow", "direct.", "linear.", "matmul."))
    most = (1 << 64) if wide else (1 << 31) - 1 if convolves else (1 << 32) - 1
    for rows, sample in ((4, (1 << 31) - 1), (1 << 20, 1 << 21), (1, 1 << 31), (1, (1 << 32) - 1), (1, 1 << 32)):
        x = TensorType((rows, sample), DType.BF16)
        assert kernel.runs(Request(kernel.kind, NoAttributes(), (x,), (x,), Precision.BF16)) == (sample <= most)


def test_a_filter_of_more_elements_than_a_grid_has_blocks_is_a_product_of_tiles() -> None:
    a = Convolution((4, 5, 6), (4, 5, 6))
    for channels, tiled in ((546, 0), (547, 1)):
        x, dy = TensorType((2, channels, *a.size), DType.FP32), TensorType((2, 3, 1, 1, 1), DType.FP32)
        kind = "convolution_backward_filter"
        request = Request(kind, a, (x, dy), KINDS[kind].shape(a, (x, dy)), Precision.FP32)
        arguments = KERNELS[kind].integers(Slice(request, Layout.CHANNELS_FIRST))
        assert isinstance(arguments, ConvolutionArguments) and arguments.tiled == tiled


def test_a_row_of_cudnn_ends_with_the_depth_of_volumes() -> None:
    a = Convolution((5, 9, 8), (2, 3, 1), (1, 2, 1), (1, 0, 2, 1, 0, 0), (2, 1, 1), 2)
    request = _request("convolution", a, a.size, a.kernel)
    for candidate in CUDNN_CONVOLUTION.candidates(request, GPU):
        integers = CUDNN_CONVOLUTION.arguments(candidate.call(request), 0).integers
        row = dict(zip(ConvolutionRow.names(), integers, strict=False))
        assert integers[len(row) + 2 * row["knobs"] :] == DepthRow(5, 2, 4, 1, 0, 1, 2).integers()
        assert (row["height"], row["kernel_height"], row["out_height"], row["pad_top"]) == (9, 3, 5, 2)
        assert (row["width"], row["stride_width"], row["dilation_width"], row["pad_right"]) == (8, 1, 1, 0)

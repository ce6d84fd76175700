"""Stem convolutions, the first layers of networks, which read images with few channels, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, pixel_by_pixel, type_code
from mbc.kernels.cuda.conv import mma_gemm
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, VolumeSizes, attributes, volume_sizes

MOST_CHANNELS = 7  # libraries need not pad images of eight or more channels
ELEMENTS = 12288  # most elements of the image in shared memory, next to weights or gradients
FILTER_ELEMENTS_FP32 = 20480  # most elements of the image for a filter pass in fp32
# Most elements where tf32 is enough: three blocks fit into Hopper's 228 KiB, each with a pipeline of 54 KiB.
FILTER_ELEMENTS_TF32 = 5376
# The constants below, up to MOST_PARTS, are equal to those in the source.
COLUMNS = 64  # columns of the output in a tile
STEPS = 24  # most steps of K = 16 that a block has threads and shared memory for
WIDE_STEPS = 12  # with at most this number of steps, a block of the forward pass in tf32 has 64 filters
FILTERS, FILTERS_FP32 = 16, 32  # fewest filters of a warp
BANDS = (8, 4, 2)  # output rows of a block
STAGES = 3  # rows of gradients in shared memory in the filter pass
PADDING = 8  # words after the gradients of a pixel in shared memory
MOST_PARTS = 396  # most parts of the filter pass
PIECE = 16  # columns of the output that a warp computes at once
# Multiply-adds that take as long as to copy an element of the image to shared memory and to gather fragments from it.
# Of 200 to 800, this number left the least error in the times of all four kernels on an H200 and an H100.
COPIED_ELEMENT = 400


@dataclass(frozen=True, slots=True)
class StemConvArguments(VolumeSizes):
    """Integer arguments of a launch of a stem convolution.

    Attributes:
        band: Output rows of a tile, even.
        parts: Blocks among which the tiles of the filter pass are divided (split-K).
        products: fp32: tf32 MMAs for one product, 1 or 3 (3xTF32).
    """

    type: int
    band: int
    parts: int
    accumulate: int
    products: int


def _is_fp32(request: Request) -> bool:
    """Return whether an element is a 32-bit word; otherwise two elements of 16 bits share one."""
    return ConvOperands.of(request).image.dtype is DType.FP32


def _run(request: Request) -> int:
    """Return the number of elements of one row of a window, padded to whole words."""
    run = attributes(request).kernel[-1] * ConvOperands.of(request).image.shape[1]
    return run if _is_fp32(request) else run + run % 2


def _steps(request: Request) -> int:
    """Return the number of steps of K = 16."""
    return -(-math.prod(attributes(request).kernel[:-1]) * _run(request) // 16)


def band(request: Request) -> int:
    """Return the output rows of a tile, as many as shared memory has image rows for; 0 if it has none."""
    fitting = (n for most in _elements(request) for n in BANDS if _band_elements(request, n) <= most)
    return next(fitting, 0)


def _line(request: Request) -> int:
    """Return the largest number of elements of one image row of a block in shared memory."""
    a, channels = attributes(request), ConvOperands.of(request).image.shape[1]
    span = (COLUMNS - 1) * a.stride[-1] + a.kernel[-1]
    if _is_fp32(request):
        return (span + 6) // 4 * 4 * channels
    return (span * channels + 15) // 8 * 8 * (1 + a.stride[-1] * channels % 2)


def _elements(request: Request) -> tuple[int, ...]:
    """Return the possible limits of the image's elements in shared memory, the preferred one first."""
    if not _is_fp32(request) or request.kind != "convolution_backward_filter":
        return (ELEMENTS,)
    return (FILTER_ELEMENTS_FP32,) if _products(request) == 3 else (FILTER_ELEMENTS_TF32, FILTER_ELEMENTS_FP32)


def _image_elements(request: Request) -> int:
    """Return the largest number of elements of a band of the image in shared memory."""
    return _band_elements(request, band(request))


def _band_elements(request: Request, rows: int) -> int:
    """Return the largest number of elements of a band of so many output rows, in all planes of a window."""
    a = attributes(request)
    return math.prod(a.kernel[:-2]) * ((rows - 1) * a.stride[-2] + a.kernel[-2]) * _line(request)


def _tiles(request: Request) -> int:
    """Return the number of tiles of eight filters that a block computes."""
    filters = ConvOperands.of(request).features.shape[1]
    if not _is_fp32(request):
        return 8 if filters % 64 == 0 else 4 if filters % 32 == 0 else 2
    narrow = request.kind == "convolution" and _steps(request) > WIDE_STEPS
    return 8 if _products(request) == 1 and filters % 64 == 0 and not narrow else 4


def _forward_shared_bytes(request: Request) -> int:
    """Return the shared memory of a block of the forward pass: all weights of its filters, and the image."""
    words_bytes = 512 if _is_fp32(request) else 256
    image_bytes = _image_elements(request) * (4 if _is_fp32(request) else 2)
    return _steps(request) * (_tiles(request) * words_bytes + 64) + image_bytes


def _filter_shared_bytes(request: Request) -> int:
    """Return the shared memory of a block of the filter pass.

    It holds a pipeline of gradients and the image (in 16 bits two bands of it), and afterwards the sums that warps
    exchange.
    """
    tiles = _tiles(request)
    pixel_bytes = (tiles * 8 + PADDING) * 4 if _is_fp32(request) else tiles * 16
    exchanged_bytes = (_steps(request) + 1) // 2 * 64 * tiles * 16
    return max(STAGES * COLUMNS * pixel_bytes + _image_elements(request) * 4, exchanged_bytes)


def _takes(*types: DType) -> Callable[[Request], bool]:
    return lambda request: _type(request) in types and _fits(request)


def _type(request: Request) -> DType | None:
    """Return the common type of both images, or None if they differ."""
    conv = ConvOperands.of(request)
    return conv.image.dtype if conv.image.dtype is conv.features.dtype else None


def _fits(request: Request) -> bool:
    a, conv = attributes(request), ConvOperands.of(request)
    return (
        len(conv.image.shape) in (4, 5)
        and conv.image.shape[1] <= MOST_CHANNELS
        and conv.features.shape[1] % (FILTERS_FP32 if _is_fp32(request) else FILTERS) == 0
        and a.groups == 1
        and set(a.dilation) == {1}
        and _steps(request) <= STEPS
        and band(request) > 0
    )


def _parts(request: Request) -> int:
    """Return the number of parts of the filter pass (split-K).

    There are as many blocks as tiles, up to two or three for each multiprocessor of a large GPU. The limit is a
    constant, so that reductions have one order on all GPUs.
    """
    return min(MOST_PARTS, _tiles_of_image(request))


def _tiles_of_image(request: Request) -> int:
    """Return the number of tiles of the output, each for all filters of a block."""
    rows, _, *planes, height, width = ConvOperands.of(request).features.shape
    return rows * math.prod(planes) * -(-height // band(request)) * -(-width // COLUMNS)


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * _steps(request) * 16 * ConvOperands.of(request).features.shape[1] * 4


def arguments(at: Slice) -> StemConvArguments:
    """Return the integer arguments of a launch."""
    request = at.request
    return StemConvArguments(
        **volume_sizes(request),
        type=type_code(request.inputs[0]),
        band=band(request),
        parts=_parts(request),
        accumulate=int(at.accumulate),
        products=_products(request),
    )


def _products(request: Request) -> int:
    """Return the number of tf32 MMAs for one product: three in strict fp32 (3xTF32), else one."""
    return 3 if request.precision is Precision.FP32 else 1


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of the products and of the copies of the image to shared memory, in rounds of tiles."""
    _, filters, *_, height, width = ConvOperands.of(request).features.shape
    tiles = _tiles_of_image(request) * filters // (_tiles(request) * 8)
    columns = width // COLUMNS * COLUMNS + math.ceil(width % COLUMNS / PIECE) * PIECE
    outputs = columns / math.ceil(width / COLUMNS) * height / math.ceil(height / band(request))  # mean of the tiles
    products = outputs * _tiles(request) * 8 * _steps(request) * 16 * _products(request)
    precision = Precision.TF32 if _is_fp32(request) else request.precision
    return mma_gemm.tiles_us(precision, device, tiles, products + COPIED_ELEMENT * _image_elements(request))


FORWARD = OwnKernel(
    "convolution",
    "conv/stem_conv.cu",
    StemConvArguments,
    arguments,
    layouts=pixel_by_pixel,
    arithmetic_us=_arithmetic_us,
    launcher="stem_conv",
    version=3,  # raised so that `stem_im2col` is measured against it
    takes=_takes(DType.BF16, DType.FP16),
    shared=_forward_shared_bytes,
    needs=Instruction.MMA_SYNC,
)
BACKWARD_FILTER = OwnKernel(
    "convolution_backward_filter",
    "conv/stem_conv_filter.cu",
    StemConvArguments,
    arguments,
    layouts=pixel_by_pixel,
    workspace=_partial_bytes,
    arithmetic_us=_arithmetic_us,
    launches=2,
    accumulates=True,
    launcher="stem_conv_backward_filter",
    version=4,  # raised so that `stem_im2col_backward_filter` is measured against it
    takes=_takes(DType.BF16, DType.FP16),
    shared=_filter_shared_bytes,
    needs=Instruction.MMA_SYNC,
)


def _in_fp32(kernel: OwnKernel) -> OwnKernel:
    """Return the fp32 kernel of the same pass."""
    launcher, file = f"{kernel.launcher}_fp32", kernel.file.replace(".cu", "_fp32.cu")
    return replace(kernel, file=file, launcher=launcher, takes=_takes(DType.FP32), emulates_fp32=True, version=1)


KERNELS = (FORWARD, BACKWARD_FILTER, _in_fp32(FORWARD), _in_fp32(BACKWARD_FILTER))

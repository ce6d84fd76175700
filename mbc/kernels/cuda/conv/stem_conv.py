"""Convolutions of images with few channels, the first layers of networks, on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import Layouts, OwnKernel, Slice, gemm_us, layout_code, pixel_by_pixel, type_code
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, ConvOperands, attributes, sizes

MOST_CHANNELS = 7  # from eight on libraries have nothing to pad
ELEMENTS = 12288  # of the image in shared memory, next to weights or gradients
FILTER_ELEMENTS_FP32 = 20480  # the same of a filter pass in fp32
# The same where tf32 is enough, so that three blocks fit into Hopper's 228 KiB, each with a pipeline of 54 KiB.
FILTER_ELEMENTS_TF32 = 5376
# As in the source.
COLUMNS = 64  # of the output, in a tile
STEPS = 24  # of K = 16: what a block has threads and shared memory for
WIDE_STEPS = 12  # up to which a block of the forward pass in tf32 has 64 filters
FILTERS, FILTERS_FP32 = 16, 32  # of a warp, at least
BANDS = (8, 4, 2)  # output rows of a block
STAGES = 3  # rows of gradients in shared memory, of the filter pass
PADDING = 8  # words behind the gradients of a pixel there
MOST_PARTS = 396  # of the filter pass
TENSOR_SHARE = 0.3  # of the peak, by judgement: mma.sync instead of wgmma, fragments gathered word by word


@dataclass(frozen=True, slots=True)
class StemConvArguments(ConvolutionSizes):
    type: int
    band: int
    parts: int
    accumulate: int
    image_layout: int
    products: int


def _is_fp32(request: Request) -> bool:
    """Whether an element is a 32-bit word; two elements of 16 bits share one."""
    return ConvOperands.of(request).image.dtype is DType.FP32


def _run(request: Request) -> int:
    """Elements of one row of a window, padded to whole words."""
    run = attributes(request).kernel[1] * ConvOperands.of(request).image.shape[1]
    return run if _is_fp32(request) else run + run % 2


def _steps(request: Request) -> int:
    """Of K = 16."""
    return -(-attributes(request).kernel[0] * _run(request) // 16)


def band(request: Request) -> int:
    """Output rows of a tile: as many as the image rows under them fit shared memory; 0 where none do."""
    a, line = attributes(request), _line(request)
    fitting = (n for most in _elements(request) for n in BANDS if ((n - 1) * a.stride[0] + a.kernel[0]) * line <= most)
    return next(fitting, 0)


def _line(request: Request) -> int:
    """Elements of one image row under a block in shared memory, at most."""
    a, channels = attributes(request), ConvOperands.of(request).image.shape[1]
    span = (COLUMNS - 1) * a.stride[1] + a.kernel[1]
    if _is_fp32(request):
        return (span + 6) // 4 * 4 * channels
    return (span * channels + 15) // 8 * 8 * (1 + a.stride[1] * channels % 2)


def _elements(request: Request) -> tuple[int, ...]:
    """Of the image in shared memory, at most; the preferred limit first."""
    if not _is_fp32(request) or request.kind != "convolution_backward_filter":
        return (ELEMENTS,)
    return (FILTER_ELEMENTS_FP32,) if _products(request) == 3 else (FILTER_ELEMENTS_TF32, FILTER_ELEMENTS_FP32)


def _image_elements(request: Request) -> int:
    """Of a band of the image in shared memory, at most."""
    a = attributes(request)
    return ((band(request) - 1) * a.stride[0] + a.kernel[0]) * _line(request)


def _tiles(request: Request) -> int:
    """Of eight filters, of a block."""
    filters = ConvOperands.of(request).features.shape[1]
    if not _is_fp32(request):
        return 8 if filters % 64 == 0 else 4 if filters % 32 == 0 else 2
    narrow = request.kind == "convolution" and _steps(request) > WIDE_STEPS
    return 8 if _products(request) == 1 and filters % 64 == 0 and not narrow else 4


def _forward_shared_bytes(request: Request) -> int:
    """Of a block: all weights of its filters, and the image."""
    words_bytes = 512 if _is_fp32(request) else 256
    image_bytes = _image_elements(request) * (4 if _is_fp32(request) else 2)
    return _steps(request) * (_tiles(request) * words_bytes + 64) + image_bytes


def _filter_shared_bytes(request: Request) -> int:
    """Of a block of the filter pass: a pipeline of gradients and the image, in 16 bits two bands of it; or, afterwards,
    sums that warps exchange."""
    tiles = _tiles(request)
    pixel_bytes = (tiles * 8 + PADDING) * 4 if _is_fp32(request) else tiles * 16
    exchanged_bytes = (_steps(request) + 1) // 2 * 64 * tiles * 16
    return max(STAGES * COLUMNS * pixel_bytes + _image_elements(request) * 4, exchanged_bytes)


def _takes(*types: DType) -> Callable[[Request], bool]:
    return lambda request: _type(request) in types and _fits(request)


def _type(request: Request) -> DType | None:
    """Of both images, where they have the same."""
    conv = ConvOperands.of(request)
    return conv.image.dtype if conv.image.dtype is conv.features.dtype else None


def _fits(request: Request) -> bool:
    a, conv = attributes(request), ConvOperands.of(request)
    return (
        len(conv.image.shape) == 4
        and conv.image.shape[1] <= MOST_CHANNELS
        and conv.features.shape[1] % (FILTERS_FP32 if _is_fp32(request) else FILTERS) == 0
        and a.groups == 1
        and a.dilation == (1, 1)
        and _steps(request) <= STEPS
        and band(request) > 0
    )


def _parts(request: Request) -> int:
    """Split-K of the filter pass: as many blocks as there are tiles, up to two or three for each multiprocessor of a
    large GPU; a constant, so that reductions are the same on all."""
    _, _, height, width = ConvOperands.of(request).features.shape
    return min(MOST_PARTS, ConvOperands.of(request).image.shape[0] * -(-height // band(request)) * -(-width // COLUMNS))


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * _steps(request) * 16 * ConvOperands.of(request).features.shape[1] * 4


def _image_first(request: Request) -> Iterable[Layouts]:
    """The image, which is the first operand of both passes, in the other layout, where there is one."""
    for last in pixel_by_pixel(request):
        if last[0] is Layout.CHANNELS_LAST:
            yield Layout.CHANNELS_FIRST, *last[1:]


def arguments(at: Slice, image: Layout = Layout.CHANNELS_LAST) -> StemConvArguments:
    request = at.request
    return StemConvArguments(
        **sizes(request),
        type=type_code(request.inputs[0]),
        band=band(request),
        parts=_parts(request),
        accumulate=int(at.accumulate),
        image_layout=layout_code(image),
        products=_products(request),
    )


def _products(request: Request) -> int:
    """tf32 MMAs for one product: three in strict fp32 (3xTF32)."""
    return 3 if request.precision is Precision.FP32 else 1


def _time_us(request: Request, device: DeviceSpec) -> float:
    operations = 2 * ConvOperands.of(request).features.elements * _steps(request) * 16 * _products(request)
    precision = Precision.TF32 if _is_fp32(request) else request.precision
    return gemm_us(request, device, operations, peak_tflops(device, precision), TENSOR_SHARE)


FORWARD = OwnKernel(
    "convolution",
    "conv/stem_conv.cu",
    StemConvArguments,
    arguments,
    layouts=pixel_by_pixel,
    time_us=_time_us,
    launcher="stem_conv",
    version=3,  # raised so that `stem_im2col` is measured against it
    takes=_takes(DType.BF16, DType.FP16),
    shared=_forward_shared_bytes,
    tensor_cores=True,
)
BACKWARD_FILTER = OwnKernel(
    "convolution_backward_filter",
    "conv/stem_conv_filter.cu",
    StemConvArguments,
    arguments,
    layouts=pixel_by_pixel,
    workspace=_partial_bytes,
    time_us=_time_us,
    launches=2,
    accumulates=True,
    launcher="stem_conv_backward_filter",
    version=4,  # raised so that `stem_im2col_backward_filter` is measured against it
    takes=_takes(DType.BF16, DType.FP16),
    shared=_filter_shared_bytes,
    tensor_cores=True,
)


def _in_fp32(kernel: OwnKernel) -> tuple[OwnKernel, OwnKernel]:
    """For images in either layout: inputs of a network in fp32 are used as they arrive."""
    launcher = f"{kernel.launcher}_fp32"
    file = kernel.file.replace(".cu", "_fp32.cu")
    last = replace(kernel, file=file, launcher=launcher, takes=_takes(DType.FP32), emulates_fp32=True, version=1)
    first = replace(
        last,
        named=f"{launcher}_nchw",
        layouts=_image_first,
        integers=partial(arguments, image=Layout.CHANNELS_FIRST),
    )
    return last, first


KERNELS = (
    FORWARD,
    BACKWARD_FILTER,
    *_in_fp32(FORWARD),
    *_in_fp32(BACKWARD_FILTER),
)

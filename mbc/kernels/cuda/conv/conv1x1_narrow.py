"""1x1 convolutions to at most eight filters, the last layers of networks: each pass reads the image once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, VECTOR_BYTES, OwnKernel, Slice, moved_us, pixel_by_pixel, type_code
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes
from mbc.kernels.launch_struct import Struct

MOST_FILTERS = 8  # equal to the constant in the source; with more filters, tensor cores are faster
MOST_CHANNELS = 1024  # channels whose weights the forward pass keeps in shared memory
# Largest number of parts of the filter pass: the blocks that a large GPU runs at a time. A constant, so that reductions
# have one order on all GPUs.
MOST_PARTS = 396
LEAST_PIXELS = 16  # pixels of a thread of the filter pass that justify a block for its part
WARP = 32
COPY_SHARE = 0.85  # share of the copy bandwidth, by judgement
ARITHMETIC_SHARE = 0.4  # share of the fp32 peak, by judgement: 16-bit elements are first unpacked from their words


@dataclass(frozen=True, slots=True)
class Conv1x1NarrowArguments(Struct):
    """Integer arguments of a launch of a 1x1 convolution to few filters.

    Attributes:
        pixels: Pixels of all images.
        parts: Blocks among which the pixels of the filter pass are divided (split-K).
    """

    type: int
    pixels: int
    channels: int
    filters: int
    parts: int
    accumulate: int


def _takes(request: Request) -> bool:
    a, conv = attributes(request), ConvOperands.of(request)
    channels = conv.image.shape[1]
    return (
        conv.image.dtype is conv.features.dtype
        and a.is_pointwise
        and a.groups == 1
        and conv.features.shape[1] <= MOST_FILTERS
        and channels <= MOST_CHANNELS
        and is_vectorized(conv.image)
    )


def is_vectorized(x: TensorType) -> bool:
    """Return whether the channels of a pixel are whole vectors of 16 bytes."""
    return x.shape[1] * x.dtype.size_bytes % VECTOR_BYTES == 0


def _pixels(request: Request) -> int:
    rows, _, *size = ConvOperands.of(request).image.shape
    return rows * math.prod(size)


def parts_of(x: TensorType, pixels: int, most: int) -> int:
    """Return the number of parts into which `pixels` are divided for each block of channels, at most `most` blocks."""
    vectors = x.shape[1] * x.dtype.size_bytes // VECTOR_BYTES
    columns = math.ceil(vectors / WARP)
    threads_y = THREADS // math.ceil(vectors / columns)
    return max(1, min(most // columns, pixels // (threads_y * LEAST_PIXELS)))


def _parts(request: Request) -> int:
    """Return the number of parts of the filter pass (split-K)."""
    return parts_of(ConvOperands.of(request).image, _pixels(request), MOST_PARTS)


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * request.outputs[0].elements * 4


def _arguments(at: Slice) -> Conv1x1NarrowArguments:
    request, conv = at.request, ConvOperands.of(at.request)
    return Conv1x1NarrowArguments(
        type=type_code(conv.image),
        pixels=_pixels(request),
        channels=conv.image.shape[1],
        filters=conv.features.shape[1],
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def _time_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    operations = 2 * conv.image.elements * conv.features.shape[1]
    arithmetic_us = operations / (device.fp32_tflops * 1e6 * ARITHMETIC_SHARE)
    return max(arithmetic_us, moved_us(request, device) / COPY_SHARE)


_FORWARD = OwnKernel(
    "convolution",
    "conv/conv1x1_narrow.cu",
    Conv1x1NarrowArguments,
    _arguments,
    layouts=pixel_by_pixel,
    time_us=_time_us,
    launcher="conv1x1_narrow",
    takes=_takes,
    aligned=True,
)
_BACKWARD_DATA = replace(_FORWARD, kind="convolution_backward_data", launcher="conv1x1_narrow_backward_data")
_BACKWARD_FILTER = replace(
    _FORWARD,
    kind="convolution_backward_filter",
    workspace=_partial_bytes,
    launches=2,
    accumulates=True,
    launcher="conv1x1_narrow_backward_filter",
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _BACKWARD_FILTER)

"""Depthwise convolutions of 3 x 3, with one group for each channel.

They are bound by memory: each pass reads and writes every byte once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import THREADS, OwnKernel, Slice, layout_code, moved_us, type_code
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes
from mbc.kernels.cuda.image import TensorArguments

COPY_SHARE = 0.70  # share of the copy bandwidth
STRIDES = ((1, 1), (2, 2))
WARP = 32
LEAST_PIXELS = 32  # pixels of a thread of the filter pass that justify a block for its part


@dataclass(frozen=True, slots=True)
class FilterBlocks:
    """Blocks of the filter pass.

    `vector` is the number of channels of a thread (channels last), `threads` that of threads of a block, and `most` the
    largest number of blocks, which the registers of the multiprocessors limit.
    """

    vector: int
    threads: int
    most: int


BLOCKS = FilterBlocks(4, THREADS, 512)  # 4 is DEPTHWISE_FILTER_VECTOR in the source


@dataclass(frozen=True, slots=True)
class DepthwiseArguments(TensorArguments):
    """Integer arguments of a launch of a depthwise convolution."""

    depth_multiplier: int
    height: int
    width: int
    out_height: int
    out_width: int
    stride: int
    pad_top: int
    pad_left: int
    parts: int
    accumulate: int


def is_depthwise(request: Request) -> bool:
    """Return whether the request is a depthwise convolution that the kernels can run.

    It needs a group for each channel, a stride that kernels are compiled for, and no dilation.
    """
    a = attributes(request)
    channels = ConvOperands.of(request).image.shape[1]
    return a.groups == channels > 1 and a.dilation == (1, 1) and a.stride in STRIDES


def _takes(request: Request) -> bool:
    return attributes(request).kernel == (3, 3) and is_depthwise(request)


def split_k(request: Request, layout: Layout, blocks: FilterBlocks) -> int:
    """Return the number of parts of the filter pass, whose K is output pixels.

    The parts fill a GPU with blocks, each of which has enough pixels to justify its start.
    """
    if request.kind != "convolution_backward_filter":
        return 1
    rows, filters, height, width = request.inputs[1].shape
    if layout is Layout.CHANNELS_LAST:
        vectors = math.ceil(filters / blocks.vector)
        columns = math.ceil(vectors / WARP)
        threads_x = math.ceil(vectors / columns)
    else:
        threads_x, columns = 1, filters
    pixels = blocks.threads // threads_x * LEAST_PIXELS  # pixels of one part
    return max(1, min(rows * height * width // pixels, blocks.most // columns))


def sizes_of(at: Slice, blocks: FilterBlocks) -> DepthwiseArguments:
    """Return the integer arguments of a launch."""
    request, a, conv = at.request, attributes(at.request), ConvOperands.of(at.request)
    rows, channels, height, width = conv.image.shape
    return DepthwiseArguments(
        type=type_code(request.inputs[0]),
        layout=layout_code(at.layout),
        rows=rows,
        channels=channels,
        depth_multiplier=conv.features.shape[1] // channels,
        height=height,
        width=width,
        out_height=conv.features.shape[2],
        out_width=conv.features.shape[3],
        stride=a.stride[0],
        pad_top=a.pad[0],
        pad_left=a.pad[2],
        parts=split_k(request, at.layout, blocks),
        accumulate=int(at.accumulate),
    )


def _depthwise(at: Slice) -> DepthwiseArguments:
    return sizes_of(at, BLOCKS)


def partial_bytes(request: Request, layout: Layout, blocks: FilterBlocks = BLOCKS) -> int:
    """Return the bytes of the filter pass's workspace, which holds its partial results."""
    parts = split_k(request, layout, blocks)
    return parts * request.outputs[0].elements * 4 if parts > 1 else 0


def _depthwise_us(request: Request, device: DeviceSpec) -> float:
    return moved_us(request, device) / COPY_SHARE


FILE = "conv/depthwise.cu"

KERNELS = (
    OwnKernel(
        "convolution", FILE, DepthwiseArguments, _depthwise, time_us=_depthwise_us, launcher="depthwise", takes=_takes
    ),
    OwnKernel(
        "convolution_backward_data",
        FILE,
        DepthwiseArguments,
        _depthwise,
        time_us=_depthwise_us,
        launcher="depthwise_backward_data",
        takes=_takes,
    ),
    OwnKernel(
        "convolution_backward_filter",
        "conv/depthwise_filter.cu",
        DepthwiseArguments,
        _depthwise,
        workspace=partial_bytes,
        time_us=_depthwise_us,
        launches=2,
        accumulates=True,
        launcher="depthwise_backward_filter",
        takes=_takes,
    ),
)

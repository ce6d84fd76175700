"""Convolutions as implicit GEMMs by mma.sync, in bf16 and fp16, along one to three axes, for GPUs without wgmma.

Forward passes and data gradients take what the pointwise kernels of `conv1x1_mma` do not: windows of several pixels,
strides, and many channels. A forward pass can compute the batch statistics of its result in the epilogue. Filter
gradients take windows of any size, also of a single pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, moved_us, touched_us, type_code
from mbc.kernels.cuda.conv import conv1x1, mma_gemm
from mbc.kernels.cuda.conv.conv_operands import (
    ConvOperands,
    VolumeSizes,
    attributes,
    channels_by,
    data_pass_is_convolution,
    volume_sizes,
)
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.statistics import convolution_of

EIGHT = 8  # channels that are copied together
MOST_TAPS = 10  # along an axis; equal to the constant in the source


@dataclass(frozen=True, slots=True)
class ImplicitGemmArguments(VolumeSizes):
    """Integer arguments of a launch: sizes of the convolution that it computes, which may be a data gradient's.

    Attributes:
        blocks: Blocks for the same filters; independent of the GPU, so that sums have one order.
    """

    type: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ImplicitGemmFilterArguments(ImplicitGemmArguments):
    """Integer arguments of a launch of the filter gradient, with the sizes of the convolution.

    `blocks` is the number of parts of the pixels (split-K).

    Attributes:
        tile_filters: Filters of a tile: 64 or 128.
        tile_columns: Columns of a tile, which are channels under filter taps: 64 or 128.
        tiles: Tiles of the gradient.
        stages: Stages of all parts.
        accumulate: 1 if the result is added to the output.
    """

    tile_filters: int
    tile_columns: int
    tiles: int
    stages: int
    accumulate: int


def _is_backward(request: Request) -> bool:
    return request.kind == "convolution_backward_data"


def takes_any_pass(request: Request) -> bool:
    """Return whether the kernels take the types, channels and windows of a convolution in any pass."""
    conv = ConvOperands.of(request)
    in_16_bits = {conv.image.dtype, conv.features.dtype} in ({DType.BF16}, {DType.FP16})
    return in_16_bits and channels_by(EIGHT, request) and max(attributes(request).kernel) <= MOST_TAPS


def of_strided_volumes(request: Request) -> bool:
    """Return whether a convolution has a stride along three axes: no kernel by wgmma computes its gradients."""
    a = attributes(request)
    return len(a.stride) == 3 and max(a.stride) > 1


def _takes(request: Request) -> bool:
    return (
        takes_any_pass(request)
        and (data_pass_is_convolution(request) or not _is_backward(request))
        and not conv1x1.PLAIN.takes(request)
    )


def _pixels(request: Request) -> int:
    result = request.outputs[0]
    return result.elements // result.shape[1]


def _blocks(request: Request) -> int:
    return mma_gemm.blocks(_pixels(request), request.outputs[0].shape[1])


def _arguments(at: Slice) -> ImplicitGemmArguments:
    request = convolution_of(at.request)
    shape, type_ = volume_sizes(request, _is_backward(request)), type_code(request.inputs[0])
    return ImplicitGemmArguments(**shape, type=type_, blocks=_blocks(request))


def _shared_bytes(request: Request) -> int:
    return mma_gemm.shared_bytes(request.outputs[0].shape[1])


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    alone = convolution_of(request)
    channels, filters = alone.inputs[0].shape[1], alone.outputs[0].shape[1]
    depth = math.prod(attributes(alone).kernel) * math.ceil(channels / mma_gemm.CHANNELS) * mma_gemm.CHANNELS
    return mma_gemm.arithmetic_us(request, device, _pixels(alone), filters, depth)


def _takes_filter(request: Request) -> bool:
    return takes_any_pass(request) and request.outputs[0].dtype is DType.FP32


def _filter_gemm(request: Request, accumulate: bool = False) -> ImplicitGemmFilterArguments:
    conv = ConvOperands.of(request)
    filters, channels = conv.features.shape[1], conv.image.shape[1]
    pixels, columns = conv.features.elements // filters, conv.weight.elements // filters
    edges = mma_gemm.tile_edge(filters), mma_gemm.tile_edge(columns)
    tiles = math.ceil(filters / edges[0]) * math.ceil(columns / edges[1])
    # Bytes limit 1x1 filters. Writing and reading an element of a part takes 8 bytes; each channel and each filter of a
    # pixel takes 2 bytes.
    merge_pixels = min(mma_gemm.MERGE_PIXELS, 4 * filters * columns / (filters + channels))
    return ImplicitGemmFilterArguments(
        **volume_sizes(request),
        type=type_code(conv.image),
        blocks=mma_gemm.parts(tiles, pixels, merge_pixels),
        tile_filters=edges[0],
        tile_columns=edges[1],
        tiles=tiles,
        stages=math.ceil(pixels / mma_gemm.CHANNELS),
        accumulate=int(accumulate),
    )


def _filter_arguments(at: Slice) -> ImplicitGemmFilterArguments:
    return _filter_gemm(at.request, at.accumulate)


def _partial_bytes(request: Request, layout: Layout) -> int:
    parts = _filter_gemm(request).blocks
    return parts * request.outputs[0].size_bytes if parts > 1 else 0


def _filter_shared_bytes(request: Request) -> int:
    gemm = _filter_gemm(request)
    return mma_gemm.STAGES * (gemm.tile_filters + gemm.tile_columns) * mma_gemm.CHANNELS * mma_gemm.ELEMENT_BYTES


def _filter_bytes_us(request: Request, device: DeviceSpec) -> float:
    """Return the time to read the operands, to write and read all parts, and to write the gradient, in microseconds."""
    parts = _filter_gemm(request).blocks
    return touched_us(replace(request, outputs=request.outputs * (1 + 2 * parts if parts > 1 else 1)), device)


def _filter_arithmetic_us(request: Request, device: DeviceSpec) -> float:
    gemm = _filter_gemm(request)
    depth = math.ceil(gemm.stages / gemm.blocks) * mma_gemm.CHANNELS
    multiply_adds = gemm.tile_filters * gemm.tile_columns * depth
    return mma_gemm.tiles_us(request.precision, device, gemm.tiles * gemm.blocks, multiply_adds)


FORWARD = OwnKernel(
    "convolution",
    "conv/implicit_gemm.cu",
    ImplicitGemmArguments,
    _arguments,
    layouts=channels_last,
    arithmetic_us=_arithmetic_us,
    launcher="implicit_gemm",
    takes=_takes,
    shared=_shared_bytes,
    needs=Instruction.MMA_SYNC,
    superseded_by=Instruction.WGMMA,
    aligned=True,
    version=2,
)
_WITH_STATISTICS = replace(
    with_statistics(FORWARD, lambda request: _blocks(convolution_of(request))),
    time_us=moved_us,
    without_statistics=FORWARD.name,
    operands="image weights x mean variance workspace",
)
_BACKWARD_FILTER = replace(
    FORWARD,
    kind="convolution_backward_filter",
    file="conv/implicit_gemm_filter.cu",
    struct=ImplicitGemmFilterArguments,
    integers=_filter_arguments,
    workspace=_partial_bytes,
    time_us=_filter_bytes_us,
    arithmetic_us=_filter_arithmetic_us,
    launches=2,
    accumulates=True,
    launcher="implicit_gemm_backward_filter",
    takes=_takes_filter,
    shared=_filter_shared_bytes,
    measured_anyway=of_strided_volumes,
)

KERNELS = (
    FORWARD,
    replace(FORWARD, kind="convolution_backward_data", launcher="implicit_gemm_backward_data"),
    _WITH_STATISTICS,
    _BACKWARD_FILTER,
)

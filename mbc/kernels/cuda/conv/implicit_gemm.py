"""Convolutions as implicit GEMMs by mma.sync, in bf16 and fp16, along one to three axes, for GPUs without wgmma.

They take what the pointwise kernels of `conv1x1_mma` do not: windows of several pixels, strides, and many channels. A
forward pass can compute the batch statistics of its result in the epilogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, axis_fields, channels_last, moved_us, type_code
from mbc.kernels.cuda.conv import conv1x1, mma_gemm
from mbc.kernels.cuda.conv.conv_operands import attributes, channels_by, data_pass_is_convolution
from mbc.kernels.cuda.conv.statistics_epilogue import with_statistics
from mbc.kernels.launch_struct import Struct
from mbc.kernels.statistics import convolution_of

EIGHT = 8  # channels that are copied together
MOST_TAPS = 10  # along an axis; equal to the constant in the source


@dataclass(frozen=True, slots=True)
class ImplicitGemmArguments(Struct):
    """Integer arguments of a launch: sizes of the convolution that it computes, which may be a data gradient's.

    Attributes:
        pixels: Pixels of the result, over all samples.
        channels: Channels of the operand that is read.
        filters: Channels of the result.
        blocks: Blocks for the same filters; independent of the GPU, so that sums have one order.
    """

    type: int
    pixels: int
    channels: int
    filters: int
    blocks: int
    depth: int
    height: int
    width: int
    out_depth: int
    out_height: int
    out_width: int
    kernel_depth: int
    kernel_height: int
    kernel_width: int
    stride_depth: int
    stride_height: int
    stride_width: int
    pad_depth: int
    pad_height: int
    pad_width: int


def _is_backward(request: Request) -> bool:
    return request.kind == "convolution_backward_data"


def _takes(request: Request) -> bool:
    a = attributes(request)
    return (
        {request.inputs[0].dtype, request.outputs[0].dtype} in ({DType.BF16}, {DType.FP16})
        and channels_by(EIGHT, request)
        and max(a.kernel) <= MOST_TAPS
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
    a, image, result = attributes(request), request.inputs[0], request.outputs[0]
    pads = tuple(k - 1 - pad for k, pad in zip(a.kernel, a.before, strict=True)) if _is_backward(request) else a.before
    axes = {"": image.shape[2:], "out_": result.shape[2:], "kernel_": a.kernel, "stride_": a.stride}
    missing = 3 - len(pads)
    before = dict(zip(("pad_depth", "pad_height", "pad_width"), (*(0,) * missing, *pads), strict=True))
    return ImplicitGemmArguments(
        type=type_code(image),
        pixels=_pixels(request),
        channels=image.shape[1],
        filters=result.shape[1],
        blocks=_blocks(request),
        **axis_fields(axes),
        **before,
    )


def _shared_bytes(request: Request) -> int:
    return mma_gemm.shared_bytes(request.outputs[0].shape[1])


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    alone = convolution_of(request)
    channels, filters = alone.inputs[0].shape[1], alone.outputs[0].shape[1]
    depth = math.prod(attributes(alone).kernel) * math.ceil(channels / mma_gemm.CHANNELS) * mma_gemm.CHANNELS
    return mma_gemm.arithmetic_us(request, device, _pixels(alone), filters, depth)


_FORWARD = OwnKernel(
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
)
_WITH_STATISTICS = replace(
    with_statistics(_FORWARD, lambda request: _blocks(convolution_of(request))),
    time_us=moved_us,
    without_statistics=_FORWARD.name,
    operands="image weights x mean variance workspace",
)

KERNELS = (
    _FORWARD,
    replace(_FORWARD, kind="convolution_backward_data", launcher="implicit_gemm_backward_data"),
    _WITH_STATISTICS,
)

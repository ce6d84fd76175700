"""Convolutions that cuDNN refuses.

These kernels are correct for every request along one to three axes, but never fast: their estimates keep the search
from choosing them where a library has a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, axis_fields, gemm_us, layout_code, type_code
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, VolumeSizes, attributes, volume_sizes
from mbc.ops.matrix import Linear

TILED_SHARE = 0.10  # share of the fp32 peak of the tiled GEMM: two loads from shared memory for every two operations
DIRECT_SHARE = 0.03  # share of the fp32 peak with one element for each thread and operands from the cache
LEAST_TILE = 8  # a GEMM with fewer rows or columns leaves a tile of 64 mostly empty
PIXELS_PER_PART = 2048  # pixels of a part of the filter pass (split-K)
MOST_PARTIAL_BYTES = 32 << 20
MOST_GRID_DEPTH = 65535  # CUDA's limit, for groups times parts, and for blocks of elements of a filter


@dataclass(frozen=True, slots=True)
class ConvolutionArguments(VolumeSizes):
    """Integer arguments of a launch of a convolution.

    Attributes:
        volume: Whether there are three spatial axes. Otherwise the depth is 1.
    """

    type: int
    layout: int
    tiled: int
    volume: int
    dilation_depth: int
    dilation_height: int
    dilation_width: int
    groups: int
    parts: int
    accumulate: int


def _tiled(request: Request) -> bool:
    """Return whether the pass is a GEMM that fills tiles, unlike the GEMM of a depthwise convolution."""
    conv, a = ConvOperands.of(request), attributes(request)
    filters, channels = conv.features.shape[1] // a.groups, conv.weight.shape[1]
    elements = channels * math.prod(a.kernel)  # of a filter
    if request.kind == "convolution":
        return filters >= LEAST_TILE
    if request.kind == "convolution_backward_data":
        return channels >= LEAST_TILE
    return elements >= LEAST_TILE and (filters >= LEAST_TILE or elements > MOST_GRID_DEPTH)


def _parts(request: Request) -> int:
    """Return the number of parts of the filter pass (split-K), whose K is output pixels."""
    if request.kind != "convolution_backward_filter":
        return 1
    dy, dw = request.inputs[1], request.outputs[0]
    pixels = dy.shape[0] * math.prod(dy.shape[2:])
    room = min(MOST_PARTIAL_BYTES // dw.size_bytes, MOST_GRID_DEPTH // attributes(request).groups)
    return max(1, min(pixels // PIXELS_PER_PART, room))


def _convolution(at: Slice) -> ConvolutionArguments:
    request, a = at.request, attributes(at.request)
    return ConvolutionArguments(
        **volume_sizes(request),
        **axis_fields({"dilation_": a.dilation}),
        type=type_code(request.inputs[0]),
        layout=layout_code(at.layout),
        tiled=int(_tiled(request)),
        volume=int(a.rank > 2),
        groups=a.groups,
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def _partial_bytes(request: Request, layout: Layout) -> int:
    parts = _parts(request)
    return parts * request.outputs[0].elements * 4 if parts > 1 else 0


def _convolution_us(request: Request, device: DeviceSpec) -> float:
    conv = ConvOperands.of(request)
    # Each pass multiplies every element of the feature side with every element of its filter.
    operations = 2 * conv.features.elements * math.prod(conv.weight.shape[1:])
    share = TILED_SHARE if _tiled(request) else DIRECT_SHARE
    return gemm_us(request, device, operations, device.fp32_tflops, share)


def linear_sizes(request: Request) -> tuple[int, int, int]:
    """Return the rows, inputs and outputs of the layer."""
    a = request.attributes
    assert isinstance(a, Linear)
    features = {"linear": request.outputs[0], "linear_backward_data": request.inputs[0]}.get(request.kind)
    outputs = (features or request.inputs[1]).shape[1]
    return request.inputs[0].shape[0], a.features_in, outputs


_FORWARD = OwnKernel("convolution", "conv/direct.cu", ConvolutionArguments, _convolution, time_us=_convolution_us)
KERNELS = (
    _FORWARD,
    replace(_FORWARD, kind="convolution_backward_data"),
    replace(_FORWARD, kind="convolution_backward_filter", workspace=_partial_bytes, launches=2, accumulates=True),
)

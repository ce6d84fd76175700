"""The gradient of 3 x 3 filters in tf32, where libraries have no kernel that is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, product_us
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, Sides, attributes, sizes

# As in the source.
CHANNELS = 64  # of the image and of its gradients, of a block
COLUMNS = 32  # of the output, that a block goes down
ROWS = 14  # of the output that a block makes of a strip, at most
MOST_BLOCKS = 132  # one for each multiprocessor of a large GPU; a constant, so that sums are the same on all
TENSOR_SHARE = 0.3  # of the peak, as measured on an H200: mma.sync instead of wgmma, and half of the time around it


@dataclass(frozen=True, slots=True)
class Tf32FilterArguments(ConvolutionSizes):
    band: int
    parts: int
    accumulate: int


def _takes(request: Request) -> bool:
    a, sides = attributes(request), Sides.of(request)
    return (
        request.precision is Precision.TF32
        and {sides.image.dtype, sides.features.dtype} == {DType.FP32}
        and len(sides.image.shape) == 4
        and sides.image.shape[1] % CHANNELS == 0
        and sides.features.shape[1] % CHANNELS == 0
        and (a.kernel, a.stride, a.dilation, a.groups) == ((3, 3), (1, 1), (1, 1), 1)
    )


def _rows(request: Request) -> int:
    return min(ROWS, Sides.of(request).features.shape[2])


def _parts(request: Request) -> int:
    """Blocks that share out the strips, for each pair of `CHANNELS` channels."""
    sides = Sides.of(request)
    images, filters, height, width = sides.features.shape
    strips = images * math.ceil(height / _rows(request)) * math.ceil(width / COLUMNS)
    return min(strips, max(1, MOST_BLOCKS // (sides.image.shape[1] // CHANNELS * (filters // CHANNELS))))


def _arguments(at: Slice) -> Tf32FilterArguments:
    request = at.request
    return Tf32FilterArguments(
        **sizes(request),
        band=_rows(request),
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def _partial_bytes(request: Request, layout: Layout) -> int:
    return _parts(request) * request.outputs[0].size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    sides = Sides.of(request)
    operations = 2 * sides.features.elements * math.prod(sides.weight.shape[1:])
    return product_us(request, device, operations, peak_tflops(device, Precision.TF32), TENSOR_SHARE)


KERNELS = (
    OwnKernel(
        "convolution_backward_filter",
        "conv/tf32_filter_gradient.cu",
        Tf32FilterArguments,
        _arguments,
        layouts=channels_last,
        workspace=_partial_bytes,
        time_us=_time_us,
        launches=2,
        accumulates=True,
        launcher="convolution_backward_filter_tf32",
        takes=_takes,
        tensor_cores=True,
    ),
)

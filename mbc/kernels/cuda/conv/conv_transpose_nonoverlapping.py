"""Non-overlapping transposed convolutions, whose stride is their filter size: alone, and as a part of a concatenation.

They are data gradients of convolutions, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, gemm_us, shared_of, type_code
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, ConvOperands, attributes, axes_of, sizes
from mbc.kernels.cuda.wiring import Wiring, gemms_of, taking

# The constants up to SHARED_BYTES are equal to those in the source.
FILTERS = 64  # the filters are a multiple of this number
CHANNELS = 32  # so are the channels of the larger image
COLUMNS = 256  # columns of the GEMM in a tile
VECTOR = 8  # channels of the other part of a concatenation that are copied together
MOST_OTHERS = 64 * VECTOR  # channels of that part: a pixel is copied by at most the threads of one block
SHARED_BYTES = 219 << 10  # with the other part of a concatenation; without it 24 KiB less
TENSOR_SHARE = 0.6  # share of the peak, by judgement

# The GEMM with its bias is the first part of the concatenation, or the last.
_FIRST: Wiring = ((0, 1), (4, 2), (5, 3)), (6,)
_LAST: Wiring = ((0, 1), (4, 2), (3, 5)), (6,)
_first_or_last, _last = taking(_FIRST, _LAST), taking(_LAST)


@dataclass(frozen=True, slots=True)
class ConvTransposeArguments(ConvolutionSizes):
    """Integer arguments of a launch of a non-overlapping transposed convolution.

    Attributes:
        all: Channels of the tensor that is written.
        start: The first channel that this launch writes.
        kernel_depth: Planes of a filter. The planes of a smaller volume count as images (`rows`).
    """

    type: int
    all: int
    start: int
    kernel_depth: int


def _takes(request: Request) -> bool:
    """Return whether the kernel takes the request; filters of one pixel are left to other kernels."""
    a, conv = attributes(request), ConvOperands.of(request)
    image, features = conv.image, conv.features
    if len(image.shape) not in (4, 5) or {image.dtype, features.dtype} not in ({DType.BF16}, {DType.FP16}):
        return False
    taps = math.prod(a.kernel)
    return (
        taps > 1
        and a.stride == a.kernel
        and {*a.pad} == {0}
        and ({*a.dilation}, a.groups) == ({1}, 1)
        and image.shape[2:] == tuple(n * k for n, k in zip(features.shape[2:], a.kernel, strict=True))
        and image.shape[1] % CHANNELS == 0
        and features.shape[1] % FILTERS == 0
        and taps * image.shape[1] % COLUMNS == 0
        and max(image.elements, features.elements) < 1 << 31
    )


def _takes_concat(request: Request) -> bool:
    fits = _first_or_last(request) and request.inputs[3].shape[1] in range(VECTOR, MOST_OTHERS + 1, VECTOR)
    return fits and _takes(gemms_of(request)[0])


def _arguments(at: Slice) -> ConvTransposeArguments:
    image, axes = ConvOperands.of(at.request).image, axes_of(at.request)
    of_planes = sizes(at.request) | {"rows": image.shape[0] * axes["out_depth"]}
    return ConvTransposeArguments(
        **of_planes, type=type_code(image), all=image.shape[1], start=0, kernel_depth=axes["kernel_depth"]
    )


def _concat_arguments(at: Slice) -> ConvTransposeArguments:
    joined, other = at.request.outputs[0], at.request.inputs[3]
    plain = _arguments(replace(at, request=gemms_of(at.request)[0]))
    return replace(plain, all=joined.shape[1], start=other.shape[1] if _last(at.request) else 0)


def _time_us(request: Request, device: DeviceSpec) -> float:
    features, weight = request.inputs[:2]
    operations = 2 * features.elements * math.prod(weight.shape[1:])
    return gemm_us(request, device, operations, peak_tflops(device, request.precision), TENSOR_SHARE)


_PLAIN = OwnKernel(
    "convolution_backward_data",
    "conv/conv_transpose_nonoverlapping.cu",
    ConvTransposeArguments,
    _arguments,
    layouts=channels_last,
    time_us=_time_us,
    operands="dy weights y",
    launcher="conv_transpose_nonoverlapping",
    takes=_takes,
    shared=shared_of(SHARED_BYTES),
    needs=Instruction.WGMMA,
    aligned=True,
)

_CONCAT = replace(
    _PLAIN,
    kind="convolution_backward_data+bias_add+concat",
    integers=_concat_arguments,
    operands="dy weights bias other y",
    launcher="conv_transpose_bias_add_concat",
    version=2,
    takes=_takes_concat,
)


def _of_volumes(kernel: OwnKernel) -> OwnKernel:
    """Return the kernel for volumes, with a name of its own: its estimate is too short (decision 088)."""
    return replace(_of_rank(kernel, 5), named=f"{kernel.launcher}_volume", by_measurement=True)


def _of_rank(kernel: OwnKernel, rank: int) -> OwnKernel:
    def takes(request: Request) -> bool:
        return len(request.inputs[0].shape) == rank and kernel.takes(request)

    return replace(kernel, takes=takes)


KERNELS = (*(_of_rank(kernel, 4) for kernel in (_PLAIN, _CONCAT)), *map(_of_volumes, (_PLAIN, _CONCAT)))

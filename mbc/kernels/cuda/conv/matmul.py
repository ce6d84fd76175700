"""Products of matrices in the last two axes, by FMA; also those of linear layers that cuBLASLt refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first, gemm_us, type_code
from mbc.kernels.cuda.conv.direct import TILED_SHARE, linear_sizes
from mbc.kernels.launch_struct import Struct
from mbc.ops.matmul import Matmul, sizes


@dataclass(frozen=True, slots=True)
class MatmulArguments(Struct):
    """Integer arguments of a launch of batched products of matrices, or of a pass of a linear layer."""

    type: int
    groups: int
    rows: int
    columns: int
    depth: int
    transpose_a: int
    transpose_b: int
    accumulate: int = 0


def _groups(request: Request) -> int:
    return math.prod(request.inputs[0].shape[:-2])


def _arguments(at: Slice) -> MatmulArguments:
    request, a = at.request, at.request.attributes
    assert isinstance(a, Matmul)
    x, y = request.inputs
    return MatmulArguments(type_code(x), _groups(request), *sizes(a, x, y), int(a.transpose_a), int(a.transpose_b))


def _time_us(request: Request, device: DeviceSpec) -> float:
    a = request.attributes
    assert isinstance(a, Matmul)
    operations = 2 * request.outputs[0].elements * sizes(a, *request.inputs)[2]
    return gemm_us(request, device, operations, device.fp32_tflops, TILED_SHARE)


def _linear(at: Slice) -> MatmulArguments:
    rows, inputs, outputs = linear_sizes(at.request)
    product = {
        "linear": (rows, outputs, inputs, 0, 1),
        "linear_backward_data": (rows, inputs, outputs, 0, 0),
        "linear_backward_filter": (outputs, inputs, rows, 1, 0),
    }[at.request.kind]
    return MatmulArguments(type_code(at.request.inputs[0]), 1, *product, int(at.accumulate))


def _linear_us(request: Request, device: DeviceSpec) -> float:
    operations = 2 * math.prod(linear_sizes(request))
    return gemm_us(request, device, operations, device.fp32_tflops, TILED_SHARE)


_MATMUL = OwnKernel("matmul", "conv/matmul.cu", MatmulArguments, _arguments, layouts=channels_first, time_us=_time_us)
_LINEAR = replace(_MATMUL, kind="linear", integers=_linear, time_us=_linear_us, launcher="matmul", named="linear")
KERNELS = (
    _MATMUL,
    _LINEAR,
    replace(_LINEAR, kind="linear_backward_data", named="linear_backward_data"),
    replace(_LINEAR, kind="linear_backward_filter", launcher="linear_backward_filter", named="", accumulates=True),
)

"""Products of matrices in the last two axes, by FMA."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first, gemm_us, type_code
from mbc.kernels.cuda.conv.direct import TILED_SHARE
from mbc.kernels.launch_struct import Struct
from mbc.ops.matmul import Matmul, sizes


@dataclass(frozen=True, slots=True)
class MatmulArguments(Struct):
    """Integer arguments of a launch of batched products of matrices."""

    type: int
    groups: int
    rows: int
    columns: int
    depth: int
    transpose_a: int
    transpose_b: int


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


KERNELS = (
    OwnKernel(
        "matmul",
        "conv/matmul.cu",
        MatmulArguments,
        _arguments,
        layouts=channels_first,
        time_us=_time_us,
    ),
)

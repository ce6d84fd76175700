"""Which GPUs the libraries are planned for."""

from __future__ import annotations

import pytest

from mbc.device.spec import device_specs
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Provider, Request
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear

WITHOUT_BF16 = {"t4", "v100", "p100", "k80"}


def convolution() -> Request:
    image, weight = TensorType((8, 16, 8, 8), DType.BF16), TensorType((16, 16, 3, 3), DType.BF16)
    attributes = Convolution((8, 8), (3, 3), (1, 1), (1, 1, 1, 1))
    return Request("convolution", attributes, (image, weight), (image,), Precision.BF16)


def linear() -> Request:
    rows, weight = TensorType((8, 64), DType.BF16), TensorType((32, 64), DType.BF16)
    return Request("linear", Linear((64,)), (rows, weight), (TensorType((8, 32), DType.BF16),), Precision.BF16)


@pytest.mark.parametrize("provider, request_", [(CUDNN_CONVOLUTION, convolution()), (CUBLASLT, linear())])
def test_bf16_runs_from_ampere_on(provider: Provider, request_: Request) -> None:
    for name, device in device_specs().items():
        found = list(provider.candidates(request_, device))
        assert bool(found) == (name not in WITHOUT_BF16), name

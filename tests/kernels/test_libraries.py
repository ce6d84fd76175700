"""The candidates that libraries offer, and for which GPUs."""

from __future__ import annotations

from statistics import median

import pytest

from mbc.hardware.datasheet import capability_of
from mbc.hardware.spec import device_specs, find_spec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Provider, Request
from mbc.kernels.convolution_shapes import PASSES
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda.conv.conv_operands import attributes
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.kernels.cudnn_estimates import least_bytes
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.profile.paths import bundled_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import read_signature


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
        candidates = list(provider.candidates(request_, device))
        assert bool(candidates) == (capability_of(device.architecture) >= 80), name


def _pointwise(
    kind: str, attributes: Convolution, precision: Precision = Precision.BF16, filters: int = 256
) -> Request:
    """Return a pass over 3 images of 20 x 30 with 64 input channels."""
    x = TensorType((3, 64, *attributes.size), precision.working)
    y = TensorType((3, filters, *attributes.output_size), precision.working)
    w = TensorType((filters, 64 // attributes.groups, *attributes.kernel), precision.working)
    dw = TensorType(w.shape, precision.master)
    operands = {
        "convolution": (x, w, y),
        "convolution_backward_data": (y, w, x),
        "convolution_backward_filter": (x, y, dw),
    }[kind]
    return Request(kind, attributes, operands[:2], operands[2:], precision)


@pytest.mark.parametrize("kind", ("convolution", "convolution_backward_data", "convolution_backward_filter"))
def test_a_product_with_unaligned_rows_is_estimated_as_slow(kind: str) -> None:
    def least_us(filters: int) -> float:
        request = _pointwise(kind, Convolution((1000, 1000), (1, 1)), filters=filters)
        return min(c.time_us for c in CUBLASLT.candidates(request, find_spec("h200")))

    assert least_us(7) > 3 * least_us(8)


@pytest.mark.parametrize("kind", ("convolution", "convolution_backward_data", "convolution_backward_filter"))
def test_a_one_by_one_convolution_is_a_product(kind: str) -> None:
    request = _pointwise(kind, Convolution((20, 30), (1, 1)))
    offered = list(CUBLASLT.candidates(request, find_spec("h200")))
    assert {c.layouts for c in offered} == {(Layout.CHANNELS_LAST,) * 3}
    assert all(c.name == kind and c.accumulates == kind.endswith("filter") for c in offered)
    # Within the same workspace the heuristics' first algorithm comes first, so that it wins where none is known.
    for workspace_bytes in {c.workspace_bytes for c in offered}:
        same = [c for c in offered if c.workspace_bytes == workspace_bytes]
        assert [dict(c.settings)["algorithm"] for c in same] == [0, 1, 2, 3]
        assert len({c.time_us for c in same}) == 1
    # 16 partial results; a filter's gradient may have 128 besides, since its sum is over every pixel.
    result_bytes = 256 * 64 * 4
    most = {"convolution": 16 * 3 * 20 * 30 * 256 * 4, "convolution_backward_data": 16 * 3 * 20 * 30 * 64 * 4}
    more = {min(most[kind], 32 << 20)} if kind in most else {16 * result_bytes, 128 * result_bytes}
    assert {c.workspace_bytes for c in offered} == {0, *more}
    number = ("convolution", "convolution_backward_data", "convolution_backward_filter").index(kind)
    last = offered[-1]
    arguments = CUBLASLT.arguments(last.call(request), 0)
    assert arguments.integers == (number, 1, 1, 0, 3 * 20 * 30, 64, 256, last.workspace_bytes, 3)


def test_rows_of_large_images_count_beyond_32_bits() -> None:
    a = Convolution((4096, 4096), (1, 1))
    x, w = TensorType((256, 8, 4096, 4096), DType.BF16), TensorType((8, 8, 1, 1), DType.BF16)
    request = Request("convolution", a, (x, w), (x,), Precision.BF16)
    candidate = next(iter(CUBLASLT.candidates(request, find_spec("h200"))))
    assert CUBLASLT.arguments(candidate.call(request), 0).integers[4] == 1 << 32


@pytest.mark.parametrize(
    "attributes",
    (
        Convolution((20, 30), (1, 1), (2, 2)),
        Convolution((20, 30), (1, 1), (1, 1), (0, 1, 0, 0)),
        Convolution((20, 30), (1, 1), groups=2),
        Convolution((20, 30), (3, 3), (1, 1), (1, 1, 1, 1)),
    ),
)
def test_other_convolutions_are_none(attributes: Convolution) -> None:
    assert list(CUBLASLT.candidates(_pointwise("convolution", attributes), find_spec("h200"))) == []


@pytest.mark.parametrize("precision", (Precision.FP32, Precision.TF32))
def test_no_filter_gradient_of_fp32_operands_is_left_to_the_direct_kernel(precision: Precision) -> None:
    request = _pointwise("convolution_backward_filter", Convolution((20, 30), (3, 3)), precision)
    (weight,) = request.outputs
    offered = list(CUDNN_CONVOLUTION.candidates(request, find_spec("h200")))
    assert min(c.workspace_bytes for c in offered) == least_bytes(weight, DType.FP32) >= weight.size_bytes // 512


@pytest.mark.parametrize("kind", PASSES)
def test_cudnns_convolutions_of_volumes_are_estimated_near_measurements_of_an_h200(kind: str) -> None:
    """They are those of nnU-Net that take 100 us or more. Few channels do not fill the tiles of cuDNN's engines.

    Left out are products (1 x 1 x 1), windows that do not overlap, which mbc's own kernels run in a quarter of cuDNN's
    time, and tensors of over 2 GiB, for which cuDNN has only slow engines. Where one of mbc's kernels is the fastest,
    the profile lacks those of cuDNN that it beats.
    """
    profile = read_profile(bundled_path("h200"))
    ratios: list[float] = []
    for key, measurements in profile.measurements.items():
        if f'"kind":"{kind}",' not in key:
            continue
        asked = read_signature(key)
        if asked.kind != kind or len(asked.inputs[0].shape) != 5 or asked.inputs[0].size_bytes > 2 << 30:
            continue
        if attributes(asked).kernel in ((1, 1, 1), attributes(asked).stride):
            continue
        usable = [m for m in measurements if not m.refused and not m.dominated]
        times_us = [m.time_us for m in usable if m.provider == "cudnn"]
        if times_us and min(times_us) >= 100 and min(usable, key=lambda m: m.time_us).provider == "cudnn":
            estimated_us = min(c.time_us for c in CUDNN_CONVOLUTION.candidates(asked, find_spec("h200")))
            ratios.append(min(times_us) / estimated_us)
    assert len(ratios) >= 4
    assert 0.8 < median(ratios) < 1.25
    assert max(ratios) < 2

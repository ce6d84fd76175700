"""cuDNN's convolutions with statistics in the epilogue: which exist, and that only measured ones are used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_convolution import ConvolutionRow
from mbc.kernels.cudnn_statistics import sums_bytes
from mbc.kernels.providers import PROVIDERS
from mbc.kernels.statistics import WITH_STATISTICS, convolution_of, statistics_of
from mbc.ops.fused import Fused
from mbc.profile.signature import asked_kind, read_signature, rows_of, signature, with_rows
from tests.kernels.statistics import with_statistics

H200 = find_spec("h200")
REQUEST = with_statistics((32, 64, 14, 14), 128, 3, stride=2)


def offered(request: Request) -> list[Candidate]:
    return [c for provider in PROVIDERS for c in provider.candidates(request, H200)]


def test_one_launch_gives_all_three() -> None:
    assert REQUEST.kind == WITH_STATISTICS
    vector = TensorType((128,), DType.FP32)
    assert REQUEST.outputs == (TensorType((32, 128, 7, 7), DType.FP16), vector, vector)
    bare = convolution_of(REQUEST)
    assert (bare.kind, bare.inputs, bare.outputs) == ("convolution", REQUEST.inputs, REQUEST.outputs[:1])
    assert convolution_of(bare) is bare


def test_it_is_never_divided() -> None:
    """A convolution with statistics is not divided into micro-batches, because statistics need every row."""
    kind = asked_kind(REQUEST)
    assert kind is not None and not kind.divisible and not kind.accumulates and not kind.reduces
    assert rows_of(REQUEST) == 32 and rows_of(with_rows(REQUEST, 8)) == 8  # of another mini-batch


def test_its_signature_can_be_read() -> None:
    assert read_signature(signature(REQUEST)) == REQUEST


@pytest.mark.parametrize(
    ("request_", "providers"),
    [
        (REQUEST, {"cudnn"}),
        (with_statistics((32, 64, 14, 14), 64, 3), {"cudnn", "mbc"}),
        (with_statistics((32, 64, 14, 14), 128, 3, Precision.BF16), {"mbc"}),
        (with_statistics((16, 64, 512, 512), 64, 3, Precision.BF16), {"mbc"}),
        (with_statistics((2, 64, 1, 1), 64, 3, Precision.BF16), set[str]()),
    ],
    ids=["strided", "fp16", "bf16", "large", "pixel"],
)
def test_an_estimate_gains_nothing(request_: Request, providers: set[str]) -> None:
    candidates = offered(request_)
    assert {c.provider for c in candidates} == providers
    one_by_one = sum(
        min(c.time_us for c in offered(request)) for request in (convolution_of(request_), statistics_of(request_))
    )
    for candidate in candidates:
        assert candidate.layouts[:3] == (Layout.CHANNELS_LAST,) * 3 and not candidate.measured
        assert candidate.time_us >= one_by_one


def of_the_image(request: Request) -> Request:
    """Return a request of this kind with statistics of the image instead of the result."""
    a = request.attributes
    assert isinstance(a, Fused)
    convolution, statistics = a.members
    wired = replace(a, members=(convolution, replace(statistics, inputs=convolution.inputs[:1])))
    return replace(request, attributes=wired)


@pytest.mark.parametrize(
    "request_",
    [
        with_statistics((32, 64, 14, 14), 128, 3, Precision.BF16, stride=2),
        with_statistics((32, 64, 14, 14), 128, 3, Precision.TF32),
        with_statistics((32, 64, 14, 14), 128, 3, groups=2),
        with_statistics((32, 12, 14, 14), 128, 3),
        with_statistics((32, 64, 14, 14), 12, 3),
        with_statistics((32, 64, 14, 14), 128, 7),
        replace(REQUEST, outputs=REQUEST.outputs[1:]),
        of_the_image(REQUEST),
    ],
    ids=["bf16", "tf32", "groups", "channels", "filters", "kernel", "no result", "of the image"],
)
def test_requests_without_engine_have_no_candidate(request_: Request) -> None:
    assert offered(request_) == []


def test_its_row_is_that_of_a_convolution_with_statistics() -> None:
    (candidate,) = offered(REQUEST)
    c = candidate
    a = CUDNN.arguments(c.call(REQUEST), 0)
    row = dict(zip(ConvolutionRow.names(), a.integers, strict=True))
    bare = convolution_of(REQUEST)
    alone = CUDNN.arguments(replace(c, name=bare.kind, layouts=c.layouts[:3]).call(bare), 0)
    assert row == dict(zip(ConvolutionRow.names(), alone.integers, strict=True)) | {"statistics": 1}
    assert (row["pass"], row["layout"], row["engine"], row["filters"]) == (0, 1, -1, 128)
    assert row["workspace_bytes"] > sums_bytes(REQUEST.outputs[0]) == 1024

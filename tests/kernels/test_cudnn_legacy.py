"""The provider `cudnn_legacy`: its candidates, arguments and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import device_specs
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Call, Candidate, Request
from mbc.kernels.cudnn_legacy import (
    ALGORITHMS,
    CUDNN_LEGACY,
    LegacyChoice,
    LegacyRow,
    admitted_maths,
    legacy_candidate,
    legacy_notes,
    legacy_shapes,
)
from mbc.kernels.providers import PROVIDERS
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.options import PROVIDER_NAMES

FIRST, LAST = Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST
ATTRIBUTES = Convolution((9, 8), (3, 2), (2, 1), (1, 1, 0, 0), (1, 2), 2)
SHAPES = {"image": (6, 4, 9, 8), "filter": (10, 2, 3, 2), "result": (6, 10, 5, 6)}
OPERANDS = {
    "convolution": ("image", "filter", "result"),
    "convolution_backward_data": ("result", "filter", "image"),
    "convolution_backward_filter": ("image", "result", "filter"),
}


def request(kind: str, precision: Precision = Precision.FP32, attributes: Convolution = ATTRIBUTES) -> Request:
    types = [TensorType(SHAPES[name], precision.working) for name in OPERANDS[kind]]
    if kind == "convolution_backward_filter":
        types[2] = TensorType(types[2].shape, precision.master)
    return Request(kind, attributes, tuple(types[:2]), (types[2],), precision)


def row(asked: Request, candidate: Candidate, accumulate: bool = False) -> dict[str, int]:
    arguments = CUDNN_LEGACY.arguments(candidate.call(asked, accumulate), 0)
    assert not arguments.reals
    return dict(zip(LegacyRow.names(), arguments.integers, strict=True))


def test_it_is_a_provider_that_offers_nothing_without_a_gpu() -> None:
    assert CUDNN_LEGACY in PROVIDERS
    assert CUDNN_LEGACY.name in PROVIDER_NAMES
    for device in device_specs().values():
        assert not list(CUDNN_LEGACY.candidates(request("convolution"), device))


@pytest.mark.parametrize("number, kind", list(enumerate(OPERANDS)))
def test_a_row_says_the_same_shapes_in_every_pass(number: int, kind: str) -> None:
    asked = request(kind)
    fields = row(asked, legacy_candidate(asked, LegacyChoice("FFT", LAST, "FMA"), 1000))
    algorithm = ALGORITHMS[kind].index("FFT")
    assert fields == {
        "pass": number, "type": 0, "layout": 1, "math": 3, "algorithm": algorithm, "accumulate": 0,
        "rows": 6, "channels": 4, "height": 9, "width": 8, "filters": 10, "kernel_height": 3, "kernel_width": 2,
        "out_height": 5, "out_width": 6, "pad_height": 1, "pad_width": 0, "stride_height": 2, "stride_width": 1,
        "dilation_height": 1, "dilation_width": 2, "groups": 2, "workspace_bytes": 1024,
    }  # fmt: skip


def test_slices_of_a_filter_gradient_add_up() -> None:
    asked = request("convolution_backward_filter")
    candidate = legacy_candidate(asked, LegacyChoice("ALGO_1", FIRST, "FMA"), 0)
    assert candidate.accumulates and candidate.workspace_bytes == 0
    assert row(asked, candidate, accumulate=True)["accumulate"] == 1
    for kind in ("convolution", "convolution_backward_data"):
        assert not legacy_candidate(request(kind), LegacyChoice("FFT", FIRST, "FMA"), 0).accumulates


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_half_precision_gradients_are_widened_in_the_workspace(precision: Precision) -> None:
    choice = LegacyChoice("ALGO_1", FIRST, "TENSOR_OP")
    asked = request("convolution_backward_filter", precision)
    assert legacy_candidate(asked, choice, 131).workspace_bytes == 512  # 120 elements of 2 bytes, then 131 bytes
    assert row(asked, legacy_candidate(asked, choice, 0))["type"] == {DType.BF16: 1, DType.FP16: 2}[precision.working]
    data = request("convolution_backward_data", precision)
    assert legacy_candidate(data, choice, 131).workspace_bytes == 256


def test_determinism_is_as_documented() -> None:
    loose = {
        (kind, algorithm)
        for kind, algorithms in ALGORITHMS.items()
        for algorithm in algorithms
        if not legacy_candidate(request(kind), LegacyChoice(algorithm, FIRST, "FMA"), 0).deterministic
    }
    assert loose == {
        ("convolution_backward_data", "ALGO_0"),
        ("convolution_backward_filter", "ALGO_0"),
        ("convolution_backward_filter", "ALGO_3"),
    }


def test_strict_precision_admits_no_tensor_cores() -> None:
    assert admitted_maths(Precision.FP32) == ("FMA",)
    assert admitted_maths(Precision.TF32) == ("DEFAULT", "FMA")
    assert admitted_maths(Precision.BF16) == admitted_maths(Precision.FP16) == ("TENSOR_OP", "DEFAULT")
    assert admitted_maths(Precision.FP64) == ()


def test_notes_are_words() -> None:
    asked = request("convolution_backward_filter", Precision.TF32)
    assert legacy_notes(asked, LegacyChoice("ALGO_3", FIRST, "DEFAULT")) == (
        "ALGO_3", "DEFAULT_MATH", "NONDETERMINISTIC", "TF32",
    )  # fmt: skip
    half = request("convolution", Precision.BF16)
    assert legacy_notes(half, LegacyChoice("WINOGRAD", FIRST, "TENSOR_OP")) == ("TENSOR_OP_MATH", "WINOGRAD")


def test_padding_must_be_symmetric() -> None:
    uneven = request("convolution", attributes=replace(ATTRIBUTES, pad=(0, 1, 0, 0)))
    assert legacy_shapes(request("convolution")) is not None
    assert legacy_shapes(uneven) is None
    linear = Request("linear", Linear((4,)), (TensorType((2, 4), DType.FP32),) * 2, (), Precision.FP32)
    assert legacy_shapes(linear) is None


@pytest.mark.parametrize(
    "attributes, settings",
    [
        (ATTRIBUTES, (("algorithm", 1), ("layout", 0))),
        (ATTRIBUTES, (("engine", 1), ("layout", 0), ("math", 3))),
        (replace(ATTRIBUTES, pad=(0, 1, 0, 0)), (("algorithm", 1), ("layout", 0), ("math", 3))),
    ],
)
def test_a_plan_that_names_no_such_call_is_refused(
    attributes: Convolution, settings: tuple[tuple[str, int], ...]
) -> None:
    asked = request("convolution", attributes=attributes)
    with pytest.raises(MbcError, match="legacy API cannot run convolution") as caught:
        CUDNN_LEGACY.arguments(Call(asked, "convolution", settings, (FIRST,) * 3, False, 0), 0)
    assert caught.value.code == "MBC083"

"""Operands for measuring: values that an operation may meet, and small requests in place of large ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.target import find_device
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda import KERNELS
from mbc.measure.own_kernel_harness import candidate_keys
from mbc.measure.random_operands import FEW_ELEMENTS, FEW_STATES, few, has_rows, values
from mbc.ops import KINDS
from mbc.ops.activation import LeakyRelu
from mbc.ops.attention import Attention
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import BatchNormalize
from mbc.ops.control_record import CONTROL_TYPE, control_record
from mbc.ops.convolution import Convolution
from mbc.ops.loss import CrossEntropy
from mbc.ops.update import Sgd
from mbc.ops.weighted_cross_entropy import ClassWeights
from mbc.optimize.fusion.catalogue import PAIR_REDUCTIONS
from mbc.optimize.search.profiling_requests import needs
from mbc.options import Policy
from mbc.passes.training_step import differentiate
from mbc.source import Source
from tests.kernels.cuda.cases import CASES, GENERATED, Case
from tests.kernels.cuda.groups import MORE_CHANNELS, point_operand, points

FIRST = {case.kind: case for case in reversed((*CASES, *GENERATED))}


def fp32(*shape: int) -> TensorType:
    return TensorType(shape, DType.FP32)


def bf16(*shape: int) -> TensorType:
    return TensorType(shape, DType.BF16)


def test_every_kernel_of_ours_has_a_case() -> None:
    assert {kind for kind in KERNELS if kind in KINDS} <= set(FIRST)


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.kind)
def test_the_small_request_is_one_of_its_kind(case: Case) -> None:
    request = case.request(Precision.BF16)
    small = few(request)
    assert (small.kind, small.attributes, small.precision) == (request.kind, request.attributes, request.precision)
    if case.kind in KINDS:
        assert small.outputs == KINDS[case.kind].shape(small.attributes, small.inputs)
    assert all(
        a.elements <= b.elements and a.dtype is b.dtype for a, b in zip(small.inputs, request.inputs, strict=True)
    )


def test_rows_are_few_and_channels_stay() -> None:
    x, c = fp32(64, 64, 56, 56), fp32(64)  # as many rows as channels
    asked = Request("batch_normalize", BatchNormalize(1e-5), (x, c, c, c, c), (x,), Precision.FP32)
    small = few(asked)
    assert [t.shape for t in small.inputs] == [(1, 64, 56, 56), (64,), (64,), (64,), (64,)]
    assert small.inputs[0].elements > FEW_ELEMENTS  # one row is the least
    assert has_rows(asked, x) and not has_rows(asked, c)


def test_volumes_have_few_planes_and_windows_follow() -> None:
    coarse, filters, fine = bf16(2, 16, 256, 48, 48), bf16(16, 16, 2, 2, 2), bf16(2, 16, 512, 96, 96)
    window = Convolution((512, 96, 96), (2, 2, 2), (2, 2, 2))
    small = few(Request("convolution_backward_data", window, (coarse, filters), (fine,), Precision.BF16))
    assert small.attributes == replace(window, size=(64, 96, 96))
    assert [t.shape[2] for t in (*small.inputs, *small.outputs)] == [32, 2, 64]
    relu = Request("leaky_relu", LeakyRelu(0.1), (fine,), (fine,), Precision.BF16)
    assert [t.shape[:3] for t in (*few(relu).inputs, *few(relu).outputs)] == [(1, 16, 8)] * 2
    assert few(relu, planes=False).outputs[0].shape == (1, 16, 512, 96, 96)


def test_operands_without_common_planes_stay_whole() -> None:
    x, labels = fp32(2, 32, 128, 64, 96), TensorType((2, 128, 64, 96), DType.INT32)  # axis 2 of the labels is no depth
    attributes = CrossEntropy(0.0)
    outputs = KINDS["softmax_cross_entropy"].shape(attributes, (x, labels))
    small = few(Request("softmax_cross_entropy", attributes, (x, labels), outputs, Precision.FP32))
    assert [t.shape for t in small.inputs] == [(1, 32, 128, 64, 96), (1, 128, 64, 96)]


def test_every_kernel_for_volumes_runs_the_small_request() -> None:
    device, checked = find_device("h200"), 0
    text = (Path(__file__).parents[2] / "examples" / "nnunet.mbc").read_text(encoding="utf-8")
    lowered = lower(parse(Source("nnunet.mbc", text)), (("train.precision", "fp16"),))
    graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
    for need in needs(graph, device, Policy.UNDIVIDED):
        small = few(need.undivided)
        if small.inputs[0].shape[2:] != need.undivided.inputs[0].shape[2:]:
            checked += 1
            assert candidate_keys(need.undivided, device) <= candidate_keys(small, device)
    assert checked > 20


def test_statistics_of_attention_have_its_rows() -> None:
    packed, result, statistics = bf16(64, 2304, 1, 197), bf16(64, 768, 1, 197), fp32(64, 1, 12, 1, 197)
    asked = Request(
        "attention_backward", Attention(12, 0.125, packed=True), (packed, result, result, statistics), (packed,),
        Precision.BF16,
    )  # fmt: skip
    assert {t.shape[0] for t in few(asked).inputs} == {1}


def test_weights_of_every_product_stay() -> None:
    rows = 8 + MORE_CHANNELS  # as many as the gradient has channels
    pattern, sizes = PAIR_REDUCTIONS[0], (rows, 8, (8, 8), 128)
    launch = points(pattern, pattern.launches[0], sizes)
    operands = tuple(point_operand(name, pattern, sizes).type(Precision.BF16) for name in launch.inputs)
    assert operands[2].shape[:2] == (rows, rows)
    small = few(Request(launch.kind, launch.attributes, operands, (), Precision.BF16))
    assert (small.inputs[1], small.inputs[3]) == (operands[1], operands[3])
    assert small.inputs[0].shape[0] == small.inputs[2].shape[0] < rows


def test_class_numbers_keep_to_the_rows_and_the_classes() -> None:
    asked = Request(
        "softmax_cross_entropy",
        CrossEntropy(),
        (fp32(256, 10), TensorType((256,), DType.INT32)),
        (fp32(1), fp32(1)),
        Precision.FP32,
    )
    assert few(asked).inputs[1].shape == (few(asked).inputs[0].shape[0],)
    drawn = values(asked, 1, 5000)
    assert drawn.dtype == np.int32 and set(drawn.tolist()) == set(range(10))


def test_states_are_short_and_positive() -> None:
    weight = fp32(512, 64, 3, 3)
    asked = Request("sgd_update", Sgd(0.9), (weight, weight, CONTROL_TYPE, weight), (weight, weight), Precision.FP32)
    small = few(asked)
    part = (FEW_STATES // 576, 64, 3, 3)  # which may have either layout, like the whole
    assert [t.shape for t in small.inputs] == [part, part, (256,), part]
    assert values(asked, 3, 1000).min() > 0
    assert control_record(values(asked, 2, 256))["proceed"] == 1


def test_values_are_rounded_as_stored() -> None:
    x = TensorType((4, 8, 3, 3), DType.BF16)
    drawn = values(Request("relu", NoAttributes(), (x,), (x,), Precision.BF16), 0, 288)
    assert (drawn.view(np.uint32) & 0xFFFF).max() == 0 and drawn.std() > 0.5


def test_a_request_that_cannot_be_made_small_is_refused() -> None:
    x = fp32(4, 8, 3, 3)
    with pytest.raises(MbcError, match="error MBC087: batch_normalize cannot be checked on few rows"):
        few(Request("batch_normalize", BatchNormalize(1e-5), (x, fp32(7)), (x,), Precision.FP32))


def test_probabilities_are_positive_and_class_numbers_are_of_the_weights() -> None:
    logits = fp32(64, 5)
    asked = Request("kl_divergence", NoAttributes(), (logits, logits), (fp32(1),), Precision.FP32)
    assert (values(asked, 0, 99) < 0).any() and (values(asked, 1, 99) > 0).all()
    weights, target = ClassWeights(5, (), (), "fp32"), TensorType((9, 40), DType.INT32)
    asked = Request("class_weight_sum", weights, (target,), (fp32(2),), Precision.FP32)
    assert set(values(asked, 0, 360)) == set(range(5))

"""Trials of GEMMs: the comparison and its tolerance. A float64 convolution on the CPU replaces the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mbc.errors import MbcError
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.measure.gemm_trial import (
    Floats,
    Operand,
    Trial,
    Trials,
    as_convolution,
    in_double,
    is_filter,
    period_rows,
    period_signs,
    with_rows,
)
from mbc.measure.random_pool import MOST_ELEMENTS
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear

PASSES = ("convolution", "convolution_backward_data", "convolution_backward_filter")


def request(kind: str, rows: int, precision: Precision) -> Request:
    working = precision.working
    image = TensorType((rows, 3, 7, 6), working)
    weight = TensorType((5, 3, 3, 3), working)
    features = TensorType((rows, 5, 4, 3), working)
    attributes = Convolution((7, 6), (3, 3), (2, 2), (1, 1, 1, 1))
    if kind == "convolution":
        return Request(kind, attributes, (image, weight), (features,), precision)
    if kind == "convolution_backward_data":
        return Request(kind, attributes, (features, weight), (image,), precision)
    return Request(kind, attributes, (image, features), (TensorType(weight.shape, precision.master),), precision)


class OnCpu(Trials):
    def __init__(self) -> None:
        self.computed = 0

    def in_double(self, request: Request, operands: Sequence[Operand | Floats]) -> NDArray[np.float64]:
        self.computed += 1
        rows = request.inputs[0].shape[0]
        call = Call(in_double(request).outputs, 0, rows, Precision.FP64)
        evaluate = KINDS[request.kind].evaluate
        assert evaluate is not None
        return evaluate(
            request.attributes,
            [(o.values() if isinstance(o, Operand) else o).astype(np.float64) for o in operands],
            call,
        )[0]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize("kind", PASSES)
def test_a_few_rows_tell_the_result_of_all(kind: str, rows: int, precision: Precision) -> None:
    asked = request(kind, rows, precision)
    trials = OnCpu()
    trial = trials.make(asked)
    for slice_rows in {rows, max(1, rows // 2), 1}:
        # The whole computation, on operands repeated as on the GPU.
        part = with_rows(asked, slice_rows)
        shown: list[Any] = [
            o if is_filter(asked, i) else np.resize(o, (slice_rows, *o.shape[1:]))
            for i, o in enumerate(operand.values() for operand in trial.operands)
        ]
        if trial.adds_up:
            shown[1] = shown[1] * np.repeat(trial.signs, trial.period)[:slice_rows, None, None, None]
        result = trials.in_double(part, shown)
        expected = trial.expected(slice_rows)
        if not trial.adds_up:
            expected = np.resize(expected, (slice_rows, *expected.shape[1:]))
        assert np.linalg.norm(result - expected) <= 1e-13 * np.linalg.norm(expected)
        assert 1e-2 < float(np.abs(result).max()) < 1e3


def test_sums_over_periods_grow_like_those_of_random_rows() -> None:
    sums = np.cumsum(period_signs(512))
    assert set(period_signs(512)) == {1, -1}
    assert np.all(np.abs(sums - np.sqrt(np.arange(1, 513))) <= 1.5) and sums.min() == 1


def test_one_reference_serves_every_size() -> None:
    trials = OnCpu()
    trial = trials.make(request("convolution_backward_filter", 64, Precision.FP32))
    for rows in (64, 32, 16, 8, 4):
        trial.expected(rows)
    assert trials.computed == 1
    trial.expected(7)
    assert trials.computed == 2


def test_a_linear_layer_is_a_convolution_of_one_pixel() -> None:
    x, w, y = (TensorType(shape, DType.FP32) for shape in ((9, 4, 3), (5, 12), (9, 5)))
    seen = as_convolution(Request("linear_backward_data", Linear((4, 3)), (y, w), (x,), Precision.FP32))
    assert seen.kind == "convolution_backward_data"
    assert [t.shape for t in (*seen.inputs, *seen.outputs)] == [(9, 5, 1, 1), (5, 12, 1, 1), (9, 12, 1, 1)]
    asked = request("convolution", 4, Precision.FP32)
    assert as_convolution(asked) is asked


def test_with_rows_leaves_the_filter() -> None:
    for kind in PASSES:
        more = with_rows(request(kind, 4, Precision.FP32), 9)
        shapes = [t.shape[0] for t in (*more.inputs, *more.outputs)]
        assert sorted(shapes) == [5, 9, 9]


def test_equal_shapes_of_image_and_filter_are_not_confused() -> None:
    same = TensorType((4, 4, 3, 3), DType.FP32)
    asked = Request("convolution", Convolution((3, 3), (3, 3), pad=(1, 1, 1, 1)), (same, same), (same,), Precision.FP32)
    more = with_rows(asked, 8)
    assert [t.shape[0] for t in (*more.inputs, *more.outputs)] == [8, 4, 8]


def test_period() -> None:
    assert period_rows(request("convolution", 3, Precision.FP32)) == 3
    assert period_rows(request("convolution", 64, Precision.FP32)) == 4


def test_no_gpu_is_said() -> None:
    from mbc.measure.gpu import Gpu

    try:
        Gpu().close()
    except MbcError as error:
        assert error.code in ("MBC077", "MBC078")
        assert "measuring needs" in error.message or "cuDNN" in error.message
        assert error.remedy


def test_trials_are_reproducible() -> None:
    asked = request("convolution", 4, Precision.FP32)
    first: Trial = OnCpu().make(asked)
    pairs = zip(first.operands, OnCpu().make(asked).operands, strict=True)
    assert all(np.array_equal(a.values(), b.values()) for a, b in pairs)


@pytest.mark.parametrize("elements", [7, MOST_ELEMENTS + 7])
def test_the_bytes_of_an_operand_repeat_to_its_elements(elements: int) -> None:
    operand = Operand(TensorType((1, elements), DType.FP16), 3, 0.25)
    for dtype, stored in ((DType.FP16, "<f2"), (DType.FP64, "<f8")):
        few = operand.first_bytes(dtype, sign=-1).view(stored)
        assert len(few) == min(elements, MOST_ELEMENTS)
        assert np.array_equal(np.resize(few, elements), -operand.values()[0])

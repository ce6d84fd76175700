"""Properties of operations that gradients do not show: ties, NaN, padding, rounding, wrong targets, large inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS, POINTWISE, im2col
from mbc.ops.base import Array, Call, NoAttributes, ShapeError
from mbc.ops.convolution import Convolution
from mbc.ops.elementwise_loss import (
    BinaryCrossEntropy,
    BinaryCrossEntropyBackward,
    PlainLossBackward,
    SmoothL1,
    SmoothL1Backward,
)
from mbc.ops.erf import erf
from mbc.ops.loss import CrossEntropy, CrossEntropyBackward
from mbc.ops.matrix import Cast, Linear
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.ops.rounding import round_tf32
from mbc.ops.top_k import TopK
from tests.ir.execution import new_control
from tests.ops.pointwise_inputs import examples, values

NAN = math.nan


def call(kind: str, attributes: Attributes, *inputs: Array, precision: Precision = Precision.FP64) -> tuple[Array, ...]:
    meaning = KINDS[kind]
    dtypes = {"f": DType.FP64 if inputs[0].dtype == np.float64 else DType.FP32, "i": DType.INT32, "u": DType.UINT8}
    types = meaning.shape(attributes, tuple(TensorType(x.shape, dtypes[x.dtype.kind]) for x in inputs))
    assert meaning.evaluate is not None
    outputs = meaning.evaluate(attributes, inputs, Call(types, 0, inputs[0].shape[0], precision))
    assert [x.shape for x in outputs] == [t.shape for t in types]
    return outputs


def _image(*rows: tuple[float, ...]) -> Array:
    return np.array(rows, np.float64)[None, None]


def test_max_pool_takes_the_first_of_equals() -> None:
    y, index = call("max_pool", MaxPool((2, 2), (2, 2), (2, 2), index=True), _image((1, 3), (3, 3)))
    assert (y.item(), index.item()) == (3, 1)


def test_max_pool_lets_nan_through() -> None:
    for rows in (((NAN, 3), (3, 3)), ((1, 3), (NAN, 4))):
        y, index = call("max_pool", MaxPool((2, 2), (2, 2), (2, 2), index=True), _image(*rows))
        assert math.isnan(y.item())
        assert math.isnan(_image(*rows).reshape(-1)[index.item()])
        assert math.isnan(call("max_pool", MaxPool((2, 2), (2, 2), (2, 2)), _image(*rows))[0].item())


def test_max_pool_never_chooses_padding() -> None:
    a = MaxPool((1, 1), (2, 2), (1, 1), (1, 0, 1, 0), index=True)
    y, index = call("max_pool", a, _image((-math.inf,)))
    assert (y.item(), index.item()) == (-math.inf, 3)
    (dx,) = call("max_pool_backward", a, index, np.ones((1, 1, 1, 1)))
    assert dx.item() == 1


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 3, 1), (2, 3, 1), (3, 2, 0)])
@pytest.mark.parametrize("ceil", [False, True])
def test_pooling_has_the_windows_of_pytorch(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> None:
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    x = np.random.default_rng(0).normal(size=(2, 3, size, size + 1))
    window: Any = ((size, size + 1), (kernel,) * 2, (stride,) * 2, (pad,) * 4, ceil)
    wide = torch.tensor(x)
    (y,) = call("max_pool", MaxPool(*window), x)
    theirs = torch.nn.functional.max_pool2d(wide, kernel, stride, pad, ceil_mode=ceil).numpy()
    np.testing.assert_array_equal(y, theirs)
    for count_pad in (False, True):
        (y,) = call("avg_pool", AveragePool(*window, count_pad=count_pad), x)
        theirs = torch.nn.functional.avg_pool2d(wide, kernel, stride, pad, ceil, count_pad).numpy()
        np.testing.assert_allclose(y, theirs, rtol=1e-14)


@pytest.mark.parametrize("target", [-1, 3, -100, 2**31 - 1])
def test_a_target_that_is_no_class_makes_the_loss_nan(target: int) -> None:
    logits, targets = np.zeros((2, 3)), np.array([1, target], np.int32)
    loss, correct = call("softmax_cross_entropy", CrossEntropy(), logits, targets)
    assert math.isnan(loss.item()) and correct.item() == 0
    (gradient,) = call("softmax_cross_entropy_backward", CrossEntropyBackward(0.0, 1.0), logits, targets, new_control())
    assert gradient[1].tolist() == [0, 0, 0] and gradient[0, 1] < 0


def test_correct_counts_the_first_of_equal_logits() -> None:
    targets = np.array([0, 1, 2], np.int32)
    _, correct = call(
        "softmax_cross_entropy", CrossEntropy(), np.array([[1, 1, 0], [1, 1, 0], [0, 1, 2]], float), targets
    )
    assert correct.item() == 2


def test_top_k_takes_the_first_of_equals_and_no_nan() -> None:
    logits = np.array([[2, 1, 1, 0], [2, 1, 1, 0], [NAN, 3, 2, 1], [NAN, 3, 2, 1], [1, 2, 3, 4], [1, 2, 3, 4]], float)
    targets = np.array([1, 2, 0, 1, -1, 4], np.int32)
    assert call("top_k", TopK(2), logits, targets)[0].item() * 6 == 2


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    logits, targets = np.array([[1e4, -1e4]], np.float32), np.array([1], np.int32)
    loss, _ = call("softmax_cross_entropy", CrossEntropy(), logits, targets, precision=Precision.FP32)
    assert loss.item() == pytest.approx(2e4)


def test_binary_cross_entropy_keeps_its_digits_where_a_network_is_certain() -> None:
    logits, target = np.array([[1e4, -1e4, 30, -30]], np.float32), np.array([[0, 1, 1, 0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        (loss,) = call("binary_cross_entropy", BinaryCrossEntropy(), logits[:, 2:], target[:, 2:])
        assert loss.item() == pytest.approx(math.log1p(math.exp(-30)), rel=1e-6)
        (loss,) = call("binary_cross_entropy", BinaryCrossEntropy(), logits, target)
        assert loss.item() == pytest.approx(5e3)
        a = BinaryCrossEntropyBackward(1.0, 4.0, 0)
        (gradient,) = call("binary_cross_entropy_backward", a, logits, target, new_control())
    assert gradient[0].tolist() == pytest.approx([1, -1, -math.exp(-30), math.exp(-30)], rel=1e-6)


def test_nan_comes_through_losses() -> None:
    nan, zero = np.full((1, 1), NAN), np.zeros((1, 1))
    for kind, forward, backward in (
        ("l1", NoAttributes(), PlainLossBackward(1.0, 0)),
        ("smooth_l1", SmoothL1(), SmoothL1Backward(1.0, 1.0, 0)),
        ("binary_cross_entropy", BinaryCrossEntropy(), BinaryCrossEntropyBackward(1.0, 1.0, 0)),
        ("probability_cross_entropy", NoAttributes(), PlainLossBackward(1.0, 0)),
    ):
        assert math.isnan(call(kind, forward, nan, zero)[0].item())
        assert math.isnan(call(f"{kind}_backward", backward, nan, zero, new_control())[0].item())


def test_activations_of_huge_numbers_are_finite_and_nan_stays() -> None:
    x = np.array([-1e30, -100.0, 0.0, 100.0, 1e30])
    for function in POINTWISE.values():
        for a in examples(function):
            exact = values(function, a, x)
            ordinary = np.isfinite(exact) & (np.abs(exact) < np.finfo(np.float32).max)
            with np.errstate(all="raise", under="ignore"):
                result = call(function.name, a, x[ordinary].astype(np.float32))[0]
            np.testing.assert_allclose(result, exact[ordinary], rtol=1e-6, atol=1e-37, err_msg=function.name)
            assert math.isnan(values(function, a, np.array([NAN])).item()), function.name


def test_erf_is_exact_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.84375, 1.25, 1 / 0.35, 6, -0.0, 1e-300, np.inf, -np.inf]])
    exact = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), exact, rtol=1e-15, atol=0)
    assert math.isnan(erf(np.array([NAN]))[0])


def test_tf32_keeps_ten_bits_and_rounds_ties_away() -> None:
    unit = 2.0**-10
    x = np.array(
        [1, 1 + unit, 1 + unit / 2, 1 + unit * 0.49, -1 - unit / 2, np.inf, NAN, np.finfo(np.float32).max], np.float32
    )
    expected = [1, 1 + unit, 1 + unit, 1, -1 - unit, math.inf, NAN, math.inf]
    np.testing.assert_array_equal(round_tf32(x), np.array(expected, np.float32))


def test_tf32_rounds_the_operands_of_products_only() -> None:
    x, w = np.array([[1 + 2.0**-12]], np.float32), np.ones((1, 1), np.float32)
    assert call("linear", Linear((1,)), x, w, precision=Precision.FP32)[0].item() > 1
    assert call("linear", Linear((1,)), x, w, precision=Precision.TF32)[0].item() == 1
    assert call("relu", NoAttributes(), x, precision=Precision.TF32)[0].item() > 1


def test_casts_go_through_float32() -> None:
    x = np.array([1 / 3])
    for to, kind in (("bf16", np.float32), ("fp32", np.float32), ("fp64", np.float64)):
        assert call("cast", Cast(to), x)[0].dtype == kind


def test_statistics_of_a_large_mean_keep_their_variance() -> None:
    x = (np.random.default_rng(0).normal(size=(64, 2, 32, 32)) + 1000).astype(np.float32)
    mean, variance = call("batch_statistics", NoAttributes(), x, precision=Precision.FP32)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype(np.float64).var((0, 2, 3)), rtol=1e-5)


def test_a_convolution_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a = Convolution((5, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 2)
    x, w, dy = (rng.normal(size=s) for s in ((7, 4, 5, 5), (6, 2, 3, 3), (7, 6, 5, 5)))
    passes = (("convolution", (x, w)), ("convolution_backward_data", (dy, w)), ("convolution_backward_filter", (x, dy)))
    whole = [call(kind, a, *operands)[0] for kind, operands in passes]
    monkeypatch.setattr(im2col, "_COLUMN_BYTES", 2 * 4 * 9 * 25 * 8)
    for (kind, operands), expected in zip(passes, whole, strict=True):
        np.testing.assert_allclose(call(kind, a, *operands)[0], expected, rtol=1e-12, atol=1e-12)


def test_bit_masks_have_bytes_of_eight_channels() -> None:
    y = np.zeros((1, 16, 2, 1), np.float32)
    y[0, (0, 3, 9), 1] = 1.0
    (signs,) = call("relu_mask", NoAttributes(), y)
    assert signs.dtype == np.uint8
    assert signs[0, :, :, 0].tolist() == [[0, 0b1001], [0, 0b10]]


def test_gradients_from_bit_masks_are_those_from_the_output_to_the_bit() -> None:
    rng = np.random.default_rng(5)
    y, dy = (rng.standard_normal((3, 24, 5, 7)).astype(np.float32) for _ in range(2))
    for array in (y, dy):
        for value in (NAN, math.inf, -math.inf, 0.0, -0.0):
            array[rng.random(array.shape) < 0.05] = value
    (signs,) = call("relu_mask", NoAttributes(), y)
    (masked,) = call("relu_backward_masked", NoAttributes(), dy, signs)
    (wanted,) = call("relu_backward", NoAttributes(), y, dy)
    assert masked.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shape", [(2, 12, 3, 3), (16,)])
def test_bit_masks_need_whole_bytes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="multiple of 8"):
        call("relu_mask", NoAttributes(), np.zeros(shape))


def test_bit_masks_of_another_image_are_refused() -> None:
    with pytest.raises(ShapeError, match="is not a bit mask of"):
        call("relu_backward_masked", NoAttributes(), np.zeros((2, 16, 3, 3)), np.zeros((2, 1, 3, 3), np.uint8))

"""Guard and optimizers: the loss scale, skipped steps, and several steps beside PyTorch's own optimizers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from mbc.ir.control import CONTROL_BYTES, GROWTH_INTERVAL
from mbc.ir.graph import Attributes
from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.base import Array, Call, NoAttributes, ShapeError
from mbc.ops.control_record import CONTROL_TYPE, RECORD, control_record
from mbc.ops.update import AdamW, Ema, Guard, Sgd
from tests.ir.execution import new_control


def _call(
    kind: str, attributes: Attributes, *inputs: Array, precision: Precision = Precision.FP64
) -> tuple[Array, ...]:
    evaluate = KINDS[kind].evaluate
    assert evaluate is not None
    return evaluate(attributes, inputs, Call((), 0, 1, precision))


def _guard(control: Array, *values: float, precision: Precision = Precision.FP16, clip_norm: float = 0.0) -> Array:
    arrays = [np.array([v], np.float32) for v in values]
    return _call("guard", Guard(clip_norm), control, *arrays, precision=precision)[0]


def test_the_record_covers_the_block() -> None:
    block = new_control(step=2**40, learning_rate=0.5)
    assert RECORD.itemsize == CONTROL_BYTES
    assert control_record(block)["step"] == 2**40
    control_record(block)["updates"] = 7
    assert block[40] == 7


def test_a_good_step_counts() -> None:
    before = new_control(loss_scale=8.0)
    record = control_record(_guard(before, 1.0, 2.0))
    assert (record["proceed"], record["updates"], record["skipped"], record["since_growth"]) == (1, 1, 0, 1)
    assert control_record(before)["updates"] == 0


@pytest.mark.parametrize("values", [(np.nan,), (1.0, np.inf), (1.0, 2.0, np.nan)])
def test_an_overflow_skips_the_step_and_halves_the_scale_of_fp16_only(values: tuple[float, ...]) -> None:
    before = new_control(loss_scale=8.0)
    control_record(before)["since_growth"] = 5
    record = control_record(_guard(before, *values))
    assert (record["proceed"], record["updates"], record["skipped"], record["since_growth"]) == (0, 0, 1, 0)
    assert record["loss_scale"] == 4
    assert control_record(_guard(before, *values, precision=Precision.BF16))["loss_scale"] == 8


def test_the_scale_grows_after_an_interval_but_not_for_this_steps_gradients() -> None:
    before = new_control(loss_scale=8.0, learning_rate=1.0)
    control_record(before)["since_growth"] = GROWTH_INTERVAL - 1
    after = _guard(before, 1.0)
    record = control_record(after)
    assert (record["loss_scale"], record["gradient_scale"], record["since_growth"]) == (16, 8, 0)
    (parameter,) = _call("sgd_update", Sgd(), np.array([1.0]), np.array([8.0]), after)
    assert parameter == 0.0


def test_a_skipped_step_leaves_parameters_and_optimizer_states() -> None:
    after = _guard(new_control(), np.nan)
    states = [np.array([float(i)]) for i in range(4)]
    p, g, m, v = states
    assert _call("sgd_update", Sgd(0.9), p, g, after, m) == (p, m)
    assert _call("adamw_update", AdamW(), p, g, after, m, v) == (p, m, v)
    assert _call("ema_update", Ema(0.9), p, g, after) == (p,)
    running = _call("update_running", _running(), *states, after)
    assert running == (p, g)


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 1 / (5 + 1e-6)), (5.0, 5 / (5 + 1e-6)), (20.0, 1.0)])
def test_gradients_are_clipped_to_their_norm(limit: float, factor: float) -> None:
    before = new_control(loss_scale=8.0, learning_rate=1.0)
    after = _guard(before, 0.0, 24.0, -32.0, clip_norm=limit)  # without the scale: 3 and -4
    assert control_record(after)["loss_scale"] == 8
    (parameter,) = _call("sgd_update", Sgd(weight_decay=0.5), np.array([1.0]), np.array([24.0]), after)
    assert parameter == pytest.approx([1 - 3 * factor - 0.5], rel=1e-6)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_clipping_skips_a_step_whose_gradients_are_not_finite(precision: Precision) -> None:
    record = control_record(_guard(new_control(), 0.0, np.inf, precision=precision, clip_norm=1.0))
    assert (record["proceed"], record["gradient_scale"]) == (0, 1)


def test_a_norm_is_of_some_gradients() -> None:
    loss = TensorType((1,), DType.FP32)
    with pytest.raises(ShapeError, match="can only be clipped if the guard reads gradients"):
        KINDS["guard"].shape(Guard(1.0), (CONTROL_TYPE, loss))
    assert KINDS["guard"].shape(Guard(1.0), (CONTROL_TYPE, loss, loss)) == (CONTROL_TYPE,)


def test_clipping_to_a_value_keeps_nan() -> None:
    after = _guard(new_control(learning_rate=1.0), 0.0)
    gradient = np.array([-3.0, 0.25, np.nan, 3.0])
    (parameter,) = _call("sgd_update", Sgd(clip_value=0.5), np.zeros(4), gradient, after)
    np.testing.assert_array_equal(parameter, [0.5, -0.25, np.nan, -0.5])


def test_mini_batches_add_up_from_the_first_one() -> None:
    before, value = np.array([np.nan, 2.0]), np.array([1.0, 4.0])
    for accumulated, expected in ((0, [1.0, 4.0]), (1, [np.nan, 6.0])):
        control = new_control()
        control_record(control)["accumulated"] = accumulated
        np.testing.assert_array_equal(_call("accumulate", NoAttributes(), before, value, control)[0], expected)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_the_mean_of_several_mini_batches_counts(clip_norm: float) -> None:
    after = _call("guard", Guard(clip_norm, 4), new_control(learning_rate=1.0), np.zeros(1), np.array([12.0, 16.0]))[0]
    (parameter,) = _call("sgd_update", Sgd(), np.zeros(2), np.array([12.0, 16.0]), after)
    np.testing.assert_allclose(parameter, [-3 / (5 + 1e-6), -4 / (5 + 1e-6)] if clip_norm else [-3, -4])


def test_a_loss_that_is_not_finite_stops_the_statistics_of_its_mini_batch() -> None:
    for loss, proceed in ((1.0, 1), (np.inf, 0)):
        (after,) = _call("check_loss", NoAttributes(), new_control(), np.array([loss]))
        assert control_record(after)["proceed"] == proceed and control_record(after)["skipped"] == 0


def test_a_copy_of_the_control_block_has_its_bytes() -> None:
    control = new_control(learning_rate=0.5)
    (copy,) = _call("copy_control", NoAttributes(), control)
    np.testing.assert_array_equal(copy, control)
    assert not np.shares_memory(copy, control)


def test_a_moving_average_begins_with_its_weight() -> None:
    control, average = new_control(), np.array([7.0])
    for value, expected in ((1.0, 1.0), (2.0, 1.25), (0.25, 1.0)):
        control = _guard(control, 0.0)
        (average,) = _call("ema_update", Ema(0.75), average, np.array([value]), control)
        assert average == pytest.approx([expected])


def _running() -> Attributes:
    from mbc.ops.batch_normalize import UpdateRunning

    return UpdateRunning(0.1, 4)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("sgd_update", Sgd()),
        ("sgd_update", Sgd(weight_decay=0.01)),
        ("sgd_update", Sgd(momentum=0.9, weight_decay=0.01)),
        ("sgd_update", Sgd(momentum=0.9, nesterov=True, weight_decay=0.01)),
        ("sgd_update", Sgd(momentum=0.9, weight_decay=0.01, rate=10.0)),
        ("sgd_update", Sgd(momentum=0.9, weight_decay=0.01, clip_value=0.3)),
        ("adamw_update", AdamW()),
        ("adamw_update", AdamW(clip_value=0.3)),
        ("adamw_update", AdamW(weight_decay=0.1, rate=0.5)),
        ("adamw_update", AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)),
    ],
)
def test_several_steps_are_those_of_pytorch(kind: str, attributes: Attributes) -> None:
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    rng = np.random.default_rng(0)
    ours = rng.normal(size=(5, 3))
    theirs = torch.tensor(ours, requires_grad=True)
    if isinstance(attributes, AdamW):
        settings: dict[str, Any] = asdict(attributes)
        rate, _ = 0.1 * settings.pop("rate"), settings.pop("clip_value")
        betas = (settings.pop("beta1"), settings.pop("beta2"))
        optimizer = torch.optim.AdamW([theirs], lr=rate, betas=betas, **settings)
        memory = [np.zeros_like(ours), np.zeros_like(ours)]
    else:
        assert isinstance(attributes, Sgd)
        settings = asdict(attributes)
        rate, _ = 0.1 * settings.pop("rate"), settings.pop("clip_value")
        optimizer = torch.optim.SGD([theirs], lr=rate, **settings)
        memory = [np.zeros_like(ours)] if attributes.momentum else []
    control = new_control(learning_rate=0.1, loss_scale=4.0)
    for _ in range(5):
        gradient = rng.normal(size=ours.shape)
        theirs.grad = torch.tensor(gradient)
        if attributes.clip_value:
            torch.nn.utils.clip_grad_value_([theirs], attributes.clip_value)
        optimizer.step()
        control = _guard(control, 0.0)
        ours, *memory = _call(kind, attributes, ours, gradient * 4, control, *memory)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-12, atol=1e-12)

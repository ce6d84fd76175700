"""A training step and all of its results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mbc.equivalence.run_step import Part, distance, random_inputs, run_step
from mbc.errors import MbcError
from mbc.runtime.module import Module
from tests.runtime.nets import small_plan


def outcome(plan, draw=0, **settings):
    return run_step(plan, "cpu", random_inputs(plan.graph, 0, draw), 0, **settings)


def test_the_gradients_are_those_that_sgd_would_take():
    plan = small_plan()
    step_outcome = outcome(plan)
    with Module(plan, seed=0, device="cpu") as net:
        before = {name: net.state(name) for name in net.states}
        inputs = random_inputs(plan.graph, 0, 0)
        loss = float(net.step(inputs["image"], inputs["target"], lr=0.5))
        after = {name: net.state(name) for name in net.states}
    assert step_outcome.tensors[Part.LOSS, "loss"] == loss
    gradients = {name: array for (part, name), array in step_outcome.tensors.items() if part is Part.GRADIENT}
    assert set(gradients) == {name for name in before if f"{name}.momentum" in before}
    for name, gradient in gradients.items():
        np.testing.assert_allclose((before[name] - after[name]) / 0.5, gradient, atol=1e-5, rtol=1e-3)
    statistics = {name for part, name in step_outcome.tensors if part is Part.STATISTIC}
    assert statistics and all("running" in name for name in statistics)


def test_fp16_gradients_carry_no_loss_scale():
    exact, half = outcome(small_plan()), outcome(small_plan("fp16"))
    for key, tensor in exact.tensors.items():
        assert distance(half.tensors[key], tensor) < 0.05, key


def test_a_later_step_draws_other_dropout_from_the_same_states():
    plan = small_plan()
    first, second = outcome(plan), outcome(plan, attempts=2)
    assert (first.attempts, second.attempts) == (1, 2)
    head = (Part.GRADIENT, "head.weight")
    assert distance(first.tensors[head], second.tensors[head]) > 0.01
    # Statistics come before dropout: the states are those of the start again.
    for key, array in first.tensors.items():
        if key[0] is Part.STATISTIC:
            np.testing.assert_array_equal(array, second.tensors[key])


def test_noise_moves_every_tensor_about_so_much():
    plan = small_plan()
    exact, moved = outcome(plan), outcome(plan, weight_noise=1e-4)
    for key, tensor in exact.tensors.items():
        assert 1e-7 < distance(moved.tensors[key], tensor) < 1e-1, key


def test_a_step_without_a_finite_loss_is_refused():
    plan = small_plan()
    inputs = random_inputs(plan.graph, 0, 0)
    inputs["image"][0] = np.nan
    with pytest.raises(MbcError, match="MBC197") as caught:
        run_step(plan, "cpu", inputs, 0)
    assert "the loss of the first step is nan" in str(caught.value)


def test_classes_are_in_range_of_every_output():
    plan = small_plan()
    target = random_inputs(plan.graph, 3, 0)["target"]
    assert target.dtype == np.int32 and set(target.tolist()) <= set(range(5))
    many = dataclasses.replace(
        plan.graph.values["target"], type=dataclasses.replace(plan.graph.values["target"].type, shape=(1000,))
    )
    graph = dataclasses.replace(plan.graph, values={**plan.graph.values, "target": many})
    assert set(random_inputs(graph, 3, 0)["target"].tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("result", "reference", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 4.0], [3.0, 4.0], 0.6),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], float("inf")),
        ([float("nan"), 0.0], [1.0, 0.0], float("inf")),
        ([1.0, 0.0], [float("inf"), 0.0], float("inf")),
    ],
)
def test_distance(result, reference, expected):
    assert distance(np.array(result, np.float32), np.array(reference, np.float32)) == pytest.approx(expected)

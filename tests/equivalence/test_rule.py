"""The rule of equivalence: which deviations pass and which do not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mbc.equivalence import rule
from mbc.equivalence.rule import Draw, Reference, compare
from mbc.equivalence.run_step import Outcome, Part, random_inputs, run_step
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.plan.model import Mode
from tests.runtime.nets import small_plan

WEIGHT, LOSS = (Part.GRADIENT, "w"), (Part.LOSS, "loss")


def step_outcome(weight=1.0, loss=1.0):
    """A step whose tensors are all this number."""
    return Outcome("cpu", 1, {WEIGHT: np.full(100, weight), LOSS: np.full(1, loss)})


def judged(divided, undivided, reference=None, kind=Reference.FLOAT64, precision=Precision.FP32, tolerance=None):
    comparisons = compare(lambda _: Draw(divided, undivided, reference), kind, precision, tolerance)
    return {(c.part, c.name): c for c in comparisons}


def test_twice_the_error_of_the_undivided_step_passes_and_more_does_not():
    undivided, exact = step_outcome(loss=1 + 1e-3), step_outcome()
    assert judged(step_outcome(loss=1 - 1.9e-3), undivided, exact)[LOSS].passed
    assert not judged(step_outcome(loss=1 - 2.1e-3), undivided, exact)[LOSS].passed


def test_an_exact_undivided_step_leaves_the_floor():
    assert judged(step_outcome(loss=1 + 4e-6), step_outcome(), step_outcome())[LOSS].passed
    assert not judged(step_outcome(loss=1 + 6e-6), step_outcome(), step_outcome())[LOSS].passed
    # Of choices a share of 5e-6 may come out otherwise: gradients move by its root.
    assert judged(step_outcome(weight=1 + 2e-3), step_outcome(), step_outcome())[WEIGHT].passed
    assert not judged(step_outcome(weight=1 + 3e-3), step_outcome(), step_outcome())[WEIGHT].passed
    assert judged(step_outcome(loss=1 + 4e-3), step_outcome(), step_outcome(), precision=Precision.BF16)[LOSS].passed


def test_errors_of_many_operations_add_up_as_their_squares_do():
    def one(loss, weight, operations):
        draw = Draw(step_outcome(weight, loss), step_outcome(), step_outcome())
        return {c.part: c.passed for c in compare(lambda _: draw, Reference.FLOAT64, Precision.FP32, None, operations)}

    assert one(1 + 1.9e-5, 1 + 4.4e-3, 16) == {Part.LOSS: True, Part.GRADIENT: True}
    assert one(1 + 2.1e-5, 1 + 4.6e-3, 16) == {Part.LOSS: False, Part.GRADIENT: False}


def test_without_float64_the_perturbed_step_is_the_measure():
    comparisons = judged(
        step_outcome(loss=1 + 1.9e-3), step_outcome(), step_outcome(loss=1 + 1e-3), Reference.PERTURBED
    )
    assert comparisons[LOSS].passed and comparisons[LOSS].yardstick == pytest.approx(1e-3)
    assert not judged(step_outcome(loss=1 + 2.1e-3), step_outcome(), step_outcome(loss=1 + 1e-3), Reference.PERTURBED)[
        LOSS
    ].passed


def test_a_tolerance_takes_the_place_of_the_rule():
    comparisons = judged(step_outcome(loss=1 + 2e-3), step_outcome(), None, Reference.NONE, tolerance=1e-3)
    assert not comparisons[LOSS].passed and comparisons[LOSS].limit == 1e-3 and comparisons[WEIGHT].passed
    assert judged(step_outcome(), step_outcome(), None, Reference.NONE, tolerance=0.0)[LOSS].passed


def test_tensors_that_the_undivided_step_leaves_open_are_not_judged():
    noise = (Part.GRADIENT, "bias")

    def with_bias(number):
        step = step_outcome()
        return Outcome("cpu", 1, {**step.tensors, noise: np.full(3, number)})

    comparisons = judged(with_bias(5.0), with_bias(-2.0), with_bias(1.0))
    assert comparisons[noise].passed and not comparisons[noise].is_conclusive
    # Unless it is not even a number.
    comparisons = judged(with_bias(math.nan), with_bias(-2.0), with_bias(1.0))
    assert not comparisons[noise].passed and comparisons[noise].is_conclusive


def test_a_step_of_nothing_but_rounding_is_refused():
    with pytest.raises(MbcError, match=r"MBC198: rounding errors in .* are as large as each gradient"):
        judged(step_outcome(), step_outcome(weight=2.0), step_outcome())


def test_a_failure_is_drawn_again_and_counts_only_in_every_draw():
    drawn = []

    def draw(losses):
        def one(number):
            drawn.append(number)
            return Draw(step_outcome(loss=losses[number]), step_outcome(), step_outcome())

        return one

    first, *_ = compare(draw([1.1, 1.0]), Reference.FLOAT64, Precision.FP32)
    assert drawn == [0, 1] and first.passed
    drawn.clear()
    first, *_ = compare(draw([1.1, 1.3, 1.2]), Reference.FLOAT64, Precision.FP32)
    assert drawn == [0, 1, 2] and not first.passed and first.name == "loss"
    assert first.error == pytest.approx(0.1)  # of its best draw


def test_the_worst_comes_first():
    errors = {"a": 1e-5, "b": 1e-2, "c": 1e-3}
    exact = Outcome("cpu", 1, {(Part.GRADIENT, name): np.ones(4) for name in errors})
    ours = Outcome("cpu", 1, {(Part.GRADIENT, name): np.full(4, 1 + error) for name, error in errors.items()})
    comparisons = compare(lambda _: Draw(ours, exact, exact), Reference.FLOAT64, Precision.FP32)
    assert [c.name for c in comparisons] == ["b", "c", "a"] and [c.passed for c in comparisons] == [False, True, True]


def steps(divided, precision, kind):
    whole = small_plan(precision)
    exact = small_plan("fp64")

    def draw(number):
        inputs = random_inputs(whole.graph, 0, number)
        third = (
            run_step(exact, "cpu", inputs, 0)
            if kind is Reference.FLOAT64
            else run_step(whole, "cpu", inputs, 0, weight_noise=rule.TOLERANCES[Precision(precision)])
        )
        return Draw(run_step(divided, "cpu", inputs, 0), run_step(whole, "cpu", inputs, 0), third)

    return compare(draw, kind, Precision(precision))


def lost_slice(plan):
    """Return the plan whose filter gradients keep their last slice only, because every launch overwrites."""
    launches = list(plan.train.launches)
    for index, launch in enumerate(launches):
        accesses = tuple(
            dataclasses.replace(a, mode=Mode.WRITE) if a.mode is Mode.ACCUMULATE else a for a in launch.accesses
        )
        launches[index] = dataclasses.replace(launch, accesses=accesses)
    broken = dataclasses.replace(plan, train=dataclasses.replace(plan.train, launches=tuple(launches)))
    assert broken != plan
    return broken


@pytest.mark.parametrize("kind", [Reference.FLOAT64, Reference.PERTURBED])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_divided_network_passes_and_one_that_loses_a_slice_fails(precision, kind):
    divided = small_plan(precision, 2)
    assert rule.passed(steps(divided, precision, kind))
    comparisons = steps(lost_slice(divided), precision, kind)
    failing = {c.name for c in comparisons if not c.passed}
    assert failing == {"first.weight", "second.weight"}

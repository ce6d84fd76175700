"""The gradient noise scale of a task whose noise is given."""

from __future__ import annotations

import numpy as np
import pytest

from mbc.tune.noise_scale import GradientMoments, RunningMoments, efficiency, gain, moments

TRUE = np.linspace(-1, 1, 40)
DEVIATION = 3.0
SCALE = DEVIATION**2 * TRUE.size / float(TRUE @ TRUE)


def _measured(seed, part_rows, parts, steps=400):
    generator, running = np.random.default_rng(seed), RunningMoments(decay=0.998)
    for _ in range(steps):
        gradients = TRUE + generator.normal(0, DEVIATION / part_rows**0.5, (parts, TRUE.size))
        mean = gradients.mean(axis=0)
        running = running.after(moments(part_rows, parts, float((gradients**2).sum(axis=1).mean()), float(mean @ mean)))
    assert running.mean is not None
    return running.mean


@pytest.mark.parametrize(("part_rows", "parts"), [(8, 2), (16, 4), (64, 2)])
def test_it_is_that_of_the_task(part_rows, parts):
    for seed in range(3):
        estimate = _measured(seed, part_rows, parts)
        assert estimate.noise == pytest.approx(DEVIATION**2 * TRUE.size, rel=0.1)
        assert estimate.noise_scale == pytest.approx(SCALE, rel=0.2)


def test_two_steps_are_the_differenced_estimator():
    one, other = np.array([1.0, 2.0, -1.0]), np.array([0.5, 2.5, 1.0])
    mean = (one + other) / 2
    estimate = moments(8, 2, float(one @ one + other @ other) / 2, float(mean @ mean))
    difference = one - other
    assert estimate.noise == pytest.approx(8 * float(difference @ difference) / 2)
    assert estimate.signal == pytest.approx(float(one @ other)), "whose noises are independent"


def test_requests_that_cannot_be_measured():
    assert GradientMoments(-0.1, 2.0).noise_scale is None
    assert RunningMoments().mean is None
    for part_rows, parts in ((8, 1), (0, 2)):
        with pytest.raises(ValueError, match="two parts or more"):
            moments(part_rows, parts, 1.0, 1.0)


def test_the_first_steps_are_not_drawn_towards_zero():
    mean = RunningMoments().after(GradientMoments(2.0, 6.0)).mean
    assert mean is not None and mean.noise_scale == pytest.approx(3.0) and mean.signal == pytest.approx(2.0)


def test_efficiency_and_gain():
    assert efficiency(100, 32, 32) == gain(100, 32, 32) == 1
    assert efficiency(100, 32, 164) == pytest.approx(0.5)
    assert gain(0, 32, 128) == 1 and gain(1e12, 32, 128) == pytest.approx(4)

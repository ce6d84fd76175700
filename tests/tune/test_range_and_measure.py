"""The range test on a loss with a given best rate, and the noise scale of a task with given noise."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.ir.metrics import MEAN_SQUARE, PART_SQUARE
from mbc.tune import tuner
from mbc.tune.measured_noise import Meter, Parts, check_halves, moments_of
from mbc.tune.range_test import BELOW_LOWEST, range_test, rates_of_test
from mbc.tune.tuner import NOISE_STEPS, RANGE_STEPS, find_rate, spending
from mbc.tune.tuning_file import State


def _quadratic(curvature: float):
    """Return a step of gradient descent on `curvature / 2 * w^2`, which diverges above a rate of `2 / curvature`."""
    w = 1.0

    def step(rate: float) -> float:
        nonlocal w
        loss = curvature / 2 * w * w
        w -= rate * curvature * w
        return loss

    return step


@pytest.mark.parametrize("curvature", [5.0, 50.0])
def test_the_rate_is_below_that_of_divergence(curvature):
    tested = range_test(_quadratic(curvature), rates_of_test(1.0, 60))
    assert 2 / curvature / 20 < tested.chosen < 2 / curvature
    assert tested.chosen == pytest.approx(tested.rates[int(np.argmin(tested.losses))] / BELOW_LOWEST)
    assert len(tested.rates) == len(tested.losses)


def test_it_ends_where_the_loss_diverges():
    asked: list[float] = []
    step = _quadratic(1e2)
    range_test(lambda rate: (asked.append(rate), step(rate))[1], rates_of_test(1.0, 60))
    assert len(asked) < 60


def test_where_no_rate_will_do():
    with pytest.raises(MbcError, match=r"MBC313: the range test finds no learning rate.*diverges at 0\.01"):
        range_test(lambda rate: math.nan, rates_of_test(1.0, 20))
    with pytest.raises(MbcError, match=r"MBC313: .*the loss falls at no rate from 0\.01 to 10"):
        range_test(lambda rate: 1.0, rates_of_test(1.0, 20))


def _measured(steps: int, deviation: float, loss_scale: float = 1.0) -> Meter:
    generator, true, parts = np.random.default_rng(1), np.linspace(-1, 1, 50), Parts(16, 2)
    meter = Meter(steps)
    for step in range(steps):
        gradients = loss_scale * (true + generator.normal(0, deviation / parts.rows**0.5, (parts.count, true.size)))
        mean = gradients.mean(axis=0)
        metrics = {PART_SQUARE: float((gradients**2).sum(axis=1).mean()), MEAN_SQUARE: float(mean @ mean)}
        meter.add(step, moments_of(metrics, parts, loss_scale))
    return meter


def test_the_noise_scale_is_that_of_the_task():
    true = float(np.linspace(-1, 1, 50) @ np.linspace(-1, 1, 50))
    measured = _measured(200, 2.0).result()
    assert measured.value == pytest.approx(4 * 50 / true, rel=0.2) and len(measured.history) == 180
    assert measured == pytest.approx(measured) and _measured(200, 2.0, 65536.0).result().noise == pytest.approx(
        measured.noise
    )


def test_noise_that_is_not_measurable():
    meter = Meter(10)
    for step in range(10):
        meter.add(step, moments_of({PART_SQUARE: 2.0, MEAN_SQUARE: 0.5}, Parts(1, 2)))
    with pytest.raises(MbcError, match=r"MBC312: the noise scale .* not measurable: its gradients do not rise above"):
        meter.result()
    blind = Meter(10)
    blind.add(5, moments_of({PART_SQUARE: math.inf, MEAN_SQUARE: 1.0}, Parts(1, 2)))
    with pytest.raises(MbcError, match=r"MBC312: .*not measurable: no gradient is finite"):
        blind.result()
    assert check_halves(9) == 4
    with pytest.raises(MbcError, match=r"MBC312: .*a mini-batch of one row cannot be halved"):
        check_halves(1)


def test_steps_stay_within_their_share():
    for rows, share in ((64_000, 0.25), (6_400, 0.5), (10**7, 0.01)):
        planned = spending(rows, 64, 10, share, True, True)
        assert planned.range_steps + planned.noise_steps <= share * planned.training and planned.share <= share
        assert planned.range_steps <= RANGE_STEPS and planned.noise_steps <= NOISE_STEPS
    assert spending(6_400, 64, 1, 0.01, False, False).share == 0
    with pytest.raises(MbcError, match="MBC311: the data hold 10 rows, fewer than one step of the base batch"):
        spending(10, 64, 10, 0.5, True, True)
    with pytest.raises(MbcError, match=r"MBC314: 0\.01 of the training are 1 steps, too few for tuning"):
        spending(640, 64, 10, 0.01, True, True)


def _of_curvatures(monkeypatch, tmp_path, steps: int, *curvatures: float):
    """Return the rate that the range test finds if each opened network has the next curvature."""
    monkeypatch.setattr(tuner, "steps_of", lambda graph, data, seed: itertools.repeat(()))
    left, opened = iter(curvatures), []

    class Net:
        def __init__(self) -> None:
            self._step = _quadratic(next(left))
            opened.append(self)

        def step(self, lr: float) -> float:
            return self._step(lr)

    state = State({}, tmp_path / "state.json")
    graph = SimpleNamespace(optimizer=SimpleNamespace(kind="sgd"))
    find_rate(Net, graph, None, 0, state, steps)  # pyright: ignore[reportArgumentType]
    assert state.range_test is not None
    return state.range_test.chosen, len(opened)


def test_the_median_of_several_range_tests_counts(monkeypatch, tmp_path):
    alone = [_of_curvatures(monkeypatch, tmp_path, 33, c)[0] for c in (5.0, 20.0, 80.0)]
    assert alone == sorted(alone, reverse=True) and len(set(alone)) == 3
    assert _of_curvatures(monkeypatch, tmp_path, 99, 80.0, 5.0, 20.0) == (alone[1], 3)
    assert _of_curvatures(monkeypatch, tmp_path, 66, 5.0, 80.0) == (alone[2], 2)  # of two the lower
    # Too few steps for several, and tests that find nothing.
    assert _of_curvatures(monkeypatch, tmp_path, 63, 5.0)[1] == 1
    assert _of_curvatures(monkeypatch, tmp_path, 99, math.nan, 5.0, math.nan) == (alone[0], 3)
    with pytest.raises(MbcError, match="MBC313"):
        _of_curvatures(monkeypatch, tmp_path, 99, math.nan, math.nan, math.nan)

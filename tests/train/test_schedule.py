"""The learning rate: closed forms, and the values of torch.optim.lr_scheduler if PyTorch is installed."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.train.data import ArrayData
from mbc.train.epoch_figures import Criterion
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Plateau, Schedule
from mbc.train.training_checkpoint import read_progress

EPOCHS, STEPS = 10, 7  # steps of an epoch


def rates(schedule: Schedule) -> list[float]:
    return [schedule.at(step / STEPS, 1 / STEPS, step) for step in range(schedule.epochs * STEPS)]


def test_closed_forms():
    assert Schedule(0.4, 10).at(9.9) == 0.4
    cosine = Schedule(0.4, 10, "cosine")
    assert cosine.at(0) == 0.4 and math.isclose(cosine.at(5), 0.2) and abs(cosine.at(10)) < 1e-12
    step = Schedule(0.4, 10, "step", every_epochs=3, factor=0.5)
    assert [step.at(e) for e in (0, 2.9, 3, 6)] == [0.4, 0.4, 0.2, 0.1]
    assert Schedule(0.4, 10, warmup_epochs=2).at(1) == 0.2
    steps = Schedule(0.4, 10, "multi-step", milestones=(3, 4.5), factor=0.5)
    assert [steps.at(e) for e in (0, 2.9, 3, 4.4, 4.5)] == [0.4, 0.4, 0.2, 0.2, 0.1]
    poly = Schedule(0.4, 10, "poly", power=2)
    assert [poly.at(e) for e in (0, 5, 10)] == [0.4, 0.1, 0]
    assert Schedule(0.4, 10, lambda step: 0.5**step).at(0.3, 0.1, steps=3) == 0.05


def test_one_cycle():
    whole = rates(Schedule(0.4, 10, "one-cycle"))
    assert math.isclose(whole[0], 0.4 / 25) and math.isclose(whole[-1], 0.4 / 25 / 1e4)
    assert whole[20] == 0.4 and whole[:21] == sorted(whole[:21]) and whole[20:] == sorted(whole[20:], reverse=True)
    early = rates(Schedule(0.4, 10, "one-cycle", warmup_epochs=1))
    assert early.index(max(early)) == 6
    assert Schedule(0.4, 1, "one-cycle").at(0, 1.0) > 0


def test_plateau():
    schedule = Schedule(1.0, 10, "plateau", patience=1, factor=0.5)
    plateau = Plateau()
    scales = []
    for loss in (2.0, 1.0, 1.0, 0.99995, 0.9, 0.9, 0.9):  # 0.99995 is no more than a rounding better
        plateau = plateau.after(loss, Criterion("loss", rises=False), schedule)
        scales.append(plateau.scale)
    assert scales == [1, 1, 1, 0.5, 0.5, 0.5, 0.25] and plateau == Plateau(0.9, 0, 0.25, "loss")


@pytest.mark.parametrize(
    ("settings", "of_torch"),
    [
        ({"kind": "cosine"}, lambda s, o: s.CosineAnnealingLR(o, EPOCHS * STEPS)),
        ({"kind": "step", "every_epochs": 3}, lambda s, o: s.StepLR(o, 3 * STEPS)),
        (
            {"kind": "multi-step", "milestones": (2, 5, 9), "factor": 0.3},
            lambda s, o: s.MultiStepLR(o, [2 * STEPS, 5 * STEPS, 9 * STEPS], 0.3),
        ),
        ({"kind": "poly", "power": 0.9}, lambda s, o: s.PolynomialLR(o, EPOCHS * STEPS, 0.9)),
        ({"kind": "one-cycle"}, lambda s, o: s.OneCycleLR(o, 0.3, EPOCHS * STEPS)),
        ({"kind": "one-cycle", "warmup_epochs": 4}, lambda s, o: s.OneCycleLR(o, 0.3, EPOCHS * STEPS, pct_start=0.4)),
        ({"kind": lambda step: 0.9**step}, lambda s, o: s.LambdaLR(o, lambda step: 0.9**step)),
    ],
)
def test_the_values_are_those_of_pytorch(settings, of_torch):
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3, momentum=0.9)
    expected = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer takes no steps
        scheduler = of_torch(torch.optim.lr_scheduler, optimizer)
        for _ in range(EPOCHS * STEPS):
            expected.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    np.testing.assert_allclose(rates(Schedule(0.3, EPOCHS, **settings)), expected, rtol=1e-11)


@pytest.mark.parametrize("rises", [False, True])
@pytest.mark.parametrize("patience", [0, 2])
def test_plateaus_are_those_of_pytorch(rises, patience):
    torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max" if rises else "min", 0.02, patience)
    schedule, plateau = Schedule(0.3, 60, "plateau", factor=0.02, patience=patience), Plateau()
    for value in np.random.default_rng(patience).uniform(0.5, 1, 60):
        scheduler.step(value)
        plateau = plateau.after(value, Criterion("some", rises), schedule)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule.rate * plateau.scale, rel=1e-12)
    assert plateau.scale < 1e-6


@pytest.mark.parametrize(("metric", "falls"), [(None, True), ("test-accuracy", True), ("loss", False)])
def test_a_training_lowers_the_rate_on_a_plateau(regression, graph, rows, metric, falls):
    data = ArrayData(rows)
    schedule = Schedule(0.5, 4, "plateau", patience=0, metric=metric)
    history = train(regression, Job(graph, data, schedule, data))
    assert [epoch.test_accuracy for epoch in history] == [1.0] * 4
    expected = [0.5, 0.5, 0.05, 0.005] if falls else [0.5] * 4
    assert [epoch.learning_rate for epoch in history] == pytest.approx(expected)


def test_a_plateau_is_resumed_with_its_metric(regression, graph, rows, tmp_path):
    data, file = ArrayData(rows), tmp_path / "c"
    job = Job(graph, data, Schedule(0.5, 2, "plateau", patience=0, metric="loss"), data, checkpoint=file)
    train(regression, job)
    assert read_progress(file).plateau.metric == "loss"
    # With test data the default is another metric, of which no value is better than that loss.
    other = dataclasses.replace(job, resume=file, schedule=Schedule(0.5, 4, "plateau", patience=0))
    before = regression.weights.copy(), file.read_bytes()
    with pytest.raises(MbcError, match="made with a plateau of the metric 'loss', not 'test-accuracy'") as no:
        train(regression, other)
    assert no.value.code == "MBC182" and "--plateau-metric loss" in no.value.remedy
    assert (regression.weights == before[0]).all() and file.read_bytes() == before[1]
    train(regression, dataclasses.replace(other, schedule=dataclasses.replace(other.schedule, metric="loss")))
    train(regression, dataclasses.replace(other, schedule=Schedule(0.5, 5, "cosine")))


def test_a_plateau_of_an_earlier_version_is_resumed(regression, graph, rows, tmp_path):
    data, file = ArrayData(rows), tmp_path / "c"
    job = Job(graph, data, Schedule(0.5, 2, "plateau", metric="loss"), checkpoint=file)
    train(regression, job)
    progress = dataclasses.asdict(read_progress(file))
    del progress["plateau"]["metric"]  # which it did not record
    regression.save(file, metadata={"mbc.training": json.dumps(progress)})
    more = dataclasses.replace(job, resume=file, schedule=dataclasses.replace(job.schedule, epochs=3))
    assert [epoch.epoch for epoch in train(regression, more)] == [3]
    assert read_progress(file).plateau.metric == "loss"


def test_a_training_takes_a_function_of_the_step(regression, graph, rows):
    train(regression, Job(graph, ArrayData(rows), Schedule(0.5, 2, lambda step: 1 / (1 + step))))
    assert regression.rates == [0.5 / (1 + step) for step in range(14)]


def test_a_plateau_of_an_unknown_metric(regression, graph, rows):
    job = Job(graph, ArrayData(rows), Schedule(0.5, 2, "plateau", metric="test-accuracy"))
    with pytest.raises(
        MbcError, match="'test-accuracy' is not available: there are no test data\nhelp: give --test"
    ) as no:
        train(regression, job)
    assert no.value.code == "MBC237"
    job = Job(dataclasses.replace(graph, train=()), job.data, Schedule(0.5, 2, "plateau", metric="accuracy"))
    with pytest.raises(MbcError, match="'accuracy' is not available: the network does not classify") as no:
        train(regression, job)
    assert no.value.code == "MBC237" and regression.rates == []
    with pytest.raises(
        MbcError, match="'speed' is not available\nhelp: use one of loss, accuracy, test-accuracy"
    ) as no:
        train(regression, dataclasses.replace(job, graph=graph, best_metric="speed"))
    assert no.value.code == "MBC237" and regression.rates == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "a learning rate of 0 is not a number above 0\nhelp: give one as --lr 0.01 "),
        ({"rate": math.nan}, "a learning rate of nan is not a number above 0"),
        ({"kind": "linear"}, "there is no schedule 'linear'\nhelp: choose one of constant, cosine, step, multi-step, "),
        ({"epochs": 0}, "0 epochs are not above 0"),
        ({"warmup_epochs": 11.0}, "a warm-up of 11.0 epochs"),
        ({"every_epochs": 0.0}, "every 0.0 epochs"),
        ({"factor": 2.0}, "a factor of 2.0"),
        (
            {"kind": "multi-step"},
            "the schedule multi-step has no milestones\nhelp: give the epochs .* --milestones 30,",
        ),
        ({"milestones": (3.0, 2.0)}, "the milestones 3, 2 are not rising numbers above 0"),
        ({"milestones": (1.0, float("nan"), 2.0)}, "the milestones 1, nan, 2 are not rising numbers above 0"),
        ({"milestones": (1.0, float("inf"))}, "the milestones 1, inf are not rising numbers above 0"),
        ({"milestones": (0.0,)}, "the milestones 0 are not rising numbers above 0"),
        ({"power": 0.0}, "a power of 0.0 is not a number above 0"),
        ({"patience": -1}, "a patience of -1 epochs is below 0"),
    ],
)
def test_schedules_that_make_no_sense(settings, message):
    with pytest.raises(MbcError, match=message) as caught:
        Schedule(**{"rate": 0.1, "epochs": 10, **settings})
    assert caught.value.code == "MBC170"

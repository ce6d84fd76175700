"""A value of a metric at which a training ends: when it is reached, the message if it is not, and resuming."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mbc.errors import MbcError
from mbc.runtime.checkpoint import Checkpoint, write_checkpoint
from mbc.train.data import ArrayData
from mbc.train.epoch import Epoch
from mbc.train.epoch_figures import Criterion
from mbc.train.job import Job
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.target_metric import Target, TargetMissed, target_for
from mbc.train.training_checkpoint import Best, Progress, read_progress, save_checkpoint


def finished(epoch, loss):
    return Epoch(epoch, 3, 1, loss, None, None, 0.1, 8, 1.0, 0, 0)


@pytest.mark.parametrize(
    ("rises", "values", "nearest", "reached"),
    [
        (False, (0.5, 0.2, 0.3), Best("loss", 0.2, 2), True),
        (False, (0.5, 0.21, 0.3), Best("loss", 0.21, 2), False),
        (True, (0.1, 0.2, 0.15), Best("loss", 0.2, 2), True),
        (True, (0.1, 0.19, 0.19), Best("loss", 0.19, 2), False),
        (True, (float("nan"), 0.1), Best("loss", 0.1, 2), False),
    ],
)
def test_the_nearest_epoch_and_whether_it_reaches(rises, values, nearest, reached):
    target, nearest_so_far = Target(Criterion("loss", rises), 0.2), None
    for epoch, value in enumerate(values, 1):
        nearest_so_far = target.nearest(nearest_so_far, finished(epoch, value))
    assert nearest_so_far == nearest and target.is_reached(nearest_so_far) == reached
    assert not target.is_reached(None) and not target.is_reached(Best("accuracy", nearest.value, 1))


def test_accuracy_is_of_test_data_where_there_are_any(graph):
    assert target_for(("accuracy", 0.9), graph, tested=True).by.name == "test-accuracy"
    assert target_for(("accuracy", 0.9), graph, tested=False).by.name == "accuracy"
    assert target_for(("loss", 0.1), graph, tested=True).by == Criterion("loss", rises=False)
    with pytest.raises(MbcError, match="MBC237: 'iou' is not available"):
        target_for(("iou", 0.9), graph, tested=True)


def losses(history):
    return [epoch.loss for epoch in history]


def test_a_training_ends_with_the_first_epoch_that_reaches_it(regression, graph, rows, tmp_path):
    job = Job(graph, ArrayData(rows), Schedule(0.1, 6), seed=7)
    whole = losses(train(type(regression)(), job))
    wanted = dataclasses.replace(job, target=("loss", whole[2]), checkpoint=tmp_path / "c")
    reported = []
    history = train(regression, dataclasses.replace(wanted, stop=lambda: len(reported) == 3), on_epoch=reported.append)
    assert losses(history) == whole[:3] and history == tuple(reported)
    progress = read_progress(tmp_path / "c")
    assert (progress.epochs, progress.nearest) == (3, Best("loss", whole[2], 3))

    # Once more it has nothing to do; a nearer target is trained to from there.
    assert train(regression, dataclasses.replace(wanted, resume=tmp_path / "c")) == ()
    nearer = dataclasses.replace(wanted, resume=tmp_path / "c", target=("loss", whole[4]))
    assert losses(train(regression, nearer)) == whole[3:5]


def test_a_target_that_is_not_reached(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    job = Job(graph, ArrayData(rows), Schedule(0.1, 2), seed=7, checkpoint=file, target=("loss", 0.001))
    with pytest.raises(TargetMissed) as caught:
        train(regression, job)
    assert caught.value.code == "MBC318" and len(caught.value.history) == 2
    best = caught.value.history[1].loss
    assert caught.value.message == f"loss 0.001 is not reached in 2 epochs: the best is {best:.4f}, after epoch 2"
    assert read_progress(file).epochs == 2, "the weights are kept"

    # The best of all its epochs is also reported after a resume.
    spoilt = dataclasses.replace(read_progress(file), nearest=Best("loss", 0.0017, 1))
    save_checkpoint(regression, file, spoilt)
    more = dataclasses.replace(job, resume=file, schedule=Schedule(0.1, 3))
    with pytest.raises(TargetMissed, match=r"in 3 epochs: the best is 0\.0017, after epoch 1\n"):
        train(regression, more)


def test_an_epoch_counts_whose_weights_are_there(regression, graph, rows, tmp_path):
    """Only an epoch whose weights still exist counts. An earlier epoch that reached a target has been trained over."""
    file = tmp_path / "c"
    job = Job(graph, ArrayData(rows), Schedule(0.1, 2), seed=7, checkpoint=file, target=("loss", 0.001))
    with pytest.raises(TargetMissed):
        train(regression, job)
    earlier = dataclasses.replace(read_progress(file), nearest=Best("loss", 0.0005, 1))
    save_checkpoint(regression, file, earlier)
    more = dataclasses.replace(job, resume=file, schedule=Schedule(0.1, 3))
    with pytest.raises(TargetMissed, match=r"after epoch 1, whose weights later epochs have replaced\n") as caught:
        train(regression, more)
    assert len(caught.value.history) == 1
    train(regression, dataclasses.replace(more, target=None, schedule=Schedule(0.1, 4)))
    assert read_progress(file).nearest is None


def test_a_checkpoint_that_knows_of_no_target(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    job = Job(graph, ArrayData(rows), Schedule(0.1, 2), seed=7, checkpoint=file)
    train(regression, job)
    wanted = dataclasses.replace(job, resume=file, target=("loss", 10.0))
    with pytest.raises(TargetMissed, match="loss 10 is not reached in 2 epochs: no epoch is left in") as caught:
        train(regression, wanted)
    assert caught.value.history == ()
    assert len(train(regression, dataclasses.replace(wanted, schedule=Schedule(0.1, 4)))) == 1


def test_a_checkpoint_of_an_earlier_version_keeps_its_best_epoch(regression, tmp_path):
    save_checkpoint(regression, tmp_path / "c", Progress(2, 14, 7, 8, best=Best("loss", 0.5, 2)))
    document = json.loads(Checkpoint(tmp_path / "c").metadata["mbc.training"])
    del document["best"]["epoch"], document["nearest"]
    write_checkpoint(tmp_path / "c", [("w", regression.weights)], {"mbc.training": json.dumps(document)})
    assert read_progress(tmp_path / "c") == Progress(2, 14, 7, 8, best=Best("loss", 0.5))

"""Checkpoints within an epoch, best checkpoints, and stopping: a training resumed from any of them has equal bits."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.train import epoch_run
from mbc.train.accuracy import inputs_of
from mbc.train.data import ArrayData
from mbc.train.job import Job
from mbc.train.loader import IterableData
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.share import whole_batch
from mbc.train.training_checkpoint import best_beside, load_checkpoint, read_progress
from tests.train.epochs import timeless


def functions(rows, graph):
    """Return data of a function that yields the rows in batches of 9, in another order in each epoch."""

    def batches(epoch):
        x, y = (array[np.random.default_rng(epoch).permutation(len(array))] for array in rows)
        for start in range(0, len(x), 9):
            yield x[start : start + 9], y[start : start + 9]

    return IterableData(batches, inputs_of(graph), "test")


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 12, 20])
@pytest.mark.parametrize("kind", ["cosine", "plateau", "function"])
@pytest.mark.parametrize("of_function", [False, True])
def test_a_stopped_training_ends_with_the_same_bits(regression, graph, rows, tmp_path, stop, kind, of_function):
    data, file = functions(rows, graph) if of_function else ArrayData(rows), tmp_path / "c"
    schedule = Schedule(
        0.3, 3, (lambda step: 0.9**step) if kind == "function" else kind, patience=0, factor=0.5, metric="loss"
    )
    job = Job(graph, data, schedule, data, seed=7)
    whole, broken_off = copy.deepcopy(regression), copy.deepcopy(regression)
    whole.poison_at = broken_off.poison_at = 5
    history = train(whole, job)
    reported = []
    with pytest.raises(KeyboardInterrupt):
        stopped = dataclasses.replace(job, checkpoint=file, stop=lambda: len(broken_off.rates) >= stop)
        train(broken_off, stopped, on_epoch=reported.append)
    assert len(broken_off.rates) == stop
    regression.poison_at, regression.skipped = 5 - stop, broken_off.skipped  # a module's checkpoint has the count
    resumed = train(regression, dataclasses.replace(job, resume=file))
    assert [*map(timeless, [*reported, *resumed])] == [*map(timeless, history)]
    assert broken_off.rates + regression.rates == whole.rates
    np.testing.assert_array_equal(regression.weights, whole.weights)


@pytest.mark.parametrize("every", [3, 7, 100])
def test_checkpoints_within_epochs(regression, graph, rows, tmp_path, monkeypatch, every):
    saved = []
    monkeypatch.setattr(epoch_run, "save_checkpoint", lambda net, path, progress: saved.append(copy.deepcopy(progress)))
    train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 2), checkpoint=tmp_path / "c", checkpoint_every=every))
    steps = [one.steps + (0 if one.running is None else one.running.steps) for one in saved]
    # After the last step of an epoch there is the checkpoint of the epoch.
    assert steps == sorted({7, 14} | {step for step in range(every, 14, every) if step % 7})
    assert [one.running is None for one in saved] == [step % 7 == 0 for step in steps]


def test_a_loss_is_seen_before_it_is_saved(regression, graph, rows, tmp_path):
    train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1), checkpoint=tmp_path / "c", checkpoint_every=3))
    assert regression.looked == [2, 3, 3, 5, 6, 6, 7]


def test_divergence_within_an_epoch_replaces_no_checkpoint(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    regression.spoil_at = 12  # the fifth step of the second epoch
    with pytest.raises(MbcError) as caught:
        job = Job(graph, ArrayData(rows), Schedule(0.1, 3), checkpoint=file, checkpoint_every=1)
        train(regression, job)
    assert caught.value.code == "MBC231"
    assert f"'{file}' is left as it was after its step 4" in caught.value.message
    progress = read_progress(file)
    assert progress.running is not None and (progress.epochs, progress.running.steps) == (1, 4)
    load_checkpoint(regression, file)
    assert np.isfinite(regression.weights).all()


@pytest.mark.parametrize("data_kind", ["arrays", "function"])
def test_parts_behind_the_first_ones(graph, rows, data_kind):
    data = ArrayData(rows) if data_kind == "arrays" else functions(rows, graph)
    whole = [*data.shuffled(whole_batch(8), 5, 2)]
    assert len(whole) == 8
    for after in (1, 7, 8) if data_kind == "arrays" else (1, 7):  # the eighth is not whole: no step was taken with it
        behind = [*data.shuffled(whole_batch(8), 5, 2, after)]
        assert len(behind) == 8 - after
        for one, other in zip(behind, whole[after:], strict=True):
            np.testing.assert_array_equal(one.arrays[0], other.arrays[0])


def test_data_that_have_become_fewer(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    job = Job(graph, ArrayData(rows), Schedule(0.1, 1), checkpoint=file, stop=lambda: len(regression.rates) == 5)
    with pytest.raises(KeyboardInterrupt):
        train(regression, job)
    fewer = ArrayData(tuple(array[:39] for array in rows))
    with pytest.raises(
        MbcError, match="was written after step 5 of an epoch, but one epoch of the data has only 4"
    ) as caught:
        train(regression, Job(graph, fewer, Schedule(0.1, 1), resume=file))
    assert caught.value.code == "MBC182"


@pytest.mark.parametrize("of_one_rank", [False, True])
@pytest.mark.parametrize("left", [0, 24, 39, 40])
def test_a_function_that_yields_less_than_before(regression, graph, rows, tmp_path, left, of_one_rank):
    """The checkpoint was written after step 5, which is after 40 rows; the epoch had 56 rows."""

    def of(count):
        def all_rows():
            return [tuple(array[:count] for array in rows)] if count else []

        def of_rank(rank):
            return all_rows()

        return IterableData(of_rank if of_one_rank else all_rows, inputs_of(graph), "test")

    file = tmp_path / "c"
    job = Job(graph, of(61), Schedule(0.1, 1), checkpoint=file, stop=lambda: len(regression.rates) == 5)
    with pytest.raises(KeyboardInterrupt):
        train(regression, job)
    resumed = Job(graph, of(left), Schedule(0.1, 1), resume=file)
    if left == 40:
        assert [epoch.steps for epoch in train(regression, resumed)] == [5]
        return
    with pytest.raises(MbcError) as caught:
        train(regression, resumed)
    if left == 0:
        assert caught.value.code == "MBC233"
        return
    words = f"the checkpoint was written after step 5 of an epoch, but test yields only {left // 8} mini-batches"
    assert caught.value.code == "MBC182" and words in caught.value.message
    assert len(regression.rates) == 5


@pytest.mark.parametrize(("metric", "best"), [("loss", 2), (None, 1)])  # the accuracy on test data is 1 from the start
def test_the_best_checkpoint_is_kept(regression, graph, rows, tmp_path, metric, best):
    file = tmp_path / "w.safetensors"
    data = ArrayData(rows)

    def rate(step):  # from the third epoch on it climbs
        return 1.0 if step < 14 else -5.0

    job = Job(graph, data, Schedule(0.3, 3, rate), data, checkpoint=file, best=best_beside(file), best_metric=metric)
    assert job.best is not None and job.best.name == "w.best.safetensors"
    states = []
    history = train(regression, job, on_epoch=lambda _: states.append(regression.weights.copy()))
    kept, last = read_progress(job.best), read_progress(file)
    assert (kept.epochs, last.epochs) == (best, 3) and kept.best == last.best is not None
    assert last.best is not None
    assert last.best.value == (min(epoch.loss for epoch in history) if metric else 1.0)
    load_checkpoint(regression, job.best)
    np.testing.assert_array_equal(regression.weights, states[best - 1])

    # A training that continues has it.
    load_checkpoint(regression, file)
    worse = dataclasses.replace(job, resume=file, schedule=dataclasses.replace(job.schedule, epochs=4))
    before = job.best.read_bytes()
    train(regression, worse)
    assert job.best.read_bytes() == before
    # One that is gone is written again.
    job.best.unlink()
    train(regression, dataclasses.replace(worse, schedule=dataclasses.replace(job.schedule, epochs=5)))
    assert read_progress(job.best).epochs == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.best.safetensors", "w.safetensors"]

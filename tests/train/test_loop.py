"""The training loop: accuracy, dropped rows, exact resume, and the learning rate of each step."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc.errors import MbcError
from mbc.train import epoch_run
from mbc.train.accuracy import inputs_of, judged
from mbc.train.data import ArrayData
from mbc.train.evaluation import evaluate_on
from mbc.train.job import Job
from mbc.train.loader import IterableData
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.share import whole_batch
from mbc.train.training_checkpoint import Progress, load_checkpoint, read_progress, save_checkpoint


def test_training_learns_and_reports(regression, graph, rows):
    data = ArrayData(rows)
    steps = []
    history = train(regression, Job(graph, data, Schedule(0.5, 6), data, seed=1), steps.append)
    assert [e.epoch for e in history] == [1, 2, 3, 4, 5, 6]
    assert all(e.steps == 7 and e.rows == 56 and e.dropped_rows == 5 and e.bad_steps == 0 for e in history)
    assert history[-1].loss < history[0].loss
    assert history[-1].test_accuracy == 1.0
    assert len(steps) == 42 and steps[8].epoch == 2 and steps[8].steps == 2 and steps[8].steps_in_epoch == 7


def test_partial_last_batch_is_tested(regression, graph, rows):
    x, y = rows
    regression.weights[:] = 0  # every row is called class 0
    assert evaluate_on(regression, graph, ArrayData((x, y))).accuracy == np.mean(y == 0)


def test_network_that_does_not_classify_has_no_accuracy(graph):
    assert judged(dataclasses.replace(graph, train=())) is None
    pair = judged(graph)
    assert pair is not None and pair.target == 1


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("kind", ["constant", "cosine", "plateau"])
def test_resumed_training_gives_the_same_bits(regression, graph, rows, tmp_path, stop, kind):
    reported = []
    data = ArrayData(rows)
    schedule = Schedule(0.3, 4, kind, warmup_epochs=1.5, patience=0, factor=0.5)
    job = Job(graph, data, schedule, data, seed=7)
    whole = copy.deepcopy(regression)
    history = train(whole, job)
    # The accuracy on test data stays at 1 from the first epoch on.
    assert (history[-1].learning_rate < history[-2].learning_rate) == (kind != "constant")

    file = tmp_path / "checkpoint.safetensors"
    broken_off = copy.deepcopy(regression)
    with pytest.raises(KeyboardInterrupt):
        stopped = dataclasses.replace(job, checkpoint=file, stop=lambda: len(reported) == stop)
        train(broken_off, stopped, on_epoch=reported.append)
    progress = read_progress(file)
    assert (progress.epochs, progress.steps, progress.seed, progress.batch) == (stop, 7 * stop, 7, 8)
    history = train(regression, dataclasses.replace(job, checkpoint=file, resume=file))

    assert [e.epoch for e in history] == list(range(stop + 1, 5))
    np.testing.assert_array_equal(regression.weights, whole.weights)
    assert broken_off.rates + regression.rates == whole.rates
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_epochs_differ_in_their_order_and_seeds_too(rows):
    data = ArrayData(rows)

    def first(seed, epoch):
        return next(data.shuffled(whole_batch(8), seed, epoch)).arrays[0]

    assert not np.array_equal(first(0, 0), first(0, 1))
    assert not np.array_equal(first(0, 0), first(1, 0))
    np.testing.assert_array_equal(first(5, 3), first(5, 3))


def test_every_row_comes_once_an_epoch(rows):
    seen = np.concatenate([part.arrays[0] for part in ArrayData(rows).shuffled(whole_batch(8), 0, 0)])
    assert sorted(map(tuple, seen)) == sorted(map(tuple, rows[0]))


def test_unknown_length_changes_the_rate_by_the_epoch(regression, graph, rows):
    x, y = rows
    data = IterableData(lambda: iter([(x, y)]), inputs_of(graph), "test")
    train(regression, Job(graph, data, Schedule(1.0, 2, "cosine")))
    assert len(set(regression.rates[:7])) == len(set(regression.rates[7:])) == 1
    assert regression.rates[0] > regression.rates[-1] > 0


def test_a_loss_is_looked_at_when_the_next_step_is_on_its_way(regression, graph, rows):
    train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))
    assert regression.looked == [2, 3, 4, 5, 6, 7, 7]


def test_too_few_rows(regression, graph, rows):
    x, y = rows
    with pytest.raises(MbcError) as caught:
        train(regression, Job(graph, ArrayData((x[:5], y[:5])), Schedule(0.1, 1)))
    assert caught.value.code == "MBC177"
    assert "the data hold 5 rows, fewer than one mini-batch of 8" in str(caught.value)
    assert "--set batch=5" in str(caught.value)


def test_losses_that_are_not_finite(regression, graph, rows):
    regression.poison = True
    with pytest.raises(MbcError) as caught:
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))
    assert caught.value.code == "MBC178"
    assert "no loss of epoch 1 is finite, so nothing was learned in it\n" in str(caught.value)


def test_a_loss_that_is_not_finite_is_reported_with_its_step(regression, graph, rows):
    regression.poison_at = 3
    (epoch,) = train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))
    assert (epoch.bad_steps, epoch.first_bad_step, epoch.bad_states) == (1, 3, ())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({20}, None),
        (set(range(8, 18)), None),
        (set(range(8, 19)), "11 of its 100 steps had a loss that is not finite, the first is step 8; up to 10% are"),
        ({99, 100}, None),
        ({98, 99, 100}, "its last 3 of 100 steps had a loss that is not finite"),
    ],
)
def test_how_many_losses_may_be_not_finite(regression, graph, rows, tmp_path, bad, why):
    x, y = (np.concatenate([part] * 27)[:800] for part in rows)
    job = Job(graph, ArrayData((x, y)), Schedule(0.1, 2), checkpoint=tmp_path / "c")
    step = regression.step

    def poisoned(*arrays, lr):  # in the second epoch
        regression.poison = len(regression.rates) + 1 - 100 in bad
        return step(*arrays, lr=lr)

    regression.step = poisoned
    reported = []
    if why is None:
        assert train(regression, job)[1].bad_steps == len(bad)
        assert read_progress(tmp_path / "c").epochs == 2
        return
    with pytest.raises(MbcError) as caught:
        train(regression, job, on_epoch=reported.append)
    assert caught.value.code == "MBC231"
    assert f"the training diverged in epoch 2: {why}" in caught.value.message
    assert f"'{tmp_path / 'c'}' is left as it was before this epoch" in caught.value.message
    assert read_progress(tmp_path / "c").epochs == 1
    assert [epoch.bad_steps for epoch in reported] == [0, len(bad)]


@pytest.mark.parametrize(("overflow", "diverges"), [(24, False), (34, False), (35, True)])
def test_steps_that_fp16_skips_are_no_divergence_at_the_start(regression, graph, rows, overflow, diverges):
    x, y = (np.concatenate([part] * 14)[:800] for part in rows)
    regression.overflow = overflow
    job = Job(graph, ArrayData((x, y)), Schedule(0.1, 1))
    if not diverges:
        (epoch,) = train(regression, job)
        assert (epoch.overflowed_steps, epoch.bad_steps) == (overflow, 0)
        return
    with pytest.raises(MbcError) as caught:
        train(regression, job)
    assert caught.value.code == "MBC231"
    assert "35 of its 100 steps had gradients that fp16 cannot hold at any loss scale;" in caught.value.message


def test_a_single_step_of_few_is_not_too_many(regression, graph, rows):
    regression.poison_at = 7
    (epoch,) = train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))
    assert (epoch.steps, epoch.bad_steps, epoch.bad_steps_at_end) == (7, 1, 1)


def test_states_that_an_earlier_gradient_spoilt_are_named(regression, graph, rows):
    regression.spoil_at = 4
    reported = []
    with pytest.raises(MbcError, match="MBC231"):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)), on_epoch=reported.append)
    (epoch,) = reported
    assert (epoch.bad_steps, epoch.first_bad_step, epoch.bad_states) == (3, 5, ("w",))
    with pytest.raises(MbcError, match="; w holds values that are not finite, from the gradient of an earlier step"):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))


def test_a_diverged_epoch_replaces_no_checkpoint(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    regression.spoil_at = 14  # the last step of the second epoch: no loss tells
    with pytest.raises(MbcError) as caught:
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 3), checkpoint=file))
    assert caught.value.code == "MBC231"
    assert "the training diverged in epoch 2: w holds values that are not finite; " in caught.value.message
    assert f"'{file}' is left as it was before this epoch" in caught.value.message
    assert f"lower the learning rate, or add a warm-up, and go on from there with --resume {file}" in str(caught.value)
    assert read_progress(file).epochs == 1
    load_checkpoint(regression, file)
    assert np.isfinite(regression.weights).all()


def test_a_checkpoint_of_another_training_is_not_gone_on_from(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    file.write_bytes(b"of another one")
    regression.spoil_at = 7  # in the first epoch
    with pytest.raises(MbcError, match=r"not finite\nhelp: lower the learning rate, or add a warm-up$"):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 2), checkpoint=file))


def test_divergence_without_a_checkpoint_is_an_error_too(regression, graph, rows):
    regression.spoil_at = 7
    with pytest.raises(MbcError, match=r"not finite\nhelp: lower the learning rate, or add a warm-up$"):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "was made with seed 7, not 2\nhelp: resume with the settings"),
        ({"schedule": Schedule(0.1, 1)}, "has 2 finished epochs, more than the 1 asked for\nhelp: .* --epochs"),
    ],
)
def test_resume_with_other_settings(regression, graph, rows, tmp_path, change, message):
    file = tmp_path / "c"
    save_checkpoint(regression, file, Progress(2, 14, 7, 8))
    job = Job(graph, ArrayData(rows), Schedule(0.1, 4), seed=7, resume=file)
    with pytest.raises(MbcError, match=message) as caught:
        train(regression, dataclasses.replace(job, **change))
    assert caught.value.code == "MBC182"


def test_resume_with_another_mini_batch(regression, graph, rows, tmp_path):
    file = tmp_path / "c"
    save_checkpoint(regression, file, Progress(2, 14, 7, 16))
    with pytest.raises(MbcError, match="mini-batches of 16 rows, not 8"):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 4), seed=7, resume=file))


def test_checkpoint_stays_a_weights_file(regression, tmp_path):
    regression.weights += np.arange(15).reshape(5, 3)
    save_checkpoint(regression, tmp_path / "c", Progress(1, 2, 3, 4))
    other = copy.deepcopy(regression)
    other.weights[:] = 0
    assert load_checkpoint(other, tmp_path / "c") == Progress(1, 2, 3, 4)
    np.testing.assert_array_equal(other.weights, regression.weights)
    np.testing.assert_array_equal(load_file(tmp_path / "c")["w"], regression.weights)


def test_checkpoint_that_cannot_be_written(regression, tmp_path):
    with pytest.raises(MbcError, match="cannot write checkpoint") as caught:
        save_checkpoint(regression, tmp_path / "missing" / "c", Progress(1, 2, 3, 4))
    assert caught.value.code == "MBC162"


def test_a_checkpoint_is_refused_before_the_first_epoch(regression, graph, rows, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file, why in (
        (tmp_path / "missing" / "c", "its folder does not exist"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "it is not an ordinary file"),
        (Path("/dev/null"), "it is not an ordinary file"),
        (Path("/proc/x"), "No such file or directory"),
        (tmp_path / ("c" * 300), "File name too long"),
        (tmp_path / "c\0", "null"),
    ):
        with pytest.raises(MbcError) as caught:
            train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1), checkpoint=file))
        assert caught.value.code == "MBC180"
        assert f"cannot write the checkpoint '{file}': " in caught.value.message and why in caught.value.message
    assert regression.rates == [] and [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_failed_checkpoint_leaves_the_old_one(regression, tmp_path, monkeypatch):
    file = tmp_path / "c"
    save_checkpoint(regression, file, Progress(1, 2, 3, 4))
    before = file.read_bytes()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MbcError, match="No space left"):
        save_checkpoint(regression, file, Progress(2, 2, 3, 4))
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def header(text, length=None):
    return (length or len(text)).to_bytes(8, "little") + text.encode()


def with_progress(**changes):
    """Return a file without weights that has the progress of a training."""
    progress = {"epochs": 1, "steps": 2, "seed": 3, "batch": 4, **changes}
    return header(json.dumps({"__metadata__": {"mbc.training": json.dumps(progress)}}))


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", "MBC163", ": header too small"),
        (b"\xff" * 100, "MBC163", ": header too large"),
        (header("{}", length=100), "MBC163", ": invalid header length"),
        (header("[]"), "MBC163", ": invalid JSON in header: invalid type: sequence"),
        (header('{"__metadata__": {"mbc.training": 3}}'), "MBC163", "invalid type: integer `3`, expected a string"),
        (header("{}"), "MBC181", "holds weights, but no progress"),
        (header('{"__metadata__": {"mbc.training": "{}"}}'), "MBC181", "makes no sense: '{}'"),
        (header('{"__metadata__": {"mbc.training": "[1"}}'), "MBC181", r"makes no sense: '\[1'"),
        (header('{"__metadata__": {"mbc.training": "[1]"}}'), "MBC181", r"makes no sense: '\[1\]'"),
        (with_progress(epochs=-5), "MBC181", "'epochs' is -5, which is not a number from 0 to"),
        (with_progress(steps=1.5), "MBC181", "'steps' is 1.5, which is not a number from 0 to"),
        (with_progress(seed="7"), "MBC181", "'seed' is '7', which is not a number from 0 to"),
        (with_progress(seed=1 << 63), "MBC181", "'seed' is 9223372036854775808, which is not a number from 0 to"),
        (with_progress(batch=0), "MBC181", "'batch' is 0, which is not a number from 1 to"),
        (with_progress(batch=None), "MBC181", "'batch' is None, which is not a number from 1 to"),
        (with_progress(plateau=3), "MBC181", "makes no sense: "),
        (with_progress(plateau={"best": "1", "bad_epochs": 0, "scale": 1.0}), "MBC181", "makes no sense: "),
        (with_progress(steps=True), "MBC181", "'steps' is True, which is not a number from 0 to"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, content, code, message):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(MbcError, match=message) as caught:
        read_progress(tmp_path / "c")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("idle_s", "waited_s"),
    [
        (None, 7 * 2.0),  # steps are computed when they are called
        (5.0, 7 * 2.0),  # the GPU waited for other things, too
        (0.5, 7 * 0.5),
        (0.0, 0.0),  # the step before ran all the while
    ],
)
def test_how_long_steps_waited_for_data(regression, graph, rows, monkeypatch, idle_s, waited_s):
    now_s = 0.0

    def slow():
        nonlocal now_s
        for part in range(0, 56, 8):
            now_s += 2
            yield tuple(array[part : part + 8] for array in rows)
        now_s += 2  # no one waits for the end

    step = regression.step

    def one_second(*arrays, lr):
        nonlocal now_s
        now_s += 1
        loss = step(*arrays, lr=lr)
        loss.idle_s = idle_s
        return loss

    regression.step = one_second
    monkeypatch.setattr(epoch_run.time, "monotonic", lambda: now_s)
    (epoch,) = train(regression, Job(graph, IterableData(slow, inputs_of(graph), "test"), Schedule(0.1, 1)))
    assert (epoch.waited_seconds, epoch.seconds) == (waited_s, 7 * 3 + 2)

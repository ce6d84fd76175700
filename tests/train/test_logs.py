"""Logs and callbacks: each interval and each epoch is reported once, also if a training was resumed."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys

import pytest

from mbc.errors import MbcError
from mbc.train.data import ArrayData
from mbc.train.job import Job
from mbc.train.logs import JsonLines, Logs, TensorBoard, check_logs
from mbc.train.loop import train
from mbc.train.schedule import Schedule
from mbc.train.training_checkpoint import read_progress


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def timeless(file):
    return [{k: v for k, v in one.items() if k not in ("seconds", "waited_s", "images_per_s")} for one in records(file)]


def logged(net, job, lines=None, tensorboard=None, step=0):
    with Logs(lines, tensorboard, step) as logs:
        return train(net, job, on_epoch=logs.write, on_interval=logs.write)


def test_intervals_and_epochs_are_reported(regression, graph, rows):
    regression.poison_at = 4
    intervals, losses = [], []
    step = regression.step

    def recorded(*arrays, lr):
        losses.append(loss := step(*arrays, lr=lr))
        return loss

    regression.step = recorded
    job = Job(graph, ArrayData(rows), Schedule(0.1, 2, "cosine"), interval=3)
    history = train(regression, job, on_interval=intervals.append)
    # From the last one, or from the beginning of the epoch, to every third step of the training.
    assert [(one.epoch, one.total_steps, one.steps, one.rows) for one in intervals] == [
        (1, 3, 3, 24), (1, 6, 3, 24), (2, 9, 2, 16), (2, 12, 3, 24),
    ]  # fmt: skip
    floats = [float.__float__(one) for one in losses]
    assert [one.loss for one in intervals] == pytest.approx(
        [sum(floats[:3]) / 3, sum(floats[4:6]) / 2, sum(floats[7:9]) / 2, sum(floats[9:12]) / 3]
    )
    assert [one.bad_steps for one in intervals] == [0, 1, 0, 0]
    assert [one.learning_rate for one in intervals] == [regression.rates[i] for i in (2, 5, 8, 11)]
    assert [epoch.total_steps for epoch in history] == [7, 14]


def test_an_error_of_a_callback_ends_the_training(regression, graph, rows):
    def stop(_):
        raise StopIteration

    with pytest.raises(StopIteration):
        train(regression, Job(graph, ArrayData(rows), Schedule(0.1, 2), interval=2), on_interval=stop)
    assert len(regression.rates) == 3  # the loss of a step is seen when the next one runs


def test_lines_of_json(regression, graph, rows, tmp_path):
    data, file = ArrayData(rows), tmp_path / "log.jsonl"
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')  # of another training
    regression.poison_at = 3
    (epoch,) = logged(regression, Job(graph, data, Schedule(0.1, 1), data, interval=3), file)
    first, second, last = records(file)
    assert first["kind"] == second["kind"] == "interval" and (first["step"], second["step"]) == (3, 6)
    assert first["bad_steps"] == 1 and "test_accuracy" not in first
    assert last == {
        "kind": "epoch", "step": 7, "epoch": 1, "loss": epoch.loss, "accuracy": epoch.accuracy, "test_accuracy": 1.0,
        "waited_s": epoch.waited_seconds,
        "learning_rate": 0.1, "images_per_s": 56 / epoch.seconds, "seconds": epoch.seconds, "bad_steps": 1,
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_no_number(regression, graph, rows, tmp_path):
    regression.poison_at = 1
    logged(regression, Job(graph, ArrayData(rows), Schedule(0.1, 1), interval=1), tmp_path / "log")
    assert [one["loss"] is None for one in records(tmp_path / "log")] == [True] + 7 * [False]


@pytest.mark.parametrize("saved_every", [1, 5])
def test_a_resumed_training_repeats_no_line(regression, graph, rows, tmp_path, saved_every):
    """Lines after the last checkpoint and a half-written line are not repeated, either."""
    data, file = ArrayData(rows), tmp_path / "c"
    job = Job(graph, data, Schedule(0.3, 3, "cosine"), data, interval=3)
    whole, broken_off = copy.deepcopy(regression), copy.deepcopy(regression)
    logged(whole, job, tmp_path / "whole.jsonl")
    log = tmp_path / "half.jsonl"

    class Killed(Exception):
        pass

    def kill(_):
        if len(broken_off.rates) == 13:
            raise Killed

    with pytest.raises(Killed), Logs(log, None) as logs:
        saving = dataclasses.replace(job, checkpoint=file, checkpoint_every=saved_every)
        train(broken_off, saving, kill, logs.write, logs.write)
    with log.open("a") as opened:
        opened.write('{"kind": "inter')
    progress = read_progress(file)
    assert progress.steps_in_all == {1: 12, 5: 10}[saved_every]
    logged(regression, dataclasses.replace(job, resume=file), log, step=progress.steps_in_all)
    assert timeless(log) == timeless(tmp_path / "whole.jsonl")


def test_a_training_that_is_refused_leaves_its_log_as_it_is(regression, graph, rows, tmp_path):
    """This includes a training that ends before it can report anything."""
    data, file, log = ArrayData(rows), tmp_path / "c", tmp_path / "log"
    job = Job(graph, data, Schedule(0.1, 2), checkpoint=file, interval=3)
    logged(regression, job, log)
    before = log.read_bytes()
    with pytest.raises(MbcError, match="was made with seed 0, not 1") as no:
        logged(regression, dataclasses.replace(job, resume=file, seed=1), log, step=7)
    assert no.value.code == "MBC182" and log.read_bytes() == before
    with pytest.raises(KeyboardInterrupt):
        logged(regression, dataclasses.replace(job, stop=lambda: True), log)
    assert log.read_bytes() == before


@pytest.mark.parametrize("writes_first", [False, True])
def test_an_epoch_without_a_line_is_reported_after_a_resume(regression, graph, rows, tmp_path, writes_first):
    """The disk was full, or the process died between writing the line and the checkpoint."""
    data, file = ArrayData(rows), tmp_path / "c"
    job = Job(graph, data, Schedule(0.3, 3), data, interval=3)
    whole, broken_off = copy.deepcopy(regression), copy.deepcopy(regression)
    logged(whole, job, tmp_path / "whole.jsonl")
    log = tmp_path / "half.jsonl"

    class Full(Exception):
        pass

    with pytest.raises(Full), Logs(log, None) as logs:

        def write(epoch):
            if writes_first or epoch.epoch < 2:
                logs.write(epoch)
            if epoch.epoch == 2:
                raise Full

        train(broken_off, dataclasses.replace(job, checkpoint=file), on_epoch=write, on_interval=logs.write)
    logged(regression, dataclasses.replace(job, resume=file), log, step=read_progress(file).steps_in_all)
    assert timeless(log) == timeless(tmp_path / "whole.jsonl")
    assert (regression.weights == whole.weights).all()


@pytest.mark.parametrize("content", ["my notes\n", "[1]\n", "{}\n", '{"step": "3"}\n', "3\n"])
def test_a_file_that_is_no_log_is_left_as_it_is(tmp_path, content):
    (tmp_path / "notes").write_text(content)
    for call in (JsonLines, lambda path: check_logs(path, None)):
        with pytest.raises(
            MbcError, match=r"cannot write the log '.*': the existing file is not a log of a training"
        ) as no:
            call(tmp_path / "notes")
        assert no.value.code == "MBC290" and (tmp_path / "notes").read_text() == content


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for lines, why in ((tmp_path / "missing" / "log", "its folder does not exist"), (tmp_path, "it is a folder")):
        with pytest.raises(MbcError, match=f"cannot write the log '.*': {why}") as no:
            check_logs(lines, None)
        assert no.value.code == "MBC290"
    with pytest.raises(MbcError, match="cannot write the log '/dev/full': it is not an ordinary file"):
        JsonLines(type(tmp_path)("/dev/full"))


def test_an_impossible_folder_for_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr("mbc.train.logs._tensorboard", lambda _: None)  # whether it is installed or not
    (tmp_path / "file").touch()
    with pytest.raises(MbcError, match=r"cannot write the log '.*events': '.*file' is not a folder that can be") as no:
        check_logs(None, tmp_path / "file" / "events")
    assert no.value.code == "MBC290"
    check_logs(None, tmp_path / "new" / "events")
    assert not (tmp_path / "new").exists()


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MbcError, match="TensorBoard is asked for, but its package cannot be imported: ") as no:
        check_logs(None, tmp_path / "events")
    assert no.value.code == "MBC291" and "pip install 'mbc-compiler[tensorboard]'" in no.value.remedy
    assert not (tmp_path / "events").exists()


def test_tensorboard_reads_the_written_events(regression, graph, rows, tmp_path):
    loaded = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no TensorBoard")
    data, folder, file = ArrayData(rows), tmp_path / "events", tmp_path / "c"
    job = Job(graph, data, Schedule(0.3, 2), data, interval=3, checkpoint=file)
    check_logs(None, folder)
    history = logged(regression, dataclasses.replace(job, schedule=Schedule(0.3, 1)), tmp_path / "log", folder)
    TensorBoard(folder, 7).write({"kind": "interval", "step": 9, "loss": 99.0})  # steps after the last checkpoint
    history += logged(regression, dataclasses.replace(job, resume=file), tmp_path / "log", folder, step=7)
    events = loaded.EventAccumulator(str(folder)).Reload()
    assert {"epoch/loss", "epoch/test_accuracy", "interval/loss", "interval/learning_rate"} <= set(
        events.Tags()["scalars"]
    )
    assert [(one.step, one.value) for one in events.Scalars("epoch/loss")] == [
        (7 * epoch.epoch, pytest.approx(epoch.loss)) for epoch in history
    ]
    expected = {one["step"]: one["loss"] for one in records(tmp_path / "log") if one["kind"] == "interval"}
    assert {one.step: one.value for one in events.Scalars("interval/loss")} == pytest.approx(expected)

    (tmp_path / "taken").touch()
    with pytest.raises(MbcError, match=r"cannot write the log '.*taken': it is not a folder") as no:
        check_logs(None, tmp_path / "taken")
    assert no.value.code == "MBC290"

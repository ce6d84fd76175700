"""mbc train: learns, tells, resumes to the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mbc import compiler
from mbc.cli import train_command
from mbc.frontend.sections import OPTIMIZERS
from mbc.train import loop
from mbc.train.schedule import USUAL_RATES

CPU = ("--device", "cpu", "--set", "train.precision=fp64")


def test_train_a_source(mbc, data):
    done = mbc("train", "tiny.mbc", "--data", data, "--test", data, "--epochs", "15", "--lr", "0.2", *CPU)
    assert done.code == 0, done.err
    # On a busy machine planning takes long enough to be said before.
    assert "note: the last 5 rows of each epoch do not fill a mini-batch of 8 and are dropped\n" in done.err
    assert done.err.count("dropped") == 1
    assert "epoch 15/15  loss 0." in done.err and "images/s" in done.err
    accuracy = float(done.out.split("test accuracy: ")[1].split("%")[0])
    assert accuracy > 90
    assert "after 15 epochs (cpu)" in done.out
    assert not Path("tiny").exists()  # a plan is enough on the CPU


def test_train_a_package_as_json(mbc, data):
    assert mbc("compile", "tiny.mbc", *CPU[2:]).code == 0
    done = mbc("train", "tiny", "--data", data, "--epochs", "2", "--device", "cpu", "--json", "--checkpoint", "c")
    assert done.code == 0, done.err
    result = done.json
    assert result["device"] == "cpu" and result["checkpoint"] == "c"
    assert [e["epoch"] for e in result["epochs"]] == [1, 2]
    assert result["epochs"][0]["steps"] == 4 and result["epochs"][0]["dropped_rows"] == 5
    assert result["epochs"][0]["test_accuracy"] is None


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_two_epochs_and_two_resumed_are_four(mbc, data, precision):
    common = ("--data", data, "--device", "cpu", "--set", f"train.precision={precision}", "--seed", "5")
    assert mbc("train", "tiny.mbc", *common, "--epochs", "4", "--checkpoint", "whole").code == 0
    assert mbc("train", "tiny.mbc", *common, "--epochs", "2", "--checkpoint", "half").code == 0
    assert Path("whole").read_bytes() != Path("half").read_bytes()
    done = mbc("train", "tiny.mbc", *common[:-2], "--epochs", "4", "--resume", "half")
    assert done.code == 0, done.err
    assert "epoch 3/4" in done.err and "epoch 2/4" not in done.err
    assert Path("whole").read_bytes() == Path("half").read_bytes()
    assert "nothing to do" in mbc("train", "tiny.mbc", *common, "--epochs", "4", "--resume", "half").out


def test_resume_with_another_seed(mbc, data):
    common = ("tiny.mbc", "--data", data, *CPU)
    assert mbc("train", *common, "--epochs", "1", "--checkpoint", "c", "--seed", "3").code == 0
    done = mbc("train", *common, "--epochs", "2", "--resume", "c", "--seed", "4")
    assert done.code == 1
    assert "error MBC182: the checkpoint 'c' was made with seed 3, not 4" in done.err


def test_interrupted_training_says_how_to_go_on(mbc, data, monkeypatch):
    save = loop.save_checkpoint

    def save_and_interrupt(*arguments):
        save(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "save_checkpoint", save_and_interrupt)
    # As from a terminal: tests that run in the background are started with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--epochs", "3", "--checkpoint", "c")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130
    assert "go on with: --resume c\ninterrupted" in done.err


@pytest.mark.parametrize(
    ("optimizer", "given", "rate"), [("sgd", (), 0.1), ("adamw", (), 0.001), ("adamw", ("--lr", "0.25"), 0.25)]
)
def test_the_learning_rate_suits_the_optimizer(mbc, data, monkeypatch, optimizer, given, rate):
    rates = []

    def train(net, job, *_):
        rates.append(job.schedule.rate)
        return ()

    monkeypatch.setattr(train_command, "train", train)
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--set", f"train.optimizer={optimizer}", *given)
    assert done.code == 0, done.err
    assert rates == [rate]


def test_every_optimizer_has_a_usual_rate():
    assert USUAL_RATES.keys() == OPTIMIZERS.keys()


def test_a_foreign_output_is_refused_before_planning(mbc, data, monkeypatch):
    monkeypatch.setattr(compiler, "compile_plan", None)  # a call would be another error
    Path("own").mkdir()
    Path("own/file").touch()
    done = mbc("train", "tiny.mbc", "--data", data, "--output", "own")
    assert done.code == 1 and "error MBC093: 'own' exists and was not made by mbc" in done.err


def test_data_of_another_shape(mbc):
    np.savez("wrong.npz", images=np.zeros((20, 1, 5, 6), np.float32), labels=np.zeros(20, int))
    done = mbc("train", "tiny.mbc", "--data", "wrong.npz", *CPU)
    assert done.code == 1
    assert "MBC175" in done.err and "(20, 1, 5, 6)" in done.err and "(1, 6, 6)" in done.err


def test_labels_out_of_range(mbc):
    np.savez("wrong.npz", images=np.zeros((20, 1, 6, 6), np.float32), labels=np.full(20, 3))
    done = mbc("train", "tiny.mbc", "--data", "wrong.npz", *CPU)
    assert done.code == 1
    assert "error MBC232: array 'labels' of 'wrong.npz' has class 3 in row 0, and 19 more" in done.err


def test_an_empty_test_is_refused(mbc, data):
    np.savez("empty.npz", images=np.zeros((0, 1, 6, 6), np.float32), labels=np.zeros(0, np.int64))
    done = mbc("train", "tiny.mbc", "--data", data, "--test", "empty.npz", *CPU)
    assert done.code == 1 and "error MBC233: the data of 'empty.npz' have no rows" in done.err


def test_no_gpu_is_said_once(mbc, data, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = mbc("train", "tiny.mbc", "--data", data, "--epochs", "2", "--set", "train.precision=fp64")
    assert done.code == 0, done.err
    assert done.err.count("note: running on the CPU") == 1


def test_cuda_is_not_replaced_by_the_cpu(mbc, data, monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = mbc("train", "tiny.mbc", "--data", data, "--device", "cuda", "--set", "train.precision=fp64")
    assert done.code == 1
    assert "error MBC" in done.err


def test_python_batches(mbc, data):
    Path("loader_of_the_train_test.py").write_text(
        "import numpy as np\n"
        "def batches(epoch):\n"
        "    held = np.load('data.npz')\n"
        "    yield held['images'], held['labels']\n"
    )
    done = mbc("train", "tiny.mbc", "--data", "loader_of_the_train_test:batches", *CPU, "--epochs", "2")
    assert done.code == 0, done.err
    assert "the last 5 rows" in done.err


@pytest.mark.parametrize("missing", ["--data", "--test"])
def test_data_that_are_not_there_are_refused_before_planning(mbc, data, monkeypatch, missing):
    monkeypatch.setattr(compiler, "compile_plan", lambda *_: pytest.fail("planned"))
    places = {"--data": data, "--test": data} | {missing: "nowhere.npz"}
    done = mbc("train", "tiny.mbc", *(word for pair in places.items() for word in pair), *CPU)
    assert done.code == 1
    assert "error MBC172: there is no data 'nowhere.npz'" in done.err

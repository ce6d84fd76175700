"""`mbc train`: it learns, reports, and resumes to equal bits."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc import compiler
from mbc.cli import train_command
from mbc.frontend.sections import OPTIMIZERS
from mbc.ir.graph import NO_OPTIMIZER
from mbc.train import epoch_run
from mbc.train.schedule import USUAL_RATES
from mbc.train.training_checkpoint import best_beside, read_progress
from tests.report.pages import data_of

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


def test_a_target(mbc, data):
    train = ("train", "tiny.mbc", "--data", data, "--test", data, "--epochs", "15", "--lr", "0.2", *CPU)
    done = mbc(*train, "--target", "accuracy=0.6", "--checkpoint", "c", "--json")
    assert done.code == 0, done.err
    *before, last = (epoch["test_accuracy"] for epoch in done.json["epochs"])
    assert last >= 0.6 > max(before, default=0.0) and len(before) < 9
    assert done.json["target"] == {"metric": "test-accuracy", "value": 0.6, "reached": True}
    assert read_progress(Path("c")).epochs == len(before) + 1
    again = mbc(*train, "--target", "accuracy=0.6", "--resume", "c")
    assert (again.code, again.out) == (0, "nothing to do: 'c' has reached test-accuracy 0.6\n")

    few = (*train, "--epochs", "1", "--checkpoint", "d", "--report", "page.html")
    reached = mbc(*few, "--target", "loss=10")
    assert reached.code == 0 and "the target loss 10 is reached after epoch 1: " in reached.out
    missed = mbc(*few, "--target", "loss=0")
    assert missed.code == 1 and "weights: d\npage: page.html\n" in missed.out
    assert "error MBC318: loss 0 is not reached in 1 epoch: the best is " in missed.err
    assert "reached" not in missed.out and read_progress(Path("d")).epochs == 1
    unknown = mbc(*few, "--target", "iou=0.5")
    assert unknown.code == 1 and "error MBC237: 'iou' is not available" in unknown.err


@pytest.mark.parametrize("subject", ["tiny.mbc", "tiny"])
@pytest.mark.parametrize(
    ("target", "finished"), [("loss=10", True), ("loss=0", False), ("accuracy=0", True), ("accuracy=1.5", False)]
)
def test_ranks_that_fail_after_the_target_leave_nothing_to_go_on_with(
    mbc, data, monkeypatch, subject, target, finished
):
    """The ranks fail after the last checkpoint, for example because the report of the training cannot be written."""
    if subject == "tiny":
        assert mbc("compile", "tiny.mbc", "--gpus", "2", *CPU[2:]).code == 0
    common = ("--data", data, "--test", data, "--device", "cpu", "--target", target)
    assert mbc("train", "tiny.mbc", *common, *CPU[2:], "--epochs", "1", "--checkpoint", "w").code == 1 - finished

    def fail(_) -> int:
        Path("w").rename("c")
        return 1

    monkeypatch.setattr(train_command, "start_ranks", fail)
    settings = () if subject == "tiny" else CPU[2:]
    done = mbc("train", subject, *common, *settings, "--epochs", "3", "--gpus", "2", "--checkpoint", "c")
    assert done.code == 1 and ("go on with" in done.err) is not finished


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
    save = epoch_run.save_checkpoint

    def save_and_interrupt(*arguments):
        save(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(epoch_run, "save_checkpoint", save_and_interrupt)
    # As from a terminal: tests that run in the background are started with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--epochs", "3", "--checkpoint", "c")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130
    again = f"mbc train tiny.mbc --data {data} {' '.join(CPU)} --epochs 3 --checkpoint c --resume c"
    assert f"go on with: {again}\ninterrupted" in done.err and "epoch 2/3" not in done.err
    monkeypatch.setattr(epoch_run, "save_checkpoint", save)
    assert mbc(*again.split()[1:]).code == 0


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
    assert USUAL_RATES.keys() == OPTIMIZERS.keys() - {NO_OPTIMIZER}


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


def test_functions_that_cannot_be_called_are_refused_before_planning(mbc, data, monkeypatch):
    monkeypatch.setattr(compiler, "compile_plan", lambda *_: pytest.fail("planned"))
    Path("wrong_loader_of_the_train_test.py").write_text("def batches(folder): yield folder\n")
    done = mbc("train", "tiny.mbc", "--data", "wrong_loader_of_the_train_test:batches", *CPU)
    assert done.code == 1
    assert "error MBC171: wrong_loader_of_the_train_test:batches cannot be called: it takes (folder) (" in done.err
    assert "help: give a function that yields the batches of one epoch, without arguments, or with" in done.err


@pytest.mark.parametrize("place", ["/proc/x", "nowhere/c", "."])
def test_a_checkpoint_that_cannot_be_written_is_refused_before_planning(mbc, data, monkeypatch, place):
    monkeypatch.setattr(compiler, "compile_plan", lambda *_: pytest.fail("planned"))
    done = mbc("train", "tiny.mbc", "--data", data, "--checkpoint", place, *CPU)
    assert done.code == 1 and f"error MBC180: cannot write the checkpoint '{place}': " in done.err


def test_a_rate_far_too_high_ends_the_training(mbc, data):
    Path("plain.mbc").write_text(Path("tiny.mbc").read_text().replace("bn |> relu |> dropout(0.1)", "relu"))
    common = ("train", "plain.mbc", "--data", data, "--device", "cpu")
    assert mbc(*common, "--epochs", "1", "--checkpoint", "good").code == 0
    good = Path("good").read_bytes()
    done = mbc(*common, "--epochs", "3", "--resume", "good", "--lr", "1e30")
    assert done.code == 1
    assert (
        "error MBC231: the training diverged in epoch 2: 3 of its 4 steps had a loss that is not finite, the first is"
        " step 2; up to 10% are tolerated; 'good' is left as it was before this epoch\n"
        "help: lower the learning rate, or add a warm-up, and go on from there with --resume good"
    ) in done.err
    assert re.search(r"epoch 2/3  loss \S+ \(mean of 1 of 4 steps\)  accuracy", done.err)
    assert Path("good").read_bytes() == good


def interrupted(mbc, monkeypatch, signal_number, *arguments, after=2, twice=False):
    """Run `mbc train` and send it a signal in its step number `after`; with `twice`, two signals."""
    from mbc.runtime.module import Module

    step = Module.step
    taken = []

    def step_and_interrupt(net, *inputs, **named):
        taken.append(None)
        if len(taken) == after:
            for _ in range(1 + twice):
                os.kill(os.getpid(), signal_number)
        return step(net, *inputs, **named)

    monkeypatch.setattr(Module, "step", step_and_interrupt)
    monkeypatch.setattr("mbc.cli.terminal._ONE_SIGNAL_S", 0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return mbc("train", "tiny.mbc", *CPU, "--epochs", "3", *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
        monkeypatch.setattr(Module, "step", step)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_names_the_checkpoint_to_resume(mbc, data, monkeypatch, signal_number):
    handler = signal.getsignal(signal.SIGTERM)
    said = "nothing was saved: with --checkpoint FILE a training is saved when it is interrupted, and can be resumed"
    done = interrupted(mbc, monkeypatch, signal_number, "--data", data)
    assert done.code == 130 and f"{said}\ninterrupted" in done.err
    Path("c").write_text("of another training")
    done = interrupted(mbc, monkeypatch, signal_number, "--data", data, "--checkpoint", "c", twice=True)
    assert "'c' is not written: begin anew\ninterrupted" in done.err
    assert Path("c").read_text() == "of another training"
    words = f"mbc train tiny.mbc {' '.join(CPU)} --epochs 3 --data {data}"
    for after in (2, 6):  # within the first epoch, and within the second one
        done = interrupted(mbc, monkeypatch, signal_number, "--data", data, "--checkpoint", "c", after=after)
        assert done.code == 130 and f"go on with: {words} --checkpoint c --resume c\ninterrupted" in done.err
        running = read_progress(Path("c")).running
        assert running is not None and running.steps == 2
    more = ("--resume", "c", "--checkpoint", "d")
    done = interrupted(mbc, monkeypatch, signal_number, "--data", data, *more, twice=True)
    assert f"go on with: {words} --resume c --checkpoint d\ninterrupted" in done.err
    assert sorted(p.name for p in Path().iterdir() if p.name.startswith((".", "c", "d"))) == ["c", "data.npz"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_leftovers_of_a_killed_training_are_removed_by_the_next(mbc, data):
    Path(".c.abc.part").write_text("half of it")
    Path(".other.abc.part").write_text("of another file")
    assert mbc("train", "tiny.mbc", "--data", data, *CPU, "--epochs", "1", "--checkpoint", "c").code == 0
    assert sorted(p.name for p in Path().glob(".*")) == [".other.abc.part"]


def test_a_training_that_was_interrupted_within_an_epoch_ends_with_the_same_bits(mbc, data, monkeypatch):
    common = ("--data", data, "--seed", "5", "--schedule", "one-cycle", "--keep-best", "loss")
    assert mbc("train", "tiny.mbc", *CPU, "--epochs", "3", *common, "--checkpoint", "whole").code == 0
    done = interrupted(mbc, monkeypatch, signal.SIGINT, *common, "--checkpoint", "half", after=7)
    (again,) = re.findall(r"go on with: mbc (.*)", done.err)
    done = mbc(*again.split())
    assert done.code == 0, done.err
    assert "epoch 2/3" in done.err and "epoch 1/3" not in done.err
    assert Path("whole").read_bytes() == Path("half").read_bytes()
    assert Path("whole.best").read_bytes() == Path("half.best").read_bytes()
    of = read_progress(Path("half.best"))
    assert of.best is not None
    assert f"best weights: half.best (epoch {of.epochs}, loss {of.best.value:.4f})" in done.out


@pytest.mark.parametrize("name", ["w.safetensors", "w"])
@pytest.mark.parametrize("keep", [(), ("--keep-best", "loss")])
def test_the_best_weights_are_not_replaced_by_the_last_ones(mbc, data, name, keep):
    common, best = ("train", "tiny.mbc", "--data", data, *CPU), str(best_beside(Path(name)))
    assert mbc(*common, "--epochs", "1", "--checkpoint", name, "--keep-best", "loss").code == 0
    before = Path(best).read_bytes()
    done = mbc(*common, "--epochs", "2", "--resume", best, *keep)
    assert done.code == 1 and f"error MBC180: cannot write the checkpoint '{best}': it holds the best" in done.err
    assert f"such as --checkpoint {name}\n" in done.err and Path(best).read_bytes() == before
    assert mbc(*common, "--epochs", "2", "--resume", best, *keep, "--checkpoint", "other").code == 0
    assert Path(best).read_bytes() == before and not list(Path().glob("*.best.best*"))
    # A name alone makes no best checkpoint.
    assert mbc(*common, "--epochs", "1", "--checkpoint", "my.best").code == 0
    assert mbc(*common, "--epochs", "2", "--resume", "my.best").code == 0


@pytest.mark.parametrize(
    ("option", "what", "remedy"),
    [
        ("--checkpoint-every=5", "the checkpoint", "--checkpoint FILE"),
        ("--keep-best", "the checkpoint", "--checkpoint FILE"),
        ("--log-every=5", "the log", "--log FILE, --tensorboard FOLDER or --report FILE"),
    ],
)
def test_options_without_the_place_that_they_need(mbc, data, option, what, remedy):
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, option)
    assert done.code == 1
    assert f"error MBC238: {option.split('=')[0]} needs a file for {what}\nhelp: give {remedy}," in done.err


def test_averages_are_tested_on_test_data(mbc, data):
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--set", "train.ema=0.9", "--evaluate", "ema")
    assert done.code == 1 and "error MBC238: --evaluate ema needs data to test the averages on" in done.err
    assert "help: give --test DATA, too" in done.err


def test_too_few_rows_for_a_step_of_several_mini_batches(mbc, data):
    accumulate = ("--set", "train.accumulate=3", "--set", "batch=1000")
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, *accumulate)
    rows = len(np.load(data)["images"])
    assert done.code == 1 and f"the data hold {rows} rows, fewer than one step of 3 mini-batches, 3000 rows" in done.err
    assert f"--set batch={rows // 3}" in done.err


def test_a_log_that_a_resumed_training_goes_on_with(mbc, data, monkeypatch):
    common = ("--data", data, "--test", data, "--log", "log.jsonl", "--log-every", "3", "--checkpoint", "c")
    done = interrupted(mbc, monkeypatch, signal.SIGTERM, *common, after=6)
    (again,) = re.findall(r"go on with: mbc (.*)", done.err)
    assert mbc(*again.split()).code == 0
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["epoch"], line["step"]) for line in lines] == [
        ("interval", 1, 3), ("epoch", 1, 4), ("interval", 2, 6), ("epoch", 2, 8), ("interval", 3, 9),
        ("interval", 3, 12), ("epoch", 3, 12),
    ]  # fmt: skip
    assert all(line["test_accuracy"] > 0 for line in lines if line["kind"] == "epoch")


def test_a_page_with_curves_at_the_end(mbc, data):
    common = ("train", "tiny.mbc", "--data", data, *CPU, "--log-every", "2", "--checkpoint", "c")
    common += ("--report", "page.html")
    done = mbc(*common, "--epochs", "1", "--log", "log.jsonl")
    assert done.code == 0 and "page: page.html" in done.out
    first = data_of(Path("page.html").read_text())["recorded"][0]["lines"]
    assert [(line["kind"], line["step"]) for line in first] == [("interval", 2), ("interval", 4), ("epoch", 4)]
    assert mbc(*common, "--epochs", "2", "--resume", "c", "--log", "log.jsonl", "--json").code == 0
    (shown,) = data_of(Path("page.html").read_text())["recorded"]
    logged = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert sorted(shown["lines"], key=str) == sorted(logged, key=str) and max(line["step"] for line in logged) == 8
    # Without a log: of this part of the training alone; and nothing where no step was taken.
    assert mbc(*common, "--epochs", "3", "--resume", "c").code == 0
    assert {line["epoch"] for line in data_of(Path("page.html").read_text())["recorded"][0]["lines"]} == {3}
    Path("page.html").unlink()
    assert mbc(*common, "--epochs", "3", "--resume", "c").code == 0 and not Path("page.html").exists()


def test_a_page_that_cannot_be_written(mbc, data):
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--report", "nowhere/page.html")
    assert done.code == 1
    assert "error MBC320: cannot write 'nowhere/page.html': its folder does not exist" in done.err


@pytest.mark.parametrize("refused", ["seed", "weights", "steps"])
def test_a_refused_training_leaves_its_log_as_it_is(mbc, data, refused):
    common = ("--data", data, *CPU, "--log", "log.jsonl", "--log-every", "1", "--seed", "0")
    assert mbc("train", "tiny.mbc", *common, "--epochs", "1", "--checkpoint", "early").code == 0
    assert mbc("train", "tiny.mbc", *common, "--epochs", "2", "--resume", "early", "--checkpoint", "late").code == 0
    before = Path("log.jsonl").read_bytes()
    assert len(before.splitlines()) == 2 * 5
    words = {
        "seed": ("--epochs", "2", "--resume", "early", "--seed", "1"),
        "weights": ("--epochs", "2", "--resume", "early", "--set", "train.optimizer=adamw"),
        "steps": ("--epochs", "1", "--resume", "late"),
    }[refused]
    assert mbc("train", "tiny.mbc", *common, *words).code == 1
    assert Path("log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--log", "nowhere/log"), "error MBC290: cannot write the log 'nowhere/log': its folder does not exist"),
        (("--tensorboard", "t"), "error MBC291: TensorBoard is asked for, but its package cannot be imported"),
    ],
)
def test_logs_that_cannot_be_written_are_refused_before_planning(mbc, data, monkeypatch, options, message):
    monkeypatch.setattr(compiler, "compile_plan", lambda *_: pytest.fail("planned"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, *options)
    assert done.code == 1 and message in done.err


PHOTOS = """network photos(batch = 8) {
  input photo[batch, 3, 10, 10] : uint8
  input label[batch] : class
  image = photo |> augment(crop=8, pad=1, flip=true, mean=(0.5,), std=(0.5,))
  logits = image |> conv(4, 3) |> relu |> flatten |> linear(3)
  output logits
  loss (logits, label) |> softmax_cross_entropy
}
"""


def test_images_of_bytes_from_files(mbc):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 40)
    images = (generator.integers(0, 80, (40, 3, 10, 10)) + 80 * labels[:, None, None, None]).astype(np.uint8)
    Path("photos.mbc").write_text(PHOTOS)
    np.savez("photos.npz", images=images, labels=labels)
    common = ("train", "photos.mbc", "--data", "photos.npz", "--test", "photos.npz", *CPU, "--lr", "0.05")
    done = mbc(*common, "--epochs", "12", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["epochs"][-1]["test_accuracy"] > 0.9
    np.savez("floats.npz", images=images / 255, labels=labels)
    done = mbc("train", "photos.mbc", "--data", "floats.npz", *CPU)
    assert done.code == 1 and "error MBC176: array 'images' of 'floats.npz' holds float64" in done.err


def test_moving_averages_are_tested_saved_and_resumed(mbc, data):
    common = ("--data", data, "--test", data, *CPU, "--set", "train.ema=0.8", "--lr", "0.2", "--save-ema", "e")
    done = mbc("train", "tiny.mbc", *common, "--epochs", "3", "--checkpoint", "whole", "--evaluate", "ema")
    assert done.code == 0, done.err
    assert "test accuracy of the moving averages: " in done.out and "moving averages: e" in done.out
    averages = load_file("e")
    assert not any(name.startswith("control.") or name.endswith((".ema", ".momentum")) for name in averages)
    whole = load_file("whole")
    assert all(np.array_equal(averages[name], whole[f"{name}.ema"]) for name in averages)
    assert mbc("train", "tiny.mbc", *common, "--epochs", "1", "--checkpoint", "part").code == 0
    assert mbc("train", "tiny.mbc", *common, "--epochs", "3", "--resume", "part", "--evaluate", "ema").code == 0
    assert all(np.array_equal(array, load_file("part")[name]) for name, array in whole.items())


def test_averages_that_are_not_kept(mbc, data):
    common = ("--data", data, *CPU, "--epochs", "1")
    done = mbc("train", "tiny.mbc", *common, "--save-ema", "e")
    assert done.code == 1 and "error MBC211: network 'tiny' keeps no moving averages of its weights" in done.err
    assert mbc("train", "tiny.mbc", *common, "--checkpoint", "c").code == 0
    done = mbc("train", "tiny.mbc", *common, "--resume", "c", "--set", "train.ema=0.9")
    assert done.code == 1 and "error MBC212: 'c' lacks moving averages" in done.err and "train.ema=none" in done.err


def test_steps_of_several_mini_batches_are_read_counted_and_resumed(mbc, data):
    common = (
        "--data", data, "--test", data, *CPU, "--set", "train.accumulate=2", "--lr", "0.2", "--schedule", "cosine",
    )  # fmt: skip
    done = mbc("train", "tiny.mbc", *common, "--epochs", "4", "--checkpoint", "whole", "--json")
    assert done.code == 0, done.err
    assert "do not fill a mini-batch of 16" in done.err
    assert [epoch["steps"] for epoch in done.json["epochs"]] == [2, 2, 2, 2]
    assert load_file("whole")["control.updates"] == 8 and load_file("whole")["control.step"] == 16
    interrupted = ("--epochs", "4", "--checkpoint", "part", "--checkpoint-every", "1")
    assert mbc("train", "tiny.mbc", *common, *interrupted[2:], "--epochs", "2").code == 0
    assert mbc("train", "tiny.mbc", *common, "--epochs", "4", "--resume", "part").code == 0
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--resume", "whole", "--epochs", "5")
    assert done.code == 1 and "was made with mini-batches of 16 rows, not 8" in done.err

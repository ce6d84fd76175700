"""mbc tune, and mbc train --settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mbc.report.fit import Probe

FEW = ("--gpu", "h200", "--without", "offload,recompute,concurrent_stream", "--device", "cpu")
SMALL = ("tiny.mbc", *FEW, "--data", "train.npz", "--epochs", "9", "--most-share", "0.4", "--set", "batch=16")


@pytest.fixture
def data() -> None:
    draws = np.random.default_rng(0)
    for name, rows in (("train", 256), ("test", 64)):
        labels = draws.integers(0, 3, rows)
        images = draws.normal(0, 1, (rows, 1, 6, 6)) + labels[:, None, None, None]
        np.savez(f"{name}.npz", image=images.astype(np.float32), target=labels)


def test_plans_alone_on_one_gpu_and_on_two(mbc):
    done = mbc("tune", "tiny.mbc", *FEW, "--dry-run", "--gpus", "2", "--noise-scale", "2", "--json")
    assert done.code == 0, done.err
    rows = done.json["rows"]
    assert {row["gpus"] for row in rows} == {1, 2} and all(row["fits"] for row in rows)
    assert done.json["taken"] in rows and done.json["spent"] is None and done.json["base"]["rows"] == 8
    assert done.json["taken"]["goodput"] == max(row["goodput"] for row in rows)
    taken = done.json["taken"]
    planned = mbc(
        "show", "tiny.mbc", *FEW[:4], "--gpus", str(taken["gpus"]), "--set", f"batch={taken['batch']}", "--json"
    )
    predictions = planned.json["predictions"]
    assert taken["needed_bytes"] == predictions["arena_bytes"] + predictions["overhead_bytes"]


def test_a_tuning_is_trained_with(mbc, data, monkeypatch):
    first = mbc("tune", *SMALL, "--state", "state.json", "-o", "tuned.settings", "--json")
    assert first.code == 0, first.err
    tuning = first.json
    assert tuning["noise_scale"] == tuning["noise"]["value"] > 0 and 0 < tuning["spent"]["share"] <= 0.4
    assert tuning["base"]["rate"] == tuning["range_test"]["chosen"]

    # The same command plans and trains nothing any more; without the file it finds the same.
    with monkeypatch.context() as patched:
        patched.setattr("mbc.fit.Search.probe", lambda search, at: _known(search.probes, at))
        patched.setattr("mbc.runtime.module.Module.step", None)
        again = mbc("tune", *SMALL, "--state", "state.json")
    assert again.code == 0, again.err
    assert "takes batch" in again.out and "range test, the loss at rates" in again.out
    assert mbc("tune", *SMALL, "--json").json == tuning, "deterministic under its seed"

    text = Path("tuned.settings").read_text()
    batch, rate = tuning["taken"]["batch"], tuning["taken"]["rate"]
    momentum = tuning["taken"]["momentum"]
    rule = f"set=train.optimizer=sgd(momentum={momentum:.6g}, nesterov=false, weight_decay=0.0)\n" * (momentum != 0.9)
    assert batch == 16 or momentum != 0.9, "another batch has another momentum"
    assert f"set=batch={batch}\n{rule}lr={rate:.6g}\nepochs=" in text and "schedule=cosine" in text
    given = ("--data", "train.npz", "--settings", "tuned.settings", "--epochs", "1", "--warmup", "0", "--json")
    trained = mbc("train", "tiny.mbc", *FEW, *given)
    assert trained.code == 0, trained.err
    (epoch,) = trained.json["epochs"]
    assert epoch["steps"] == 256 // batch and len(trained.json["epochs"]) == 1, "what is given counts before the file"


def _known(probes: dict[int, Probe], at: int) -> Probe:
    return probes[at]


def test_a_target(mbc, data):
    saved = ("--lr", "0.05", "--noise-scale", "0.01", "--test", "test.npz")
    done = mbc("tune", *SMALL, *saved, "--target", "accuracy=0.5", "-o", "tuned.settings")
    assert done.code == 0, done.err
    assert "the target is reached after" in done.out and "schedule=constant" in Path("tuned.settings").read_text()
    never = mbc("tune", *SMALL, *saved, "--target", "loss=-1", "-o", "never.settings")
    assert never.code == 1
    assert "error MBC318: loss -1 is not reached in 9 epochs: the best is " in never.err
    assert not Path("never.settings").exists()


def test_a_target_is_checked_before_training(mbc, data, monkeypatch):
    monkeypatch.setattr("mbc.runtime.module.Module.step", None)
    unknown = mbc("tune", *SMALL, "--target", "iou=0.5")
    assert unknown.code == 1 and "error MBC237: 'iou' is not available" in unknown.err
    monkeypatch.setattr("mbc.compiler.try_plan", None)
    monkeypatch.setattr("mbc.cli.start_ranks.local_gpus", lambda: ("the only one",))
    few = mbc("tune", *SMALL, "--device", "cuda", "--gpus", "2", "--target", "loss=1")
    assert few.code == 1 and "error MBC266: --gpus 2 was asked for, but this machine has 1 GPU" in few.err


def test_data_that_cannot_be_read_are_refused_with_a_target_too(mbc, data):
    Path("torn.npz").write_bytes(b"no archive")
    done = mbc("tune", *SMALL, "--data", "torn.npz", "--target", "loss=1")
    assert (done.code, done.err.count("error MBC172")) == (1, 1)


def test_refusals(mbc, data):
    def refused(*words: str) -> str:
        done = mbc("tune", *words)
        assert done.code == 1 and not done.out
        return done.err

    assert "error MBC315: there are no data to tune with" in refused("tiny.mbc", *FEW)
    assert "MBC311: the data hold 256 rows, fewer than one step of the base batch" in refused(
        *SMALL, "--set", "batch=300"
    )
    assert "MBC312: " in refused(*SMALL, "--set", "batch=1")
    assert "MBC314: 0.001 of the training are 0 steps" in refused(*SMALL, "--most-share", "0.001")
    Path("loader.py").write_text("def batches():\n    yield None\n")
    assert "MBC319: the number of rows that a function yields in an epoch is unknown" in refused(
        *SMALL, "--data", "loader:batches"
    )
    assert "MBC194: nothing fits" in refused("tiny.mbc", *FEW, "--dry-run", "--memory", "1MB")
    Path("state.json").write_text("{}")
    assert "MBC316: 'state.json' is not the state of a tuning" in refused(*SMALL, "--state", "state.json")
    state = {"version": 1, "key": {"--seed": "1"}, "probes": {}, "range_test": None, "noise": None}
    Path("state.json").write_text(json.dumps(state))
    assert "MBC316: 'state.json' belongs to a tuning with another --data and --epochs" in refused(
        *SMALL, "--state", "state.json"
    )
    trains = ("train", "tiny.mbc", "--data", "train.npz", "--settings", "no.settings")
    assert "error MBC317: cannot read 'no.settings'" in mbc(*trains).err
    Path("no.settings").write_text("# rates\nlr 0.1\n")
    done = mbc(*trains)
    assert done.code == 1 and "MBC317: line 2 of 'no.settings' is no setting of a training: 'lr 0.1'" in done.err
    assert "give a file that mbc tune -o wrote: NAME=VALUE, of set, gpus" in done.err

"""`mbc import` and `mbc export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mbc.cli.arguments import interchange
from mbc.interchange import write
from tests.interchange import archives


@pytest.fixture
def model(mbc) -> Path:
    """An exported program in the folder that the commands run in."""
    return archives.write(Path())


def test_help_names_the_losses_that_there_are():
    assert interchange.LOSSES == write.LOSSES


def test_a_model_becomes_a_source_and_weights(mbc, model: Path):
    result = mbc("import", "net.pt2", "-o", "stem.mbc")
    assert result.code == 0, result.err
    assert "stem.mbc: 1 operation in 9 lines" in result.out
    assert "stem.safetensors: 15 numbers in 1 state, for 1 key of the state_dict" in result.out
    assert "train it: mbc train stem.mbc --data DATA --weights stem.safetensors" in result.out
    assert "network stem(batch = 2)" in Path("stem.mbc").read_text()
    assert mbc("show", "stem.mbc", "--gpu", "h200").code == 0
    back = mbc("export", "stem.safetensors", "--like", "stem.safetensors", "-o", "back.safetensors")
    assert back.code == 0 and "back.safetensors: a state_dict of 1 keys" in back.out
    assert load_file("back.safetensors")["stem.weight"].shape == (5, 3, 1, 1)


def test_figures_as_json_and_another_loss(mbc, model: Path):
    words = ("--loss", "mse", "--flat", "--name", "other", "--weights", "w.safetensors", "--json")
    result = mbc("import", "net.pt2", "-o", "net.mbc", *words)
    assert result.json == {
        "source": "net.mbc", "lines": 9, "weights": "w.safetensors", "operations": 1, "keys": 1, "states": 1,
        "numbers": 15, "frozen": [],
    }  # fmt: skip
    assert "network other(" in Path("net.mbc").read_text() and "|> mse" in Path("net.mbc").read_text()
    back = mbc("export", "w.safetensors", "--like", "w.safetensors", "-o", "back.safetensors", "--json")
    assert back.json == {"state_dict": "back.safetensors", "keys": 1}


def test_files_that_are_there_stay(mbc, model: Path):
    Path("net.mbc").write_text("mine")
    result = mbc("import", "net.pt2", "-o", "net.mbc")
    assert result.code == 1 and "error MBC305: 'net.mbc' is there already" in result.err
    assert Path("net.mbc").read_text() == "mine"
    assert mbc("import", "net.pt2", "-o", "net.mbc", "--force").code == 0
    assert Path("net.mbc").read_text().startswith("# Imported from net.pt2")
    again = mbc("export", "net.safetensors", "--like", "net.safetensors", "-o", "net.safetensors")
    assert again.code == 1 and "MBC305" in again.err


def test_places_that_cannot_be_written(mbc, model: Path):
    result = mbc("import", "net.pt2", "-o", "none/net.mbc", "--weights", "w.safetensors")
    assert result.code == 1 and "error MBC306: cannot write 'none/net.mbc'" in result.err


def test_a_file_that_is_no_model(mbc):
    result = mbc("import", "tiny.mbc", "-o", "net.mbc")
    assert result.code == 1 and "error MBC300: cannot read 'tiny.mbc'" in result.err
    assert not Path("net.mbc").exists()


def test_a_training_begins_with_given_weights(mbc, data: str):
    mbc("train", "tiny.mbc", "--data", data, "--epochs", "1", "--checkpoint", "w.safetensors", "--device", "cpu")
    quiet = ("--device", "cpu", "--epochs", "1", "--json")
    first = mbc("train", "tiny.mbc", "--data", data, *quiet).json["epochs"][0]["loss"]
    then = mbc("train", "tiny.mbc", "--data", data, "--weights", "w.safetensors", *quiet).json["epochs"][0]["loss"]
    assert then < first
    refused = mbc("train", "tiny.mbc", "--data", data, "--weights", "none.safetensors", *quiet)
    assert refused.code == 1 and "MBC163" in refused.err
    assert json.loads(json.dumps(then)) == then

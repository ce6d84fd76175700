"""Outputs of commands: no command overwrites its inputs, sources or data, and no output overwrites another output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mbc.cli.outputs import check_outputs
from mbc.errors import MbcError
from tests.cli.test_train import CPU


@pytest.mark.parametrize("option", ["--checkpoint", "--save-ema", "--log", "--report"])
def test_training_does_not_replace_its_data(mbc, data, option):
    before = Path(data).read_bytes()
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, option, data)
    assert done.code == 1 and f"error MBC370: {option} '{data}' has the suffix of data" in done.err
    assert Path(data).read_bytes() == before


def test_training_does_not_replace_data_of_another_name(mbc, data):
    Path("rows").mkdir()
    for name, array in np.load(data).items():
        np.save(Path("rows") / name, array)
    done = mbc("train", "tiny.mbc", "--data", "rows", *CPU, "--checkpoint", "./rows")
    assert done.code == 1 and "error MBC370: --checkpoint 'rows' would replace what --data names" in done.err


@pytest.mark.parametrize(
    "words", [("report", "tiny.mbc"), ("trace", "tiny.mbc"), ("diff", "tiny.mbc", "--gpu", "h200", "--gpu", "t4")]
)
def test_pages_do_not_replace_sources(mbc, data, words):
    before = Path("tiny.mbc").read_text()
    done = mbc(*words, "-o", "tiny.mbc")
    assert done.code == 1
    assert "error MBC370: -o 'tiny.mbc' has the suffix of a source, which it could replace" in done.err
    assert Path("tiny.mbc").read_text() == before


def test_two_outputs_are_two_files(mbc, data):
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, "--checkpoint", "w", "--log", "./w")
    assert done.code == 1 and "error MBC371: --checkpoint and --log are one file, 'w'" in done.err
    # That of the best epoch has a name of its own.
    best = ("--checkpoint", "w.safetensors", "--keep-best", "--report", "w.best.safetensors")
    done = mbc("train", "tiny.mbc", "--data", data, *CPU, *best)
    assert done.code == 1 and "MBC371: --keep-best and --report are one file, 'w.best.safetensors'" in done.err
    assert not list(Path().glob("w*"))


def test_links_name_their_targets(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"w")
    (tmp_path / "link").symlink_to(tmp_path / "weights")
    with pytest.raises(MbcError, match=r"MBC370: --checkpoint .* would replace what --weights names"):
        check_outputs({"--checkpoint": tmp_path / "link"}, {"--weights": tmp_path / "weights"})
    check_outputs({"--checkpoint": tmp_path / "another", "--log": None}, {"--weights": tmp_path / "weights"})

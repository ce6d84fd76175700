"""A small network and data for it, and the command line run inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.cli import main

SOURCE = """\
network tiny(batch = 8, classes = 3) {
  input image[batch, 1, 6, 6] : float
  input target[batch] : class
  logits = image |> conv(4, 3, pad=1) |> bn |> relu |> dropout(0.1) |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


class Result:
    """The exit code and the output of one command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def mbc(capsys, tmp_path, monkeypatch) -> Callable[..., Result]:
    """Run a command in an empty folder that holds tiny.mbc, on a machine without measurements, without measuring."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("mbc.measuring.gpus_named", lambda name: ())
    monkeypatch.setattr("mbc.progress._PATIENCE_S", 1e6)  # a slow machine says that it is at work
    Path("tiny.mbc").write_text(SOURCE)

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def data(mbc) -> str:
    """37 images in which the brightest third gives the class: four mini-batches of 8, and five rows left over."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 37).astype(np.int64)
    images = generator.normal(0, 0.2, (37, 1, 6, 6)).astype(np.float32)
    for row, label in enumerate(labels):
        images[row, 0, :, 2 * label : 2 * label + 2] += 1.5
    np.savez("data.npz", images=images, labels=labels)
    return "data.npz"

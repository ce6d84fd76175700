"""`mbc train` with sharded optimizer states: checkpoints need all ranks, also after a signal to one of them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mbc.train.training_checkpoint import read_progress
from tests.ranks.test_mpi import with_mpi
from tests.ranks.test_train import COMMAND, run_in
from tests.ranks.test_train_failures import PROMISE_S, Training, compiled_for_two

pytestmark = with_mpi
SOURCE = """\
network tiny(batch = 8, classes = 3) {
  input image[batch, 1, 6, 6] : float
  input target[batch] : class
  logits = image |> conv(70, 3, pad=1) |> conv(64, 3, pad=1) |> relu |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = adamw  shard_optimizer = true }
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    said = compiled_for_two(folder, SOURCE)
    assert re.search(r"sharded +\S+ KiB of \S+ KiB of optimizer states", said), said
    return folder / "pair"


@pytest.fixture
def training(pair: Path, tmp_path: Path) -> Iterator[Training]:
    started = Training(pair, tmp_path)
    yield started
    started.end()


@pytest.mark.parametrize(("rank", "number"), [(None, signal.SIGINT), (0, signal.SIGTERM), (1, signal.SIGINT)])
def test_an_interrupt_leaves_a_whole_checkpoint(training: Training, rank: int | None, number: signal.Signals) -> None:
    training.start("plain", 1_000_000)
    training.trains()
    assert training.process is not None
    os.kill(training.process.pid if rank is None else training.ranks()[rank], number)
    said = training.ended(PROMISE_S)
    assert re.search(f"^go on with: mbc train .* --resume {training.checkpoint}$", said, re.MULTILINE), said
    assert rank is not None or (training.process.returncode == 130 and "MBC264" not in said)
    assert training.whole_epochs() >= 1
    saved = load_file(training.checkpoint)
    assert saved["conv1.weight.v"].shape == saved["conv1.weight"].shape == (64, 70, 3, 3)
    assert saved["conv1.weight.v"].reshape(64, -1).max(axis=1).min() > 0  # of both ranks


@pytest.mark.parametrize("others", [(1, 3), pytest.param((2,), marks=pytest.mark.exhaustive)])
def test_a_training_goes_on_on_other_ranks(tmp_path: Path, others: tuple[int, ...]) -> None:
    (tmp_path / "tiny.mbc").write_text(SOURCE.replace("batch = 8", "batch = 6"))
    images = np.random.default_rng(0).normal(size=(30, 1, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(30) % 3)

    def run(*more: str) -> list[dict[str, float]]:
        done = run_in(tmp_path, *COMMAND, "--json", *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["epochs"]

    alone = run("--epochs", "3")
    run("--epochs", "2", "--gpus", "2", "--checkpoint", "w.safetensors", "--checkpoint-every", "3", "--keep-best")
    assert read_progress(tmp_path / "w.best.safetensors").epochs in (1, 2)
    for gpus in others:
        (epoch,) = run("--epochs", "3", "--gpus", str(gpus), "--resume", "w.safetensors", "--checkpoint", f"{gpus}")
        assert epoch["loss"] == pytest.approx(alone[2]["loss"], rel=1e-4)

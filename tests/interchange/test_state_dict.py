"""Weights from torch to a network and back: every key, aliases and counters included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from mbc.interchange.state_dict import export_weights, read_keys, write_weights
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source
from tests.interchange.models import Model, Tensor, exported, nn, stirred, torch


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Net(nn.Module):
    """A model with a module under two names, a buffer that nobody reads, a scale, and a linear layer over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.units = nn.Sequential(Unit(), Unit())
        self.first = self.units[0]
        self.gamma = nn.Parameter(torch.ones(4, 1, 1))
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("index", torch.arange(5))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.units(self.stem(x)) * self.gamma
        x = self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


@pytest.fixture
def imported(tmp_path: Path) -> tuple[Model, str, Path]:
    """Return the model, the imported source, and the file of its weights."""
    torch.manual_seed(0)
    model = stirred(Net())
    imported_model = import_model(exported(tmp_path, model, torch.randn(8, 1, 6, 6)), "net")
    write_weights(tmp_path / "net.safetensors", imported_model.network)
    return model, imported_model.source, tmp_path / "net.safetensors"


def test_frozen_values_come_back_unchanged(imported: tuple[Model, str, Path], tmp_path: Path) -> None:
    model, _, weights = imported
    wanted = model.state_dict()
    assert export_weights(weights, weights, tmp_path / "back.safetensors") == len(wanted)
    returned = load_file(tmp_path / "back.safetensors")
    assert returned.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert returned[key].dtype == tensor.numpy().dtype and np.array_equal(returned[key], tensor.numpy()), key


def test_twenty_steps_and_back_evaluate_alike(imported: tuple[Model, str, Path], tmp_path: Path) -> None:
    _, source, weights = imported
    net = Module(compile_plan(Source("net.mbc", source), Options(gpu="h200")), device="cpu")
    net.load(weights, weights_only=True)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(8, 1, 6, 6)).astype(np.float32)
    labels = generator.integers(0, 3, 8).astype(np.int32)
    losses = [net.step(images, labels, lr=0.01) for _ in range(20)]
    assert losses[-1] < losses[0]
    net.save(tmp_path / "trained.safetensors")
    export_weights(tmp_path / "trained.safetensors", weights, tmp_path / "back.safetensors")
    model = Net()
    arrays = load_file(tmp_path / "back.safetensors")
    model.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()})
    assert int(model.first.norm.num_batches_tracked) == int(model.units[1].norm.num_batches_tracked) == 20
    assert model.first.conv.weight is model.units[0].conv.weight
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(images)).numpy()
    ours = net.forward(images)
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_files_that_no_import_wrote(imported: tuple[Model, str, Path], tmp_path: Path) -> None:
    weights = imported[2]
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "plain.safetensors")
    with pytest.raises(MbcError, match=r"MBC308: .*does not list the keys of its state_dict"):
        read_keys(tmp_path / "plain.safetensors")
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "odd.safetensors", {"mbc.state_dict": "[[1, 2]]"})
    with pytest.raises(MbcError, match="MBC308"):
        read_keys(tmp_path / "odd.safetensors")
    with pytest.raises(MbcError, match="MBC163"):
        export_weights(tmp_path / "none.safetensors", weights, tmp_path / "back.safetensors")


def test_every_state_that_does_not_fit_is_named(imported: tuple[Model, str, Path], tmp_path: Path) -> None:
    weights = imported[2]
    arrays = {name: array for name, array in load_file(weights).items() if name != "stem.weight"}
    save_file(arrays | {"head.bias": np.zeros(7, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(MbcError) as caught:
        export_weights(tmp_path / "other.safetensors", weights, tmp_path / "back.safetensors")
    assert caught.value.code == "MBC309" and "does not fit the state_dict of" in caught.value.message
    assert "missing     stem.weight (for 'stem.weight')" in caught.value.message
    assert "mismatched  head.bias [7] (for 'head.bias' [3])" in caught.value.message
    assert not (tmp_path / "back.safetensors").exists()

"""The loops of examples/pytorch: with mbc two or three lines differ, and figures and checkpoint are equal."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the loops are PyTorch's, which is not installed")
# Looked for rather than imported: that takes every process that collects tests seconds.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are scikit-learn's: not installed")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pytorch"
LOOPS = ("loop_torch", "loop_mbc", "loop_from_torch")
MODULES = ("digits_network", "other_loops", *LOOPS, "lightning_torch", "lightning_mbc", "monai_loop")
LINE = re.compile(r"epoch \d+: loss (\S+), accuracy (\S+)\n")
EPOCHS = 3


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(FOLDER)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


def outcome(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[tuple[str, str]], Any]:
    """Return the figures that a loop prints for each epoch, and its checkpoint."""
    file = folder / f"{name}.pt"
    importlib.import_module(name).main(EPOCHS, file)
    return LINE.findall(capsys.readouterr().out), torch.load(file)


@pytest.mark.parametrize("name", LOOPS[1:])
def test_losses_and_checkpoint_are_those_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    theirs, wanted = outcome("loop_torch", tmp_path, capsys)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        ours, checkpoint = outcome(name, tmp_path, capsys)
    assert len(ours) == len(theirs) == EPOCHS
    losses, accuracies = np.array(ours, float).T
    np.testing.assert_allclose(losses, np.array(theirs, float)[:, 0], rtol=1e-3)
    np.testing.assert_allclose(accuracies, np.array(theirs, float)[:, 1], atol=0.01)
    assert losses[-1] < 0.7 * losses[0] and accuracies[-1] > 0.5
    assert list(checkpoint) == list(wanted)
    for key, tensor in wanted.items():
        np.testing.assert_allclose(checkpoint[key].numpy(), tensor.numpy(), rtol=0.01, atol=0.01, err_msg=key)
    fresh = importlib.import_module("digits_network").network()
    fresh.load_state_dict(checkpoint)


def other_lines(theirs: str, ours: str) -> list[str]:
    """Return the lines that a loop with mbc adds to the loop of PyTorch, each up to its first parenthesis."""
    one, two = (
        [line for line in (FOLDER / f"{name}.py").read_text(encoding="utf-8").split('"""', 2)[2].splitlines() if line]
        for name in (theirs, ours)
    )
    added_lines = [line[2:].strip() for line in difflib.ndiff(one, two) if line.startswith("+ ")]
    return [line.partition("(")[0] for line in added_lines]


def test_two_or_three_lines_are_other_ones():
    steps = ["trainer = mbc.from_torch", "loss = trainer.step"]
    assert other_lines("loop_torch", "loop_from_torch") == ["import mbc", *steps]
    assert other_lines("loop_torch", "loop_mbc") == ["import mbc", "mbc.module"]


def test_other_loops_have_torchs_losses_in_the_plan():
    loops = importlib.import_module("other_loops")
    wanted = loops.main(planned=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        losses = loops.main(planned=True)
    assert len(wanted) == 5
    for name, numbers in wanted.items():
        np.testing.assert_allclose(losses[name], numbers, rtol=2e-4, err_msg=name)


def test_networks_of_monai_train_alike():
    for name in ("monai", "ignite"):
        pytest.importorskip(name, reason="the trainer is MONAI's, which is not installed (make monai)")
    loop = importlib.import_module("monai_loop")
    wanted = loop.main(planned=False, size=8, steps=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch")
        losses = loop.main(planned=True, size=8, steps=3)
    assert list(wanted) == ["dynunet", "segresnet"]
    for name, numbers in wanted.items():
        assert numbers[-1] < numbers[0]
        np.testing.assert_allclose(losses[name], numbers, rtol=2e-4, err_msg=name)


def test_a_lightning_module_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("lightning", reason="the module is one of PyTorch Lightning, which is not installed")
    outcomes: list[tuple[dict[str, float], Any]] = []
    for name in ("lightning_torch", "lightning_mbc"):
        file = tmp_path / f"{name}.ckpt"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*runs in PyTorch")
            importlib.import_module(name).main(EPOCHS, file)
        printed = re.findall(r"'(accuracy|loss)': ([0-9.]+)", capsys.readouterr().out)
        outcomes.append(({key: float(value) for key, value in printed}, torch.load(file, weights_only=False)))
    (metrics, wanted), (others, checkpoint) = outcomes
    assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-3) and others["loss"] < 1.6
    assert others["accuracy"] == pytest.approx(metrics["accuracy"], abs=0.01)
    assert list(checkpoint["state_dict"]) == list(wanted["state_dict"])
    for key, tensor in wanted["state_dict"].items():
        np.testing.assert_allclose(
            checkpoint["state_dict"][key].numpy(), tensor.numpy(), rtol=0.01, atol=0.01, err_msg=key
        )


def test_a_lightning_module_gets_a_plan_when_training_starts():
    assert other_lines("lightning_torch", "lightning_mbc") == ["import mbc", "def on_train_start", "mbc.module"]

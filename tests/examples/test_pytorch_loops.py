"""The loops of examples/pytorch: with mbc three lines are other ones, and numbers and checkpoint are the same."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
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
MODULES = ("digits_network", "loop_torch", "loop_mbc")
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
    """What a loop prints of each epoch, and its checkpoint."""
    file = folder / f"{name}.pt"
    importlib.import_module(name).main(EPOCHS, file)
    return LINE.findall(capsys.readouterr().out), torch.load(file)


def test_losses_accuracy_and_checkpoint_are_those_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (theirs, wanted), (ours, found) = (outcome(name, tmp_path, capsys) for name in ("loop_torch", "loop_mbc"))
    assert len(ours) == len(theirs) == EPOCHS
    losses, accuracies = np.array(ours, float).T
    np.testing.assert_allclose(losses, np.array(theirs, float)[:, 0], rtol=1e-3)
    np.testing.assert_allclose(accuracies, np.array(theirs, float)[:, 1], atol=0.01)
    assert losses[-1] < 0.7 * losses[0] and accuracies[-1] > 0.5
    assert list(found) == list(wanted)
    for key, tensor in wanted.items():
        np.testing.assert_allclose(found[key].numpy(), tensor.numpy(), rtol=0.01, atol=0.01, err_msg=key)
    fresh = importlib.import_module("digits_network").network()
    fresh.load_state_dict(found)


def test_three_lines_are_other_ones():
    theirs, ours = (
        [line for line in (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] if line]
        for name in ("loop_torch", "loop_mbc")
    )
    made = [line[2:].strip() for line in difflib.ndiff(theirs, ours) if line.startswith("+ ")]
    assert [line.partition("(")[0] for line in made] == [
        "import mbc", "trainer = mbc.from_torch", "loss = trainer.step",
    ]  # fmt: skip

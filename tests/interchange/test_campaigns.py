"""A small share of the campaigns of random programs and of PyTorch's samples of modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
pytest.importorskip("torch", reason="what is imported is made by PyTorch, which is not installed")
import random_programs
import torch
import volumes
from exactness import FP32_TOLERANCE, judge
from program_vocabulary import FAMILIES
from torch import nn

PROGRAMS = range(1000, 1024)  # of a seed that the campaign does not draw
SEED = 1
PLANNED_EVERY = 6
LIMIT_S = 120.0


def test_random_programs_are_imported_exactly_or_refused() -> None:
    verdicts = {
        index: random_programs.verdict(SEED, index, LIMIT_S, planned=index % PLANNED_EVERY == 0)[0]
        for index in PROGRAMS
    }
    wrong = {index: verdict.detail for index, verdict in verdicts.items() if verdict.kind not in ("equal", "refused")}
    assert not wrong
    assert sum(verdict.kind == "equal" for verdict in verdicts.values()) >= 0.4 * len(verdicts)
    assert len({target for verdict in verdicts.values() for target in verdict.operations}) >= 60


@pytest.mark.parametrize("rank", [1, 3])
def test_networks_along_one_and_three_axes_are_imported_exactly(rank: int) -> None:
    networks = [volumes.drawn(SEED, number, rank) for number in range(len(volumes.LAYERS))]
    verdicts = [(volumes.judge(model, [x], "mse"), network.names) for model, x, network in networks]
    assert not [(names, judged.detail) for judged, names in verdicts if judged.kind != "equal"]
    assert {names[0] for _, names in verdicts} == {*volumes.LAYERS}


def test_a_program_is_drawn_alike_in_each_run() -> None:
    text, loss, reference = random_programs.drawn(SEED, 7)
    again, same_loss, same_reference = random_programs.drawn(SEED, 7)
    assert (again.code(), same_loss, same_reference.loss) == (text.code(), loss, reference.loss)


class Shifted(nn.Module):
    """A layer, after which the model adds a constant that it computes; in fp64 `error` is added, too."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.error = error
        self.offset = nn.Buffer(torch.randn(3, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        filled = (2 * x).fill_(0.375).tanh()
        wrong = self.error if x.dtype == torch.float64 else 0.0
        return x * filled + torch.tanh(self.offset) * 3.3 + wrong


@pytest.mark.parametrize(("error", "verdict"), [(0.0, "equal"), (0.1 * FP32_TOLERANCE, "different")])
def test_constants_that_are_folded_in_fp32_are_no_difference(error: float, verdict: str) -> None:
    assert judge(Shifted(error), [torch.randn(2, 4)], "mse").kind == verdict


def test_the_vocabulary_has_every_family() -> None:
    assert all(FAMILIES.values())
    assert sum(map(len, FAMILIES.values())) >= 60


@pytest.mark.parametrize(
    "name", ["nn.GroupNorm", "nn.Conv1d", "nn.PReLU", "nn.AvgPool2d", "nn.LayerNorm", "nn.SmoothL1Loss"]
)
def test_samples_of_modules_are_imported_exactly_or_refused(name: str) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's samples of modules ask for it")
    import module_db

    verdicts = dict(module_db.verdicts(name, LIMIT_S))
    wrong = {sample: verdict.detail for sample, verdict in verdicts.items() if verdict.kind not in ("equal", "refused")}
    assert not wrong
    assert any(verdict.kind == "equal" for verdict in verdicts.values())

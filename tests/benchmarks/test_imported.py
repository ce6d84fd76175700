"""Gradients of an imported network beside torch's: correct ones pass, wrong ones fail, dropout is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

torch = pytest.importorskip("torch", reason="the reference is PyTorch, which is not installed")

import imported_cuda  # noqa: E402
import imported_gradients as gradients  # noqa: E402
from imported import distance, evaluated  # noqa: E402

from mbc.interchange.importing import ImportedModel, import_model  # noqa: E402
from tests.interchange.models import Model, Tensor, exported, nn  # noqa: E402


def _model() -> Model:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Hardsigmoid(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def _imported(model: Model, path: Path) -> ImportedModel:
    return import_model(exported(path, model, torch.randn(2, 3, 6, 6)), "net")


def test_gradients_keep_the_rule_with_as_many_rows_as_norms_need(tmp_path: Path) -> None:
    model = _model()
    assert gradients.drop_nothing(model) and not gradients.drop_nothing(model)
    created = _imported(model, tmp_path)
    assert "dropout" not in created.source
    row = {**gradients.single(model, created), **gradients.exact(model, created)}
    assert gradients.keeps_single(row) and gradients.keeps_exact(row)
    assert row["rows"] == 2, "16 pixels of two rows are enough"
    assert 0 < row["gradient_error"] < 1e-5 and len(row["gradient_errors"]) == gradients.DRAWS


def test_the_forward_pass_is_that_of_the_model(tmp_path: Path) -> None:
    model, images = _model(), torch.randn(2, 3, 6, 6)
    created = import_model(exported(tmp_path, model, images), "net")
    result = imported_cuda.forward(created, images.numpy(), "cpu")
    assert distance(result, evaluated(model, images)) < 1e-6


def test_dropout_that_is_no_module_is_left_out(tmp_path: Path) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_rate = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, self.drop_rate, self.training)

    model = _model()
    model[3] = Head()
    assert gradients.drops(model) and gradients.drop_nothing(model)
    assert gradients.keeps_exact(gradients.exact(model, _imported(model, tmp_path)))


def test_a_network_that_computes_something_else_breaks_the_rule(tmp_path: Path) -> None:
    model = _model()
    gradients.drop_nothing(model)
    created = _imported(model, tmp_path)
    model[2] = nn.Mish()
    row = {**gradients.single(model, created), **gradients.exact(model, created)}
    assert not gradients.keeps_single(row) and not gradients.keeps_exact(row)

"""Convolutions that standardise their filters, as in timm: with and without a gain, gradients, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from mbc.interchange.state_dict import export_weights, write_weights
from mbc.ir.types import Precision
from mbc.options import Options
from mbc.runtime.checkpoint import Checkpoint
from mbc.runtime.module import Module
from mbc.source import Source
from tests.interchange.models import Model, Tensor, compared, exported, nn, torch

pytest.importorskip("torch", reason="the imported models are made by PyTorch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import imported_gradients as gradients

F = torch.nn.functional
ROUNDED = 1e-12


class Standard(nn.Conv2d):
    """A convolution like timm's StdConv2d."""

    bias_of_norm = False

    def scale(self) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        shift = self.bias if self.bias_of_norm else None
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, self.scale(), shift, training=True, eps=1e-3
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(Standard):
    """A convolution like timm's ScaledStdConv2d."""

    def __init__(self, *sizes: int, **settings: object) -> None:
        super().__init__(*sizes, **settings)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)
        self.factor = 1.7 * self.weight[0].numel() ** -0.5

    def scale(self) -> Tensor | None:
        return (self.gain * self.factor).view(-1)


class Plain(Scaled):
    """A standardised convolution whose gain is not multiplied by a factor."""

    def scale(self) -> Tensor | None:
        return self.gain.view(-1)


def _network(kind: type[Standard]) -> Model:
    torch.manual_seed(0)
    return nn.Sequential(
        kind(3, 8, 3, padding="same", bias=False), nn.GELU(), kind(8, 8, 3, stride=2, groups=2), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind, settings",
    [
        (Standard, ("standardize=0.001", "standardize=0.001")),
        (Scaled, ("standardize=0.001, gain=1.7", "standardize=0.001, gain=1.7")),
        (Plain, ("standardize=0.001, gain=5.19615242271", "standardize=0.001, gain=6")),
    ],
)
def test_layers_and_their_gradients(kind: type[Standard], settings: tuple[str, str], tmp_path: Path) -> None:
    model = _network(kind)
    imported = compared(tmp_path, model, torch.randn(4, 3, 9, 8))
    assert f"conv(8, 3, pad=1, {settings[0]}) @0" in imported.source
    assert f"conv(8, 3, stride=2, groups=2, bias=true, {settings[1]}) @2" in imported.source
    assert ("0.gain" in imported.network.arrays) == (kind is not Standard)
    trained = import_model(tmp_path / "model.pt2", "net")
    row = {**gradients.single(model, trained), **gradients.exact(model, trained)}
    assert gradients.keeps_single(row) and row["exact_gradient_error"] <= ROUNDED


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_plans_train_it_and_gains_come_back_in_their_shape(precision: Precision, tmp_path: Path) -> None:
    imported = import_model(exported(tmp_path, _network(Scaled), torch.randn(6, 3, 9, 8)), "net")
    weights, trained, back = (tmp_path / f"{name}.safetensors" for name in ("weights", "trained", "back"))
    write_weights(weights, imported.network)
    options = Options(gpu="h200", settings=(("train.precision", precision.value),))
    net = Module(compile_plan(Source("net.mbc", imported.source), options), device="cpu")
    net.load(weights, weights_only=True)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(6, 3, 9, 8)).astype(np.float32)
    labels = generator.integers(0, 5, 6).astype(np.int32)
    losses = [net.step(images, labels, lr=0.1) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    net.save(trained)
    export_weights(trained, weights, back)
    after, before = Checkpoint(back), Checkpoint(weights)
    assert after.read("0.gain").shape == (8, 1, 1, 1)
    assert not np.array_equal(after.read("0.gain").reshape(-1), before.read("0.gain"))


def test_unsupported_standardisation_of_filters_is_refused(tmp_path: Path) -> None:
    class Shifted(Standard):
        bias_of_norm = True

    class Frozen(Standard):
        def forward(self, x: Tensor) -> Tensor:
            norm = F.batch_norm(self.weight, self.mean, self.spread, training=False)
            return F.conv2d(x, norm, self.bias)

    class Tracked(nn.Conv2d):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.norm = nn.BatchNorm1d(self.out_channels, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            norm = self.norm(self.weight.reshape(1, self.out_channels, -1)).reshape_as(self.weight)
            return F.conv2d(x, norm, self.bias)

    class Still(Scaled):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.factor = -1.0

    class Gained(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.gain.view(1, -1, 1, 1) * 0.5)

    frozen = Frozen(3, 4, 3)
    frozen.register_buffer("mean", torch.zeros(3))
    frozen.register_buffer("spread", torch.ones(3))
    image = torch.zeros(2, 3, 8, 8)
    for model, words in (
        (Shifted(3, 4, 3), "it normalises the parameter 'weight', and not each filter by itself, times a gain"),
        (frozen, "it normalises the parameter 'weight', and not each filter by itself, times a gain"),
        (Tracked(3, 4, 3), "it normalises the parameter 'weight', and not each filter by itself, times a gain"),
        (Still(3, 4, 3), "with an eps or a gain factor that is not above 0"),
        (Gained(3, 4, 3), "its parameters are tied to those of"),
    ):
        with pytest.raises(MbcError) as caught:
            import_model(exported(tmp_path, model, image), "net")
        assert caught.value.code == "MBC303" and words in str(caught.value) and "instead: " in str(caught.value)

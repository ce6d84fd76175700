"""Clamps, comparisons, masks, maxima, casts, constants and later activations keep their meaning in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from tests.interchange import models
from tests.interchange.models import Tensor, compared, exported, nn, torch

F = torch.nn.functional
Of = partial(models.Of, channels=6, padding=0)  # its convolution gives [2, 6, 10, 10]
MASK = torch.arange(100).reshape(10, 10) % 3 == 0


class Masked(nn.Module):
    """A choice by a buffer of booleans, which stays in the `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", MASK)
        self.register_buffer("low", torch.tensor(-0.3))
        self.bound = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.0, 0.5, -1.0]).reshape(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(self.mask, x, x.tanh()).masked_fill(~self.mask, 0.25)
        return torch.maximum(y, self.bound) + torch.minimum(x, self.low) + x.detach()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-0.5, 0.25) + x.clamp(min=0.1) - x.clamp(max=-0.1) + torch.clamp_min(x, 0.0),
    "hardtanh": lambda x: F.hardtanh(x) + F.hardtanh(x, -0.2, 0.4) + F.relu6(x),
    "maximum": lambda x: torch.maximum(x, x.tanh() * 2) - torch.minimum(x, x.mean(1, keepdim=True)),
    "maximum of a number": lambda x: torch.maximum(x, torch.tensor(0.2)) + torch.max(x, x * x),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "where of numbers": lambda x: x * torch.where(x > 0.1, 1.5, -0.5),
    "where of a number": lambda x: torch.where(x <= 0.1, torch.tensor(0.3), x) + torch.where(x != 0.1, x, 0.0),
    "where of infinity": lambda x: torch.where(x < 1.5, x, -math.inf).amax(1),
    "where of channels": lambda x: torch.where(x.mean((2, 3), keepdim=True) > 0, x, x.exp()),
    "masks": lambda x: x * ((x > 0) & (x < 1)).float() + x * (~((x > 0.5) | (x.eq(0.1)))).to(x.dtype),
    "compared": lambda x: x * (x.ge(x.tanh() * 1.1)) + x * (x.tanh() > x.mean(1, keepdim=True)).float(),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.5).masked_fill(MASK, -1.0),
    "largest": lambda x: x.max(1)[0] + x.min(1).values, "largest of the last": lambda x: x.max(-1, keepdim=True)[0] * x,
    "casts": lambda x: x.float().to(x.dtype).type_as(x) + 0,
    "constants": lambda x: x * torch.tensor(0.5) + torch.ones(10) * 2 - torch.full((6, 1, 1), 0.25),
    "constants of rows": lambda x: x + torch.ones(x.shape[0], 6, 1, 1) * 0.5 - torch.ones_like(x),
    "gradients": lambda x: x * torch.sigmoid(x).detach(),
    "normalize": lambda x: F.normalize(x) + F.normalize(x.flatten(1), dim=1).view(2, 6, 10, 10),
    "variances": lambda x: (x - x.mean((2, 3), True)) / (x.var((2, 3), keepdim=True, unbiased=False) + 1e-3).sqrt(),
    "deviation": lambda x: x.std(1) + x.abs().norm(float("inf"), 1), "deviation of one": lambda x: x.var((1, 2, 3)),
    "glu": lambda x: F.glu(x, 1), "glu of the last": lambda x: F.glu(x.permute(0, 2, 3, 1), -1),
    "log_softmax": lambda x: F.log_softmax(x, 1), "log_softmax of the last": lambda x: x.log_softmax(-1),
    "selu": F.selu, "celu": lambda x: F.celu(x, 0.3) + F.celu(x, -2.0), "logsigmoid": F.logsigmoid,
    "softshrink": lambda x: F.softshrink(x, 0.2) + F.hardshrink(x, 0.3) + F.tanhshrink(x) + F.softsign(x),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0), "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "leaky_relu": lambda x: F.leaky_relu(x, -0.2) + F.leaky_relu(x, 0.0), "elu": lambda x: F.elu(x, -0.5) + x**0,
    "head of one": lambda x: x.mean((1, 2, 3)).sigmoid(),
    "head squeezed": lambda x: x.mean((2, 3))[:, 0], "head of a slice": lambda x: x.mean((2, 3))[:, 1:2].squeeze(-1),
    "head viewed": lambda x: x.mean((1, 2, 3), keepdim=True).view(-1) * 2,
    "head flattened": lambda x: x.amax((1, 2, 3)).tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_equals_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    compared(tmp_path, Of(FUNCTIONS[name]), torch.randn(2, 3, 12, 12))


def test_buffers_of_booleans_and_numbers_are_masks_and_bounds(tmp_path: Path) -> None:
    layer = Masked()
    imported = compared(tmp_path, Of(lambda x: layer(x), layer=layer), torch.randn(2, 3, 12, 12))
    assert {"layer.mask", "layer.low"} <= {key.name for key in imported.network.keys}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * x.int(), "it casts float32 to int32"),
        (lambda x: x * (((x > 0) + (x > 1)).float()), "it adds booleans"),
        (lambda x: x.max(0)[0] + x, "it is over dimension 0 of [2, 6, 10, 10], the samples"),
        (lambda x: x.argsort(1) * x, "the language has no such operation"),
    ],
)
def test_other_meanings_are_refused(function: Callable[[Tensor], Tensor], words: str, tmp_path: Path) -> None:
    file = exported(tmp_path, Of(function), torch.randn(2, 3, 12, 12))
    with pytest.raises(MbcError) as caught:
        import_model(file, "net", "mse")
    assert caught.value.code == "MBC303" and words in caught.value.message

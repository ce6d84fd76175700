"""Small models in torch for the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import mbc

torch = pytest.importorskip("torch", reason="the loop is one of PyTorch, which is not installed")
nn = torch.nn
IMAGES = torch.randn(4, 3, 9, 11, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 3, 4, 1])


class Net(nn.Module):
    """A convolution, `body`, and a classifier of 5 classes."""

    def __init__(self, body: Callable[[Any], Any] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        self.body: Any = body

    def forward(self, x: Any) -> Any:
        return self.head(self.body(self.first(x)))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer_of(model: Any, **other: Any) -> Any:
    given = {"loss": nn.CrossEntropyLoss(), "device": "cpu", "precision": "fp64", "progress": False} | other
    optimizer = given.pop("optimizer", None) or sgd(model)
    return mbc.from_torch(model, given.pop("example", IMAGES), optimizer=optimizer, **given)


def train_beside(
    model: Any, loss_of: Callable[[Any], Any] | None = None, inputs: Sequence[Any] = (IMAGES,), **other: Any
) -> Any:
    """Train a model by mbc and its copy by torch in float64, and assert that losses and weights agree."""
    judge = loss_of or (lambda output: nn.functional.cross_entropy(output, LABELS))
    targets = other.pop("given", (LABELS,))
    twin = copy.deepcopy(model).double().train()
    optimizer = sgd(twin)
    with trainer_of(model, example=tuple(inputs), **other) as trainer:
        for _ in range(3):
            optimizer.zero_grad()
            wanted = judge(twin(*[x.double() for x in inputs]))
            wanted.backward()
            optimizer.step()
            assert float(trainer.step(*inputs, *targets)) == pytest.approx(wanted.item(), rel=1e-9)
    for key, tensor in twin.state_dict().items():
        assert torch.allclose(model.state_dict()[key].to(tensor.dtype), tensor, rtol=1e-6, atol=1e-7), key
    return trainer

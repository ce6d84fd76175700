"""The model and the data of all scripts: a small network, and the 1,797 handwritten digits of scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAINED, TESTED = 1397, 400  # images
Loader = DataLoader[tuple[torch.Tensor, ...]]


def loaders() -> tuple[Loader, Loader]:
    """Return a loader of mini-batches of 64 for training, shuffled in each epoch, and a loader of the test images."""
    digits: Any = load_digits()  # a Bunch; its stub says a tuple, too
    data = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    )
    train, test = (torch.utils.data.Subset(data, part) for part in (range(TRAINED), range(TRAINED, TRAINED + TESTED)))
    order = torch.Generator().manual_seed(0)
    return DataLoader(train, 64, shuffle=True, drop_last=True, generator=order), DataLoader(test, 64)


def network() -> nn.Module:
    """Return a network from [N, 1, 8, 8] to ten logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, test: Loader) -> float:
    """Return the share of the test images that the model classifies correctly, in eval mode."""
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        right = sum(int((model(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in test)
    model.train()
    return right / TESTED

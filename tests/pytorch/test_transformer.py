"""A small vision transformer in a training loop, without weight decay of one-dimensional parameters."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mbc

torch = pytest.importorskip("torch", reason="the loop is one of PyTorch, which is not installed")
nn = torch.nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.forward_layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Any) -> Any:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.forward_layers(self.after(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, stride=2)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(0.02 * torch.randn(1, 10, 16))
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def adamw(model: Any) -> Any:
    parameters = list(model.parameters())
    decayed, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=2e-3, weight_decay=0.05)


def test_its_losses_and_outputs_are_those_of_torch():
    torch.manual_seed(0)
    theirs = Transformer()
    ours = copy.deepcopy(theirs)
    one, images, labels = adamw(theirs), torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))
    with mbc.from_torch(ours, images, loss=nn.CrossEntropyLoss(), optimizer=adamw(ours), device="cpu") as trainer:
        assert trainer.source.count("|> attention(2)") == 1, "one block, used twice"
        for _ in range(10):
            one.zero_grad()
            wanted = nn.functional.cross_entropy(theirs(images), labels)
            wanted.backward()
            one.step()
            assert float(trainer.step(images, labels)) == pytest.approx(wanted.item(), rel=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(ours.eval()(images), theirs.eval()(images), rtol=1e-3, atol=1e-4)

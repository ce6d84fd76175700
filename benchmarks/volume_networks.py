"""nnU-Net's networks for volumes and their loss, in plain PyTorch, with the parameters of mbc's examples.

As in the examples, convolutions have no bias where an instance norm, which would remove it, comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

SMOOTH = 1e-5

Sides = tuple[int, int, int]


def normalised(inputs: int, outputs: int, kernel: Sides, stride: Any = 1) -> nn.Sequential:
    """Return a convolution with instance norm."""
    d, h, w = kernel
    conv = nn.Conv3d(inputs, outputs, kernel, stride, (d // 2, h // 2, w // 2), bias=False)
    return nn.Sequential(conv, nn.InstanceNorm3d(outputs, affine=True))


def activated(inputs: int, outputs: int, kernel: Sides, stride: Any = 1) -> nn.Sequential:
    """Return a convolution with instance norm and leaky ReLU."""
    return normalised(inputs, outputs, kernel, stride).append(nn.LeakyReLU(inplace=True))


class Residual(nn.Module):
    """A residual block; its shortcut pools, and has a convolution where the channels change."""

    def __init__(self, inputs: int, outputs: int, kernel: Sides, stride: Sides) -> None:
        """Create the layers."""
        super().__init__()
        self.body = activated(inputs, outputs, kernel, stride).append(normalised(outputs, outputs, kernel))
        self.shortcut = nn.Sequential(nn.AvgPool3d(stride) if max(stride) > 1 else nn.Identity())
        if inputs != outputs:
            self.shortcut.append(normalised(inputs, outputs, (1, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches, activated."""
        return nn.functional.leaky_relu(self.body(x) + self.shortcut(x), inplace=True)


class VolumeNetwork(nn.Module):
    """nnU-Net's plain network, or, with `blocks` of each stage, its residual encoder network."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Create the layers.

        Args:
            settings: The parameters of mbc's example by name.
        """
        super().__init__()
        features, kernels, strides = settings["features"], settings["kernels"], settings["strides"]
        blocks, inputs = settings.get("blocks"), settings["channels"]
        self.stem = activated(inputs, features[0], kernels[0]) if blocks else nn.Identity()
        widths = (features[0] if blocks else inputs, *features)
        self.encoder = nn.ModuleList()
        for s, (before, after) in enumerate(pairwise(widths)):
            layer, count = (Residual, blocks[s]) if blocks else (activated, 2)
            rest = (layer(after, after, kernels[s], (1, 1, 1)) for _ in range(count - 1))
            self.encoder.append(nn.Sequential(layer(before, after, kernels[s], strides[s]), *rest))
        self.up, self.decoder, self.heads = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for s, (width, lower) in enumerate(pairwise(features)):
            self.up.append(nn.ConvTranspose3d(lower, width, strides[s + 1], strides[s + 1]))
            joined = activated(2 * width, width, kernels[s])
            self.decoder.append(joined if blocks else joined.append(activated(width, width, kernels[s])))
            if s < len(features) - 2:
                self.heads.append(nn.Conv3d(width, settings["classes"], 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of all resolutions, the finest first."""
        x, skips, logits = self.stem(x), list[Tensor](), list[Tensor]()
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for s in reversed(range(len(self.up))):
            x = self.decoder[s](torch.cat((self.up[s](x), skips[s]), 1))
            if s < len(self.heads):
                logits.append(self.heads[s](x))
        return logits[::-1]


def supervised_loss(logits: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of Dice and cross entropy of all resolutions; each weight is half of that before."""
    weights = [2.0**-i for i in range(len(logits))]
    losses = [w * _loss(x, target) for w, x, target in zip(weights, logits, targets, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return Dice, over the batch and without background, plus cross entropy."""
    probabilities = logits.softmax(1)
    with torch.no_grad():
        one_hot = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, target[:, None], 1)
    axes = (0, 2, 3, 4)
    overlap, size, target_size = (t.sum(axes)[1:] for t in (probabilities * one_hot, probabilities, one_hot))
    dice = (2 * overlap + SMOOTH) / (size + target_size + SMOOTH)
    return 1 - dice.mean() + nn.functional.cross_entropy(logits, target)

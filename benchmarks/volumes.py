"""Random networks along one, two and three spatial axes, through export, import and interpreter, in fp64.

A network has 2 to 5 drawn layers: convolutions, transposed ones, pools, norms, resizing, padding, cropping, dropout,
pixel shuffle. Their strides, groups, dilation, padding, modes and parameters are drawn, too. Outputs, loss and all
gradients are compared with PyTorch's within 1e-9 relative (`exactness.py`). Needs torch, no GPU.

    python benchmarks/volumes.py --networks 2000 [--ranks 1,3] [--seed 0] [--results]

Prints how many networks have which verdict, and for each number of axes the networks with each layer and each of its
traits (`traits_of`); the exit code is 1 if one differs. `--results` also writes `results/volumes.json`.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch  # pyright: ignore[reportMissingImports]
from exactness import judge
from record import show, start, write
from torch import nn  # pyright: ignore[reportMissingImports]

N = TypeVar("N", int, float)
MOST_PIXELS = (16, 9, 7)  # along each axis, by the number of axes
MOST_ELEMENTS = 4000  # of a sample between two layers
SMALLEST_RATE = 1e-12  # of dropout: nothing is dropped, since mbc and PyTorch draw different numbers
TRAITS = {
    "groups": r"groups=[2-9]", "dilation": r"dilation=[(\d, ]*[2-9]", "stride": r"stride=[(\d, ]*[2-9]",
    "output padding": r"output_padding=[(\d, ]*[1-9]", "asymmetric": r"Pad\dd\((padding=)?\((\d, \d, )*(\d), (?!\3)",
    "same": "padding=same", "constant": "ConstantPad", "reflect": "(?i)reflect", "replicate": "(?i)replicat",
    "circular": "(?i)circular", "ceil mode": "ceil_mode=True", "padding counts": "count_include_pad=True",
    "average": "AdaptiveAvg", "largest": "AdaptiveMax",
    "without parameters": "affine=False", "without statistics": "track_running_stats=False",
    "nearest": "mode='nearest'", "nearest-exact": "nearest-exact", "linear": "linear'", "bicubic": "bicubic",
    "aligned corners": "corners=True", "whole factors": r"scale_factor=\((\d\.0,? ?)+\)",
    "other factors": r"scale_factor=\([^)]*\.[1-9]",
    "in eval mode": "training=False", "of elements": r"Dropout\(", "of channels": r"Dropout\dd",
}  # fmt: skip


def frozen(layer: nn.Module) -> nn.Module:
    """Return the layer, which stays in evaluation mode when its model is trained."""
    layer.eval()
    layer.train = lambda mode=True: layer
    return layer


@dataclass
class Network:
    """A network being drawn: its layers and their names."""

    random: random.Random
    rank: int
    x: torch.Tensor
    layers: list[nn.Module] = field(default_factory=list[nn.Module])
    names: list[str] = field(default_factory=list[str])
    traits: list[str] = field(default_factory=list[str])

    @property
    def channels(self) -> int:
        """Channels of the last result."""
        return self.x.shape[1]

    def axes(self, *choices: N) -> tuple[N, ...]:
        """Draw a number for each spatial axis."""
        return tuple(self.random.choice(choices) for _ in range(self.rank))

    def of_rank(self, name: str) -> Callable[..., nn.Module]:
        """Return PyTorch's class of layers for this number of axes."""
        return getattr(nn, f"{name}{self.rank}d")

    def sides(self, most: int) -> tuple[int, ...]:
        """Draw padding before and after each axis."""
        return tuple(self.random.randint(0, most) for _ in range(2 * self.rank))


class PixelShuffle(nn.Module):
    """Channels as pixels of blocks along every axis where the factors divide them, else pixels as channels."""

    def __init__(self, factor: tuple[int, ...]) -> None:
        """Create the module for a factor along each axis."""
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its pixels shuffled."""
        (rows, channels, *size), rank, sides = x.shape, len(self.factor), range(len(self.factor))
        if channels % math.prod(self.factor) == 0:
            order = [axis for side in sides for axis in (2 + rank + side, 2 + side)]
            size = [n * k for n, k in zip(size, self.factor, strict=True)]
            return x.reshape(rows, -1, *self.factor, *x.shape[2:]).permute(0, 1, *order).reshape(rows, -1, *size)
        size = [n // k for n, k in zip(size, self.factor, strict=True)]
        blocks = x.reshape(rows, channels, *(n for pair in zip(size, self.factor, strict=True) for n in pair))
        order = [*(3 + 2 * side for side in sides), *(2 + 2 * side for side in sides)]
        return blocks.permute(0, 1, *order).reshape(rows, -1, *size)


def _conv(n: Network) -> nn.Module:
    groups = n.random.choice([g for g in (1, 1, 2, n.channels) if n.channels % g == 0])
    outputs = groups * n.random.randint(1, 3 if groups < 4 else 1)
    modes = n.random.choice(("zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
    conv = n.of_rank("Conv")(
        n.channels, outputs, n.axes(1, 2, 3), n.axes(1, 1, 2), n.axes(0, 1), n.axes(1, 1, 2), groups,
        bias=n.random.random() < 0.5, padding_mode=modes,
    )  # fmt: skip
    return nn.Sequential(n.of_rank("ZeroPad")(n.sides(2)), conv) if n.random.random() < 0.4 else conv


def _conv_same(n: Network) -> nn.Module:
    return n.of_rank("Conv")(n.channels, n.random.randint(1, 4), n.axes(1, 2, 3), padding="same", dilation=n.axes(1, 2))


def _conv_transpose(n: Network) -> nn.Module:
    groups = 2 if n.channels % 2 == 0 and n.random.random() < 0.5 else 1
    stride = n.axes(1, 2, 3)
    return n.of_rank("ConvTranspose")(
        n.channels, groups * n.random.randint(1, 2), n.axes(2, 3), stride, n.axes(0, 1),
        tuple(n.random.randrange(step) for step in stride), groups, dilation=n.axes(1, 1, 2),
    )  # fmt: skip


def _max_pool(n: Network) -> nn.Module:
    return n.of_rank("MaxPool")(
        n.axes(2, 3), n.axes(1, 2), n.axes(0, 1), n.axes(1, 1, 2), ceil_mode=n.random.random() < 0.4
    )


def _avg_pool(n: Network) -> nn.Module:
    kernel, stride, pad = (
        n.axes(*choices)[0] if n.rank == 1 else n.axes(*choices) for choices in ((2, 3), (1, 2), (0, 1))
    )
    return n.of_rank("AvgPool")(
        kernel, stride, pad, ceil_mode=n.random.random() < 0.4, count_include_pad=n.random.random() < 0.5
    )


def _adaptive_pool(n: Network) -> nn.Module:
    return n.of_rank(n.random.choice(("AdaptiveAvgPool", "AdaptiveMaxPool")))(n.axes(1, 2, 3, 4))


def _global_pool(n: Network) -> nn.Module:
    return n.of_rank(n.random.choice(("AdaptiveAvgPool", "AdaptiveMaxPool")))((1,) * n.rank)


def _batch_norm(n: Network) -> nn.Module:
    affine, tracked = n.random.random() < 0.7, n.random.random() < 0.7
    norm: Any = n.of_rank("BatchNorm")(n.channels, affine=affine, track_running_stats=tracked)
    if not tracked or n.random.random() < 0.6:
        return norm
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    return frozen(norm)


def _instance_norm(n: Network) -> nn.Module:
    norm = n.of_rank("InstanceNorm")(n.channels, eps=0.01, affine=n.random.random() < 0.7)
    return frozen(norm) if n.random.random() < 0.3 else norm


def _group_norm(n: Network) -> nn.Module:
    groups = n.random.choice([g for g in range(1, n.channels + 1) if n.channels % g == 0])
    return nn.GroupNorm(groups, n.channels, eps=0.01, affine=n.random.random() < 0.8)


def _layer_norm(n: Network) -> nn.Module:
    return nn.LayerNorm(n.x.shape[1:], eps=0.01, elementwise_affine=n.random.random() < 0.7)


def _resize(n: Network) -> nn.Module:
    smooth = ("linear", "bilinear", "trilinear")[n.rank - 1]
    mode = n.random.choice(("nearest", "nearest-exact", smooth, smooth, *("bicubic",) * (n.rank == 2)))
    corners = n.random.random() < 0.5 if mode in (smooth, "bicubic") else None
    if n.random.random() < 0.4:
        return nn.Upsample(n.axes(2, 3, 5, 7), mode=mode, align_corners=corners)
    factors = n.axes(1, 2, 3) if n.random.random() < 0.5 else n.axes(0.6, 1.3, 1.5, 1.7, 2.4)
    return nn.Upsample(None, factors, mode, corners, recompute_scale_factor=n.random.random() < 0.2)


def _padding(n: Network) -> nn.Module:
    kind = n.random.choice(("ZeroPad", "ConstantPad", "ReflectionPad", "ReplicationPad", "CircularPad"))
    return n.of_rank(kind)(n.sides(1), *(0.5,) * (kind == "ConstantPad"))


def _dropout(n: Network) -> nn.Module:
    layer = n.random.choice((nn.Dropout, n.of_rank("Dropout")))
    return layer(0.0 if n.random.random() < 0.2 else SMALLEST_RATE)


def _pixel_shuffle(n: Network) -> nn.Module:
    factor = n.axes(1, 2)
    if n.random.random() < 0.5:
        return PixelShuffle(factor)
    return nn.Sequential(n.of_rank("Conv")(n.channels, 2 * math.prod(factor), 1), PixelShuffle(factor))


def _crop(n: Network) -> nn.Module:
    return n.of_rank("ZeroPad")(tuple(-side for side in n.sides(1)))


def _response_norm(n: Network) -> nn.Module:
    return nn.LocalResponseNorm(n.random.choice((1, 2, 3, 5)), alpha=0.1)


LAYERS: dict[str, Callable[[Network], nn.Module]] = {
    f.__name__.removeprefix("_"): f
    for f in (
        _conv, _conv_same, _conv_transpose, _max_pool, _avg_pool, _adaptive_pool, _global_pool, _batch_norm,
        _instance_norm, _group_norm, _layer_norm, _resize, _padding, _crop, _pixel_shuffle, _response_norm, _dropout,
    )
}  # fmt: skip


def traits_of(layer: nn.Module) -> list[str]:
    """Return the settings of a layer that are counted, as `TRAITS` reads them from its text."""
    parts = [
        f"{type(m).__name__}({m.extra_repr()}, corners={vars(m).get('align_corners')}, training={m.training})"
        for m in layer.modules()
    ]
    return [trait for trait, pattern in TRAITS.items() if re.search(pattern, "; ".join(parts))]


def drawn(seed: int, number: int, rank: int) -> tuple[nn.Module, torch.Tensor, Network]:
    """Draw a network and its input; the first layer is that whose turn it is, so that each is drawn equally often."""
    rng = random.Random(f"{seed}/{number}/{rank}")
    torch.manual_seed(rng.getrandbits(48))
    most = MOST_PIXELS[rank - 1]
    x = torch.randn(rng.randint(2, 3), rng.randint(1, 4), *(rng.randint(4, most) for _ in range(rank)))
    n = Network(rng, rank, x.double())
    wanted, kinds = rng.randint(2, 5), list(LAYERS)
    for _ in range(60):
        if len(n.names) == wanted:
            break
        kind = rng.choice(kinds) if n.names else kinds[number % len(kinds)]
        try:
            layer = LAYERS[kind](n).double()
            for parameter in layer.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)  # an offset of 0 would tie with zeros around
            y = layer(n.x.clone())
        except (RuntimeError, ValueError, AssertionError):
            continue  # PyTorch refuses these settings for this tensor
        if not 0 < y[0].numel() <= MOST_ELEMENTS:
            continue
        n.x = y.detach().tanh()
        n.layers += [layer, nn.Tanh()]
        n.names.append(kind)
        n.traits += [kind, *(f"{kind}, {trait}" for trait in traits_of(layer))]
    if any(not part.training for layer in n.layers for part in layer.modules()):
        n.layers.append(nn.Dropout(SMALLEST_RATE))  # shows in the exported program that the model is trained
    head = n.of_rank("Conv")(n.channels, 2, 1)
    return nn.Sequential(*n.layers, head).float().train(), x, n


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=2000)
    parser.add_argument("--ranks", default="1,3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", action="store_true", help="also write results/volumes.json")
    options = parser.parse_args()
    ranks = [int(rank) for rank in options.ranks.split(",")]
    verdicts: Counter[str] = Counter()
    counts: dict[str, Counter[int]] = {name: Counter() for name in LAYERS}
    for number in range(options.networks):
        rank = ranks[number % len(ranks)]
        model, x, network = drawn(options.seed, number // len(ranks), rank)
        judged = judge(model, [x], "mse")
        verdicts[judged.kind] += 1
        if judged.kind == "equal":
            for trait in set(network.traits):
                counts.setdefault(trait, Counter())[rank] += 1
        else:
            print(f"{options.seed}/{number // len(ranks)}, {rank} axes, {', '.join(network.names)}: {judged.kind}")
            print(f"  {judged.detail}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in verdicts.most_common()))
    rows = [{"name": name, **{f"along {rank}": counts[name][rank] for rank in ranks}} for name in sorted(counts)]
    show(rows, ("name", *(f"along {rank}" for rank in ranks)))
    if options.results:
        write("volumes", rows, seed=options.seed, verdicts=verdicts)
    sys.exit(int(verdicts["equal"] + verdicts["refused"] < options.networks))


if __name__ == "__main__":
    start(main)

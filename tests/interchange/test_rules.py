"""Every rule: what a small model of it computes here and in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interchange.models import Model, Tensor, compared, nn, torch

F = torch.nn.functional


class Of(nn.Module):
    """A function as a model, behind a convolution, so that its input is nobody's but the model's."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 6, **held: Model) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3)
        self.function = function
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


class LayerScale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.75)
        return x * noise.div_(0.75)


class ChannelsLast(nn.Module):
    """As ConvNeXt's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(6, eps=1e-6), nn.Linear(6, 24), nn.Linear(24, 6, bias=False)
        self.scale = LayerScale(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(self.shrink(F.gelu(self.grow(self.norm(x.permute(0, 2, 3, 1))))))
        return x + y.permute(0, 3, 1, 2)


class Gate(nn.Module):
    """As squeeze-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class GateOfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return x * torch.sigmoid(self.fc(y)).view(x.shape[0], 6, 1, 1)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(self.conv(x)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
    "conv same": lambda: nn.Conv2d(6, 6, (4, 3), padding="same"),
    "conv depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "conv_transpose": lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
    "batch_norm": lambda: nn.BatchNorm2d(6, eps=1e-3, momentum=0.01),
    "batch_norm without scale": lambda: nn.BatchNorm2d(6, affine=False),
    "group_norm": lambda: nn.GroupNorm(3, 6, eps=1e-4),
    "relu": lambda: nn.ReLU(), "relu in place": lambda: nn.ReLU(inplace=True), "relu6": lambda: nn.ReLU6(),
    "leaky_relu": lambda: nn.LeakyReLU(0.2), "elu": lambda: nn.ELU(0.7), "gelu": lambda: nn.GELU(),
    "silu": lambda: nn.SiLU(), "mish": lambda: nn.Mish(), "hardswish": lambda: nn.Hardswish(),
    "hardsigmoid": lambda: nn.Hardsigmoid(), "sigmoid": lambda: nn.Sigmoid(), "tanh": lambda: nn.Tanh(),
    "softplus": lambda: nn.Softplus(), "dropout": lambda: nn.Dropout(0.3), "no dropout": lambda: nn.Dropout(0.0),
    "drop_path": DropPath, "layer scale": lambda: LayerScale(6, 1, 1),
    "layer scale of 4": lambda: LayerScale(1, 6, 1, 1),
    "channels last": ChannelsLast, "gate": Gate, "gate of a linear layer": GateOfLinear, "shared": Shared,
    "maxpool": lambda: nn.MaxPool2d(3, 2, 1), "maxpool ceil": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "avgpool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), "avgpool wide": lambda: nn.AvgPool2d((2, 3)),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(1), "adaptive to a part": lambda: nn.AdaptiveAvgPool2d((5, 2)),
    "adaptive to all": lambda: nn.AdaptiveAvgPool2d(10), "adaptive maximum": lambda: nn.AdaptiveMaxPool2d((5, 2)),
    "nearest": lambda: nn.Upsample(scale_factor=2), "nearest to a size": lambda: nn.Upsample((15, 13)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear to a size": lambda: nn.Upsample((15, 13), mode="bilinear"),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(600, 4)), "flatten": lambda: nn.Flatten(),
    "zeros around": lambda: nn.Sequential(nn.ZeroPad2d((1, 2, 0, 3)), nn.Conv2d(6, 6, 3, stride=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_what_it_is_in_torch(name: str, tmp_path: Path) -> None:
    layer = LAYERS[name]()
    torch.manual_seed(0)
    compared(tmp_path, Of(lambda x: layer(x), layer=layer), torch.randn(2, 3, 12, 12))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + torch.tanh(x), "sum in place": lambda x: torch.tanh(x).add_(x),
    "scaled sum": lambda x: torch.add(x, torch.tanh(x), alpha=0.5), "difference": lambda x: x - torch.tanh(x),
    "scaled difference": lambda x: torch.sub(torch.tanh(x), x, alpha=3), "product": lambda x: x * torch.tanh(x),
    "numbers": lambda x: (2 * x + 1 - 0.5) / 4, "one less": lambda x: 1 - x, "negative": lambda x: -x,
    "nothing": lambda x: x * 1 + 0, "hard swish by hand": lambda x: x * F.relu6(x + 3) / 6,
    "clamp": lambda x: x.clamp(0, 6), "at least 0": lambda x: x.clamp(min=0), "hardtanh": lambda x: F.hardtanh(x, 0, 6),
    "concat": lambda x: torch.cat((x, torch.tanh(x), x), 1),
    "concat of the last": lambda x: torch.cat((x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)), -1).permute(0, 3, 1, 2),
    "dense": lambda x: torch.cat((x, torch.tanh(x), torch.relu(torch.cat((x, torch.tanh(x)), 1))), 1),
    "mean": lambda x: x.mean((2, 3)), "mean kept": lambda x: x.mean((-1, -2), keepdim=True),
    "mean of the last": lambda x: x.permute(0, 2, 3, 1).mean((1, 2)), "view": lambda x: x.view(2, -1),
    "there and back": lambda x: x.reshape(2, 600).view(2, 6, 10, 10),
    "squeezed": lambda x: x.mean((2, 3), True).squeeze(),
    "two": lambda x: (x.relu(), x.tanh()),  # pyright: ignore[reportReturnType]
    "contiguous": lambda x: x.contiguous().clone(), "padded twice": lambda x: F.avg_pool2d(x, 3, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_what_it_is_in_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    compared(tmp_path, Of(FUNCTIONS[name]), torch.randn(2, 3, 12, 12))


def test_layer_norm_of_features_and_two_inputs(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.norm = nn.Linear(5, 4), nn.Linear(3, 4), nn.LayerNorm(4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.norm(self.left(a) + self.right(b))

    imported = compared(tmp_path, Net(), torch.randn(2, 5), torch.randn(2, 3))
    assert imported.network.inputs == (("a", (2, 5)), ("b", (2, 3)))


def test_stochastic_depth_is_drop_path_and_growing_concatenations_grow(tmp_path: Path) -> None:
    assert "drop_path(0.25)" in compared(tmp_path, Of(DropPath()), torch.randn(2, 3, 12, 12)).source
    grown = compared(tmp_path, Of(FUNCTIONS["dense"]), torch.randn(2, 3, 12, 12)).source
    assert grown.count("concat") == 2 and "(x, y, z)" not in grown


def test_a_layer_that_is_called_twice_is_one_layer(tmp_path: Path) -> None:
    imported = compared(tmp_path, Of(lambda x: x, shared=Shared()), torch.randn(2, 3, 12, 12))
    assert [key.name for key in imported.network.keys if key.state == ""][:1] == ["shared.conv.weight"]
    shared = Shared()
    source = compared(tmp_path, Of(lambda x: shared(x), shared=shared), torch.randn(2, 3, 12, 12)).source
    assert source.count("@shared.conv") == 1

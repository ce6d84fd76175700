"""Every import rule: a small model of it computes torch's results."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mbc.ops import POINTWISE
from mbc.ops.framework_calls import function_of
from tests.interchange.models import Model, Of, Tensor, compared, lowered, nn, torch
from tests.ops.pointwise_inputs import examples, needs_positive

F = torch.nn.functional
behind = partial(Of, channels=6, padding=0)


class LayerScale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Positions(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return self.gamma - x


class Buffered(nn.Module):
    """A model with a number for each channel that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class EfficientAttention(nn.Module):
    """The channel attention of ECA, which is a convolution over the channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.mean((2, 3)).view(x.shape[0], 1, -1))
        return x * torch.sigmoid(y.view(x.shape[0], -1, 1, 1)).expand_as(x)


class ResponseNorm(nn.Module):
    """The global response normalization of ConvNeXt-V2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        size = size / (size.mean(dim=1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias.view(1, -1, 1, 1), self.weight.view(1, -1, 1, 1), x * size)


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.75)
        return x * noise.div_(0.75)


class ChannelsLast(nn.Module):
    """A block of ConvNeXt without its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(6, eps=1e-6), nn.Linear(6, 24), nn.Linear(24, 6, bias=False)
        self.scale = LayerScale(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(self.shrink(F.gelu(self.grow(self.norm(x.permute(0, 2, 3, 1))))))
        return x + y.permute(0, 3, 1, 2)


class Gate(nn.Module):
    """A gate as in squeeze-and-excitation."""

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


LAYERS: dict[str, Callable[[], Model]] = {
    "conv": lambda: nn.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False),
    "conv same": lambda: nn.Conv2d(6, 6, (4, 3), padding="same"),
    "conv depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "conv_transpose": lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
    "batch_norm": lambda: nn.BatchNorm2d(6, eps=1e-3, momentum=0.01),
    "batch_norm without scale": lambda: nn.BatchNorm2d(6, affine=False),
    "batch_norm without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "dropout2d": lambda: nn.Dropout2d(0.3),
    "group_norm": lambda: nn.GroupNorm(3, 6, eps=1e-4),
    "relu": lambda: nn.ReLU(), "relu in place": lambda: nn.ReLU(inplace=True), "relu6": lambda: nn.ReLU6(),
    "leaky_relu": lambda: nn.LeakyReLU(0.2), "elu": lambda: nn.ELU(0.7), "gelu": lambda: nn.GELU(),
    "silu": lambda: nn.SiLU(), "mish": lambda: nn.Mish(), "hardswish": lambda: nn.Hardswish(),
    "hardsigmoid": lambda: nn.Hardsigmoid(), "sigmoid": lambda: nn.Sigmoid(), "tanh": lambda: nn.Tanh(),
    "softplus": lambda: nn.Softplus(), "dropout": lambda: nn.Dropout(0.3), "no dropout": lambda: nn.Dropout(0.0),
    "drop_path": DropPath, "layer scale": lambda: LayerScale(6, 1, 1),
    "layer scale of 4": lambda: LayerScale(1, 6, 1, 1),
    "channels last": ChannelsLast, "gate": Gate, "gate of a linear layer": GateOfLinear, "shared": Shared,
    "maxpool dilated": lambda: nn.MaxPool2d(3, 2, 1, dilation=2), "maxpool": lambda: nn.MaxPool2d(3, 2, 1),
    "maxpool ceil": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "avgpool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), "avgpool wide": lambda: nn.AvgPool2d((2, 3)),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(1), "adaptive to a part": lambda: nn.AdaptiveAvgPool2d((5, 2)),
    "adaptive to all": lambda: nn.AdaptiveAvgPool2d(10), "adaptive maximum": lambda: nn.AdaptiveMaxPool2d((5, 2)),
    "nearest": lambda: nn.Upsample(scale_factor=2), "nearest to a size": lambda: nn.Upsample((15, 13)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear to a size": lambda: nn.Upsample((15, 13), mode="bilinear"),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(600, 4)), "flatten": lambda: nn.Flatten(),
    "scale of the last": lambda: LayerScale(10), "scale of pixels": lambda: LayerScale(6, 10, 10),
    "scale of all": lambda: LayerScale(1), "positions": lambda: Positions(1, 6, 10, 10), "buffer": lambda: Buffered(),
    "prelu": lambda: nn.PReLU(), "prelu of channels": lambda: nn.PReLU(6),
    "instance_norm": lambda: nn.InstanceNorm2d(6, affine=True), "pixel shuffle": lambda: nn.PixelShuffle(1),
    "pixel unshuffle": lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)),
    "convolution of channels": EfficientAttention, "response norm": lambda: ResponseNorm(),
    "channel shuffle": lambda: nn.ChannelShuffle(2), "adaptive of unlike windows": lambda: nn.AdaptiveAvgPool2d((7, 3)),
    "adaptive maximum of unlike windows": lambda: nn.AdaptiveMaxPool2d((7, 3)),
    "global maximum": lambda: nn.AdaptiveMaxPool2d(1),
    "reflected": lambda: nn.ReflectionPad2d((1, 2, 0, 3)), "replicated": lambda: nn.ReplicationPad2d(2),
    "zeros around": lambda: nn.Sequential(nn.ZeroPad2d((1, 2, 0, 3)), nn.Conv2d(6, 6, 3, stride=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_torch(name: str, tmp_path: Path) -> None:
    layer = LAYERS[name]()
    torch.manual_seed(0)
    compared(tmp_path, behind(lambda x: layer(x), layer=layer), torch.randn(2, 3, 12, 12))


def attended(parts: Tensor) -> Tensor:
    """Return the sum of the parts, each times the softmax of the parts' means, as in selective kernels and ResNeSt."""
    return (parts * parts.mean((3, 4), keepdim=True).softmax(1)).sum(1)


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
    "shuffle": lambda x: x.view(2, 3, 2, 10, 10).transpose(1, 2).contiguous().view(2, 6, 10, 10),
    "views": lambda x: torch.tanh(x.view(2, 3, 2, 100)).reshape(2, 2, 3, 10, 10) + 1,
    "permutation": lambda x: torch.tanh(x.permute(0, 3, 1, 2)).transpose(1, -1),
    "transposed last": lambda x: torch.relu(x.permute(0, 2, 3, 1).transpose(-1, 1)),
    "chunks": lambda x: x.chunk(3, 1)[0] * x.chunk(3, 1)[2], "one chunk": lambda x: x.chunk(2, 1)[1],
    "chunks of the last": lambda x: torch.add(*x.permute(0, 2, 3, 1).chunk(2, -1)).permute(0, 3, 1, 2),
    "parts": lambda x: torch.cat(x.split([1, 3, 2], 1)[::-1], 1), "equal parts": lambda x: torch.cat(x.split(4, 1), 1),
    "slices": lambda x: x[:, 1:-1, ::2, 3:], "one of an axis": lambda x: x[:, :, 3],
    "packed": lambda x: x.flatten(2).transpose(1, 2).reshape(2, 100, 3, 2).permute(2, 0, 3, 1)[1].tanh(),
    "stack": lambda x: torch.stack((x, torch.tanh(x)), 2), "concat of rows": lambda x: torch.cat((x, x.tanh()), 2),
    "expanded": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)).expand_as(x),
    "attention of parts": lambda x: attended(x.view(2, 2, 3, 10, 10)),
    "sums of sums": lambda x: (x + x.tanh() + x.relu()) + (x.relu() + (x + x.tanh()).relu() + x.sigmoid()),
    "quotient": lambda x: x / (1 + torch.exp(x)), "number by tensor": lambda x: 2 / (2 + torch.tanh(x)),
    "broadcast": lambda x: x - x.mean(1, keepdim=True), "both broadcast": lambda x: x[:, :1] * x[:, :, :1],
    "padded plus one": lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1)) + 1, 2),
    "one less padded": lambda x: F.avg_pool2d(1 - F.pad(x, (1, 1, 1, 1)), 2),
    "padded unlike": lambda x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0)) + F.pad(x, (0, 1, 0, 1)), 2),
    "sum of axes": lambda x: x.sum((1, 3)), "largest": lambda x: x.amax((2, 3), keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "softmax of the last": lambda x: x.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2),
    "square root": lambda x: torch.sqrt(torch.abs(x) + 1) * torch.log(x.pow(2) + 1),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1),
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"), "products of matrices": lambda x: x @ x.transpose(-1, -2),
    "nearest by a factor": lambda x: F.interpolate(x, scale_factor=(1.3, 0.7)),
    "exactly nearest": lambda x: F.interpolate(F.interpolate(x, (4, 13), mode="nearest-exact"), scale_factor=1.7),
    "linear by a factor": lambda x: F.interpolate(x.flatten(2), scale_factor=0.37, mode="linear"),
    "corners": lambda x: F.interpolate(x, (7, 13), mode="bilinear", align_corners=True),
    "cubic": lambda x: F.interpolate(F.interpolate(x, scale_factor=1.3, mode="bicubic"), (5, 14), mode="bicubic"),
    "cubic corners": lambda x: F.interpolate(x, (7, 13), mode="bicubic", align_corners=True),
    "volumes": lambda x: F.interpolate(
        x.view(2, 3, 2, 10, 10), scale_factor=(1.6, 0.6, 1.3), mode="trilinear", align_corners=True
    ),
    "circular": lambda x: F.pad(F.pad(x, (1, 10, 0, 2), "circular").flatten(2), (3, -2), "circular"),
    "ones around": lambda x: F.avg_pool2d(F.pad(x, (1, 2, -1, 3), value=1.0), 2),
    "least around": lambda x: F.max_pool2d(F.pad(x, (-1, 1, 1, 0), value=-torch.inf), 2),
    "shuffled volumes": lambda x: x.view(2, 3, 2, 5, 2, 2, 5).permute(0, 1, 3, 6, 2, 5, 4).reshape(2, 15, 5, 2, 4),
    "zeros before a pool": lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2),
    "cut off": lambda x: F.pad(x, (-1, -1, -1, 2)),
    "gate flattened": lambda x: torch.tanh(x.mean((2, 3)).view(2, 6, 1, 1)).permute(0, 2, 3, 1),
    "contiguous": lambda x: x.contiguous().clone(), "padded twice": lambda x: F.avg_pool2d(x, 3, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_equals_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    compared(tmp_path, behind(FUNCTIONS[name]), torch.randn(2, 3, 12, 12))


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
    assert "drop_path(0.25)" in compared(tmp_path, behind(DropPath()), torch.randn(2, 3, 12, 12)).source
    grown = compared(tmp_path, behind(FUNCTIONS["dense"]), torch.randn(2, 3, 12, 12)).source
    assert grown.count("concat") == 2 and "(x, y, z)" not in grown


def test_a_layer_that_is_called_twice_is_one_layer(tmp_path: Path) -> None:
    imported = compared(tmp_path, behind(lambda x: x, shared=Shared()), torch.randn(2, 3, 12, 12))
    assert [key.name for key in imported.network.keys if key.state == ""][:1] == ["shared.conv.weight"]
    shared = Shared()
    source = compared(tmp_path, behind(lambda x: shared(x), shared=shared), torch.randn(2, 3, 12, 12)).source
    assert source.count("@shared.conv") == 1


def test_calls_that_functions_declare_come_back_as_these_functions(tmp_path: Path) -> None:
    called = {
        name: partial(function_of(function.calls.torch, {"torch": torch, "F": F}), examples(function)[0])
        for name, function in POINTWISE.items()
        if re.fullmatch(r"(F|torch)\.\w+\(x[^()]*\)", function.calls.torch)  # not an expression of several calls
    }

    def apply(x: Tensor) -> Tensor:
        positive = {name for name in called if needs_positive(POINTWISE[name], examples(POINTWISE[name])[0])}
        return torch.cat([call(x.exp() if name in positive else x) for name, call in called.items()], 1)

    imported = compared(tmp_path, behind(apply), torch.randn(2, 3, 5, 4))
    kinds = {op.kind for op in lowered(imported.source).network.operations}
    missing = ", ".join(sorted(called.keys() - kinds))
    assert not missing, (
        f"an import makes something else of the declared calls of {missing}: add rules (mbc/interchange)"
    )


def test_settings_of_training_come_along(tmp_path: Path) -> None:
    """These settings do not change the evaluation, so a comparison of outputs cannot test them."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.01), nn.Dropout(0.3), DropPath())
    steps = {step.op: step.settings for step in compared(tmp_path, model, torch.rand(2, 3, 5, 5)).network.steps}
    assert steps["bn"]["momentum"] == 0.01 and steps["dropout"]["p"] == 0.3 and steps["drop_path"]["p"] == 0.25

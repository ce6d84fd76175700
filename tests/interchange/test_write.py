"""Sources that an import writes. Tested are blocks for repeated parts, names and labels, and equality of the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import check_source, import_model
from mbc.interchange.source_names import Names, reserved
from mbc.interchange.write import LOSSES
from tests.interchange.models import Model, Tensor, compared, exported, lowered, nn, signature, torch

F = torch.nn.functional


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, 4 * channels, 1, bias=False), nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if inputs != 4 * channels:
            conv = nn.Conv2d(inputs, 4 * channels, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(4, 2), *(Bottleneck(8, 2) for _ in range(2)))
        self.layer2 = nn.Sequential(Bottleneck(8, 4, 2), *(Bottleneck(16, 4) for _ in range(3)))
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.drop(self.pool(x).flatten(1)))


class Inverted(nn.Module):
    """A block whose parts are blocks, with another activation, kernel and gate in each."""

    def __init__(self, channels: int, kernel: int, act: Model) -> None:
        super().__init__()
        wide = 3 * channels
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), act()),
            nn.Sequential(
                nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide), act()
            ),
            nn.Conv2d(wide, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def mobile() -> Model:
    parts = [Inverted(4, 3, nn.ReLU), Inverted(4, 5, nn.Hardswish), Inverted(4, 5, nn.ReLU)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *parts, nn.Conv2d(4, 6, 1), Inverted(6, 3, nn.ReLU))


def same_as_flat(path: Path, source: str) -> None:
    flat = import_model(path / "model.pt2", "net", "mse", flat=True).source
    assert "block " not in flat
    assert signature(lowered(source).network) == signature(lowered(flat).network)


def test_blocks_are_those_that_people_would_write(tmp_path: Path) -> None:
    source = compared(tmp_path, Residual(), torch.randn(2, 3, 16, 16)).source
    assert (
        source.split("\n", 2)[2]
        == """\
block bottleneck(channels) on x {
  y = x |> conv(channels, 1) @conv1 |> bn @bn1 |> relu |> conv(channels, 3, pad=1) @conv2 |> bn @bn2 |> relu
        |> conv(x.shape[1], 1) @conv3 |> bn @bn3
  return y + x |> relu
}

block bottleneck2(channels, stride = 1) on x {
  y = x |> conv(channels, 1) @conv1 |> bn @bn1 |> relu |> conv(channels, 3, stride=stride, pad=1) @conv2 |> bn @bn2
        |> relu |> conv(4 * channels, 1) @conv3 |> bn @bn3
  x = x |> conv(4 * channels, 1, stride=stride) @down.0 |> bn @down.1
  return y + x |> relu
}

network net(batch = 2) {
  input image[batch, 3, 16, 16] : float
  input target[batch, 5] : float
  x = image |> conv(4, 3, stride=2, pad=1, bias=true) @stem |> bottleneck2(2) @layer1.0 |> bottleneck(2) @layer1.1
            |> bottleneck(2) @layer1.2
  x = x |> bottleneck2(4, stride=2) @layer2.0 |> bottleneck(4) @layer2.1 |> bottleneck(4) @layer2.2
        |> bottleneck(4) @layer2.3
  prediction = x |> global_avgpool |> dropout(p=0.1) |> linear(5) @fc
  output prediction
  loss (prediction, target) |> mse
}
"""
    )
    same_as_flat(tmp_path, source)


def test_names_of_parameters_are_torchs(tmp_path: Path) -> None:
    model = Residual()
    network = lowered(compared(tmp_path, model, torch.randn(2, 3, 16, 16)).source).network
    ours = {s.value for s in network.states}
    assert ours == {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}


def test_nested_blocks_with_differences_as_parameters(tmp_path: Path) -> None:
    source = compared(tmp_path, mobile(), torch.randn(2, 3, 12, 12)).source
    assert "kernel // 2" in source and "groups=" in source and "act = relu" in source and "act=hardswish" in source
    assert source.count("\nblock ") >= 2
    same_as_flat(tmp_path, source)


def test_a_block_of_several_tensors_that_gives_several(tmp_path: Path) -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            left, right = self.left(a), self.right(b)
            return left + right, left * right

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.parts = nn.Conv2d(3, 4, 1), nn.ModuleList(Cross() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            a = self.stem(x)
            b = torch.tanh(a)
            for part in self.parts:
                a, b = part(a, b)
            return torch.cat((a, b, b), 1)

    source = compared(tmp_path, Net(), torch.randn(2, 3, 4, 4)).source
    assert "block cross on (x, x1)" in source and "x, y = (x, y) |> cross @parts.2" in source
    same_as_flat(tmp_path, source)


def test_modules_with_parameters_that_have_modules_with_parameters(tmp_path: Path) -> None:
    class Normed(nn.Conv2d):
        def __init__(self, inputs: int) -> None:
            super().__init__(inputs, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    imported = compared(tmp_path, nn.Sequential(Normed(3), Normed(4)), torch.randn(2, 3, 4, 4))
    assert "@own |> bn @norm" in imported.source and "|> normed @0 |> normed @1" in imported.source
    assert {key.name: key.state for key in imported.network.keys}["0.weight"] == "0.own.weight"


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_outputs_of_several_shapes(loss: str, tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fc, self.aux = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.stem(x)
            return self.fc(y.mean((2, 3))), y, self.aux(y.mean((2, 3)))

    source = import_model(exported(tmp_path, Heads(), torch.zeros(2, 3, 8, 8)), "net", loss).source
    assert source.count("\n  loss (") == 3 and source.count(f"|> {loss}\n") == 3
    assert source.count("\n  input target") == 3


def test_names_of_models_that_bodies_have_too(tmp_path: Path) -> None:
    class X(nn.Sequential):
        pass

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = X(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), X(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

        def forward(self, target: Tensor, logits: Tensor) -> Tensor:
            return self.b(self.a(target)) + logits

    imported = compared(tmp_path, Channels(), torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    assert "block x_block on x" in imported.source and "input target2[" in imported.source


def test_names_that_mean_something_are_not_taken(tmp_path: Path) -> None:
    names = Names()
    assert [names.free(n) for n in ("conv", "block", "x", "x", "3d", "a-b", "lambda", "")] == [
        "conv2", "block2", "x", "x2", "_3d", "a_b", "lambda_net", "net",
    ]  # fmt: skip
    assert {"network", "relu", "range", "bilinear", "else"} <= reserved()
    imported = import_model(exported(tmp_path, nn.Conv2d(3, 4, 1), torch.zeros(2, 3, 4, 4)), "class")
    assert "network class_net(" in imported.source and "@weight" in imported.source


def test_a_source_that_is_not_that_of_the_network_is_found(tmp_path: Path) -> None:
    imported = import_model(exported(tmp_path, nn.Sequential(nn.Conv2d(3, 4, 1)), torch.zeros(2, 3, 4, 4)), "net")
    for wrong, words in (("conv(4, 1)", r"'0.bias' is None in the source that was written"), ("conv(", "is refused")):
        text = imported.source.replace("conv(4, 1, bias=true)", wrong)
        with pytest.raises(MbcError, match=f"MBC304: the imported network would differ from the model: .*{words}"):
            check_source(text, imported.network)

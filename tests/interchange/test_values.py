"""Numbers, repetition, parts, writes and regions in a model are imported with torch's results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from tests.interchange.models import Model, Tensor, compared, exported, nn, torch

F = torch.nn.functional
IMAGE = torch.linspace(-2.0, 2.0, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7).sin()


class Behind(nn.Module):
    """A model that applies a function to a convolution with eight channels."""

    def __init__(self, function: Callable[[Tensor], Tensor], **held: Model) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Conv2d(3, 8, 1), function
        self.register_buffer("mask", torch.arange(8).view(1, 8, 1, 1) % 3 == 0)
        for name, module in held.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def shifted(y: Tensor) -> Tensor:
    moved = torch.zeros_like(y)
    moved[:, 2:] = y[:, :-2]
    return moved


def written(y: Tensor) -> Tensor:
    y[:, :, 0] = 0.5
    y[:, 1:3].mul_(2.0)
    y.flatten(2).tanh_()
    return y


def read_after_write(y: Tensor) -> Tensor:
    part = y[:, 0:1]
    y.mul_(0.5)
    return y + part


def without_gradients(y: Tensor) -> Tensor:
    with torch.no_grad():
        mean = y.mean((2, 3), keepdim=True)
    return y - mean


def positions(y: Tensor) -> Tensor:
    table = torch.sin(torch.arange(5.0)[:, None] * torch.ones(7)[None] / 3)
    return y + table[None, None]


@pytest.mark.parametrize(
    "function",
    [
        shifted,
        written,
        read_after_write,
        without_gradients,
        positions,
        lambda y: y.chunk(2, 1)[1],
        lambda y: y.split([2, 3], 2)[0],
        lambda y: y * torch.tensor(0.5) + torch.arange(8.0).view(1, 8, 1, 1),
        lambda y: torch.cat([y, torch.ones(2, 1, 5, 7)], 1)[:, 1:],
        lambda y: y.mean((2, 3), keepdim=True).expand(-1, -1, 5, 7) * y.mean(1, keepdim=True),
        lambda y: F.avg_pool2d(y.mean((2, 3), keepdim=True).expand(-1, -1, 5, 7), 2),
        lambda y: torch.tanh(y[:, :1].expand_as(y)),
        lambda y: y.movedim(1, 3).contiguous().movedim(3, 1),
        lambda y: y.detach() * 0.5 + y,
        lambda y: F.pad(y, (1, 1, 1, 1)).roll(1, 3)[:, :, :, :4],
        lambda y: F.pad(y, (1, 2, 0, 1)).sigmoid(),
        lambda y: F.avg_pool2d(F.pad(F.pad(y, (1, 1, 1, 1)), (-1, 0, 2, -1)), 2),
        lambda y: y * torch.arange(70.0).view(7, 10)[2:7, :7],
        lambda y: y.view(2, 4, 2, 5, 7)[:, :, 1] * 2.0,
        lambda y: F.dropout(y, 0.5, training=False),
        lambda y: torch.sub(y, torch.arange(7.0), alpha=0.5) + torch.add(y, torch.ones(2, 8, 5, 7), alpha=-0.6),
        lambda y: F.max_pool2d(F.pad(y, (0, 1, 1, 0), value=-torch.inf), 3, 2, padding=1),
        lambda y: F.pad(y, (-1, 2, 1, -1), mode="replicate"),
        lambda y: F.pad(y, (2, -1, 0, 1), mode="reflect"),
        lambda y: y.mean((2, 3)).unbind(1)[3],
        lambda y: F.pad(y, (-1, 2, 0, 0), mode="circular"),
        lambda y: y * torch.floor(torch.tensor([0.7]) / 0.1),
        lambda y: y.unbind(1)[5].roll(-2, 2).unsqueeze(1),
        lambda y: y * (torch.arange(7.0) > 2).float(),
        lambda y: F.max_pool2d(y, 2, dilation=2, ceil_mode=True),
    ],
)
def test_a_function_of_a_tensor(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    compared(tmp_path, Behind(function), IMAGE)


def test_a_buffer_is_a_mask(tmp_path: Path) -> None:
    class Masked(Behind):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.mask.expand(2, -1, 1, 1)

    compared(tmp_path, Masked(lambda y: y), IMAGE)


def test_a_convolution_by_a_buffer_is_not_trained(tmp_path: Path) -> None:
    class Blurred(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)
            self.register_buffer("blur", torch.full((3, 1, 2, 2), 0.25), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(self.first(x), self.blur, groups=3)

    for persistent in (True, False):
        imported = compared(tmp_path, Blurred(persistent), IMAGE)
        assert len(imported.network.frozen) == 1 and "frozen" in imported.source


def test_arithmetic_on_parameters(tmp_path: Path) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.q, self.v = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
            self.register_buffer("k", torch.zeros(4))
            self.scale = nn.Parameter(torch.randn(3, 1, 1))
            self.first, self.weight = nn.Conv2d(3, 12, 1), nn.Parameter(torch.randn(5, 12))

        def forward(self, x: Tensor) -> Tensor:
            bias = torch.cat((self.q, self.k, self.v * 0.5))
            x = F.conv2d(x * (self.scale.exp() + 1.0), self.first.weight, bias=bias)
            x = x + (bias - bias.mean(0, keepdim=True)).view(12, 1, 1)
            x = torch.add(x, bias.view(12, 1, 1), alpha=0.25) + torch.sub(self.scale[:1], x, alpha=2.0)
            return F.linear(x.mean((2, 3)), self.weight, bias=torch.cat([self.q.tanh(), self.v[:1]]))

    compared(tmp_path, Joined(), IMAGE)


def test_an_embedding_of_positions_is_a_parameter(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Conv2d(3, 8, 1), nn.Embedding(35, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).flatten(2).transpose(1, 2) + self.table(torch.arange(35))

    assert "table.weight" in compared(tmp_path, Positions(), IMAGE).network.arrays


def test_decomposed_programs_are_refused_at_once(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    program = torch.export.export(net.train(), (IMAGE,)).run_decompositions({})
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(MbcError, match=r"has 1 thing.*\n.*decomposed.*\n.*without run_decompositions"):
        import_model(tmp_path / "model.pt2", "net", "mse")


def test_a_loss_that_does_not_take_the_outputs_is_no_mistake_of_mbc(tmp_path: Path) -> None:
    file = exported(tmp_path, Behind(lambda y: y.mean((1, 2, 3))), IMAGE)
    import_model(file, "net", "mse")
    with pytest.raises(MbcError, match="softmax_cross_entropy") as caught:
        import_model(file, "net")
    assert caught.value.code == "MBC303"


def test_calls_of_batch_norms_are_counted(tmp_path: Path) -> None:
    class Twice(Behind):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(self.first(x)).relu())

    model = Twice(lambda y: y, norm=nn.BatchNorm2d(8), never=nn.BatchNorm2d(8))
    counts = {k.name: k.per_update for k in import_model(exported(tmp_path, model, IMAGE), "net", "mse").network.keys}
    assert counts["norm.num_batches_tracked"] == 2 and counts["never.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda y: (y, y), "it returns this tensor twice"),
        (lambda y: F.adaptive_max_pool2d(y, 2, return_indices=True), "it takes the positions of maxima"),
        (lambda y: y * torch.arange(2.0).view(2, 1, 1, 1), "it takes different numbers for each sample"),
        (lambda y: (y, 3), "it returns a number"),
    ],
)
def test_vanishing_values_are_refused(function: Callable[[Tensor], Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(MbcError, match=reason):
        import_model(exported(tmp_path, Behind(function), IMAGE), "net", "mse")


def test_one_mask_for_two_tensors_is_refused(tmp_path: Path) -> None:
    def function(y: Tensor) -> Tensor:
        mask = y.new_empty(2, 1, 1, 1).bernoulli_(0.6).div_(0.6)
        return y * mask + y.tanh() * mask

    with pytest.raises(MbcError, match="it uses one random mask twice"):
        import_model(exported(tmp_path, Behind(function), IMAGE), "net", "mse")


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda y, p: torch.slice_scatter(torch.zeros(1, 3, 4, 4), p[:, torch.tensor([1, 0])], 1, 1, 3), "'p'"),
        (lambda y, p: y[:, :3, :4, :4] * p.expand(5, 3, 4, 4).sum(0), "a parameter that is repeated"),
        (lambda y, p: y * torch.zeros_like(y, dtype=torch.bool).copy_(y), "it converts a computed tensor to bool"),
        (lambda y, p: y * (y * 3).to(torch.int64), "int64"),
    ],
)
def test_numbers_that_would_change_are_refused(function, reason: str, tmp_path: Path) -> None:
    class Held(Behind):
        def __init__(self) -> None:
            super().__init__(lambda y: y)
            self.p = nn.Parameter(torch.randn(1, 3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return function(self.first(x), self.p)

    with pytest.raises(MbcError, match=reason):
        import_model(exported(tmp_path, Held(), IMAGE), "net", "mse")


def test_statistics_that_a_model_reads_are_refused(tmp_path: Path) -> None:
    class Reads(Behind):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x)) + self.norm.running_mean.view(1, -1, 1, 1)

    with pytest.raises(MbcError, match=r"it reads 'norm.running_mean', which each step changes"):
        import_model(exported(tmp_path, Reads(lambda y: y, norm=nn.BatchNorm2d(8)), IMAGE), "net", "mse")


@pytest.mark.parametrize(
    "function, argument", [(lambda y: F.avg_pool2d(y, 2, ceil_mode=True, divisor_override=3), "divisor")]
)
def test_an_argument_that_is_not_taken(function: Callable[[Tensor], Tensor], argument: str, tmp_path: Path) -> None:
    with pytest.raises(MbcError, match=argument):
        import_model(exported(tmp_path, Behind(function), IMAGE), "net", "mse")

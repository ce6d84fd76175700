"""Models that cannot be imported: all faults are reported at once, each with its module, operation, line and remedy."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.interchange.importing import import_model
from tests.interchange.models import Model, Of, Tensor, exported, lowered, nn, torch

F = torch.nn.functional
IMAGE = torch.zeros(2, 3, 8, 8)


def refusal(path: Path, model: Model, *inputs: Tensor, **options: object) -> str:
    with pytest.raises(MbcError) as caught:
        import_model(exported(path, model, *(inputs or (IMAGE,)), **options), "net")  # pyright: ignore[reportArgumentType]
    assert caught.value.code == "MBC303"
    return str(caught.value)


def test_all_is_listed_at_once_with_modules_lines_and_remedies(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1) + torch.cumprod(x, 2)  # the line of Odd

    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    odd = nn.ModuleList(Odd() for _ in range(5))
    message = refusal(tmp_path, Of(lambda x: sum((o(x) for o in odd), norm(x).softmax(0)), odd=odd, norm=norm))
    assert message.startswith("error MBC303: the model has 3 things that mbc cannot import:")
    assert "'norm' (InstanceNorm2d): aten.instance_norm.default: it keeps running statistics" in message
    assert "instead: build it with track_running_stats=False" in message
    # The softmax after `norm` depends on a refused operation, so it is not listed.
    assert "'odd.0' (Odd), 'odd.1' (Odd), 'odd.2' (Odd), 'odd.3' (Odd) and 1 more: aten.cumsum.default" in message
    assert "aten.cumprod.default: the language has no such operation" in message
    assert "test_refusals.py" in message and "torch.cumsum(x, 1) + torch.cumprod(x, 2)  # the line of Odd" in message


def test_an_operation_without_a_rule_is_named_behind_a_refused_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, Of(lambda x: x.softmax(0).cumsum(1)))
    assert "aten.softmax.int: it works along dimension 0" in message
    assert "aten.cumsum.default: the language has no such operation" in message


def test_equal_ones_of_many_modules_are_one_entry(tmp_path: Path) -> None:
    class Side(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1)

    class Sides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)
            self.sides = nn.ModuleList(Side() for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return sum((side(x) for side in self.sides), x)

    message = refusal(tmp_path, Sides())
    assert "has 1 thing that" in message
    assert "'sides.0' (Side), 'sides.1' (Side), 'sides.2' (Side), 'sides.3' (Side) and 3 more: aten.cumsum" in message


@pytest.mark.parametrize(
    "layer, words",
    [
        (nn.Softmax(0), "it works along dimension 0, the samples"),
        (nn.LogSoftmax(0), "it works along dimension 0, the samples"),
        (nn.AvgPool2d(2, ceil_mode=True, divisor_override=3), "its divisor is given"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "it keeps running statistics"),
        (nn.Upsample(scale_factor=1.05, mode="bicubic"), "PyTorch's gradient is not that of its result"),
        (nn.Unflatten(0, (1, 2)), "it makes [1, 2, 4, 8, 8]"),
        (nn.Dropout(1.0), "its probability is 1"),
        (nn.FeatureAlphaDropout(), "the language has no such operation"),
    ],
    ids=lambda value: value.__class__.__name__ if isinstance(value, nn.Module) else "",
)
def test_a_layer_that_is_none_here(layer: Model, words: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, Of(lambda x: layer(x), layer=layer))
    assert words in message and "instead: " in message


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda x: x.permute(3, 0, 1, 2), "it permutes [2, 4, 8, 8] by [3, 0, 1, 2]"),
        (lambda x: torch.cat((x, x), 0), "it works along dimension 0, the samples"),
        (lambda x: F.interpolate(x.flatten(2), scale_factor=1.01), "PyTorch's gradient is not that of its result"),
        (lambda x: F.interpolate(x, 4, mode="bicubic", antialias=True), "aten._upsample_bicubic2d_aa"),
        (lambda x: F.pixel_shuffle(x.unsqueeze(1), 2), "it shuffles pixels of [2, 1, 4, 8, 8]"),
        (lambda x: torch.stack((x, x)), "it joins along a new dimension 0"),
        (lambda x: x + x[:1], "it works along dimension 0, the samples"),
        (lambda x: x.chunk(2, 0)[0], "it works along dimension 0, the samples"),
        (lambda x: x.reshape(4, 2, 8, 8), "it makes [4, 2, 8, 8] of [2, 4, 8, 8]"),
        (
            lambda x: x.reshape(2, 2, 128) + x.reshape(2, 2, 128).mean(1),
            "differ in samples or in the number of dimensions",
        ),
        (lambda x: x.sum((0, 1)), "it is over dimension 0"),
        (lambda x: torch.linalg.vector_norm(x, 3, dim=1), "it is a norm other than L1, L2"),
        (lambda x: x.reshape(2, 2, 8, 16) @ x.reshape(2, 16, 16), "it multiplies"),
        (lambda x: x * torch.rand(2, 4, 8, 8), "aten.rand"),
        (lambda x: x.double(), "aten.to.dtype"),
        (lambda x: x * float("inf"), "it computes with the number inf"),
        (lambda x: x + float("nan"), "it computes with the number nan"),
        (lambda x: F.leaky_relu(x, float("nan")), "it computes with the number nan"),
        (lambda x: x * torch.empty(2, 4, 1, 1).bernoulli_(0.5), "it drops parts of samples"),
    ],
)
def test_a_function_that_is_none_here(function, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, Of(function))


def test_modules_in_eval_mode_are_named(tmp_path: Path) -> None:
    norm, drop = nn.BatchNorm2d(4), nn.Dropout()
    message = refusal(tmp_path, Of(lambda x: drop(norm(x)), norm=norm, drop=drop), train=False)
    assert "'norm' (BatchNorm2d)" in message and "its statistics are fixed, and nothing" in message
    assert "export the model after model.train()" in message


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert "all parameters that it computes with are frozen" in refusal(tmp_path, model)
    assert "it computes with no parameter" in refusal(tmp_path, nn.Sequential(nn.MaxPool2d(2), nn.ReLU()))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.fc, self.use_reentrant = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(torch.relu, self.first(x), use_reentrant=self.use_reentrant)
        return self.fc(y.mean((2, 3)))


def test_a_checkpoint_that_loses_gradients_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    message = refusal(tmp_path, Checkpointed(True), x)
    assert "aten.relu.default: torch.utils.checkpoint with use_reentrant=True runs it" in message
    source = import_model(exported(tmp_path, Checkpointed(False), x), "net").source
    assert "relu" in source and "detach" not in source


class Square(torch.autograd.Function):
    """A square with a wrong gradient of its own."""

    @staticmethod
    def forward(ctx: Model, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Model, *dy: Tensor) -> Tensor:
        return 7 * dy[0]


def test_functions_with_a_gradient_of_their_own_are_refused(tmp_path: Path) -> None:
    class Squared(Of):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(self.first(x))

    message = refusal(tmp_path, Squared(Square.apply))
    assert (
        "aten.mul.Tensor: it is a part of an autograd.Function, whose gradient the program does not contain" in message
    )
    assert "test_refusals.py" in message and "return x * x" in message


def test_arguments_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, doubled: bool) -> Tensor:
            return self.first(x) * (2 if doubled else 1)

    assert "'doubled': the program: this input is no tensor" in refusal(tmp_path, Switched(), IMAGE, True)


def test_control_flow_has_remedies_of_its_own(tmp_path: Path) -> None:
    branches = (lambda x: x.relu(), lambda x: x.tanh())
    message = refusal(tmp_path, Of(lambda x: torch.cond(x.sum() > 0, *branches, (x,))))
    assert "leave the loss out of the model" in message


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1))
    for parameter in (*model[0].parameters(), model[1].bias):
        parameter.requires_grad = False
    imported = import_model(exported(tmp_path, model, IMAGE), "net")
    assert imported.network.frozen == ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.bias")
    assert 'train { frozen = ("0.*", "1.bias") }' in imported.source
    assert lowered(imported.source).optimizer.frozen


def test_parameters_that_are_tied_between_unlike_layers(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    message = refusal(tmp_path, Tied())
    assert "its parameters are tied to those of 'first', which is a different layer" in message
    tied = Tied()
    tied.second.bias = tied.first.bias  # now the two are one layer
    imported = import_model(exported(tmp_path, tied, IMAGE), "net")
    assert imported.source.count("conv(") == 1
    assert [(key.name, key.state) for key in imported.network.keys] == [
        ("first.weight", "first.weight"), ("first.bias", "first.bias"),
        ("second.weight", "first.weight"), ("second.bias", "first.bias"),
    ]  # fmt: skip


def test_sizes_that_are_dynamic(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=2)
    message = refusal(tmp_path, Of(torch.relu), dynamic_shapes={"x": {0: batch}})
    assert "its size 0 is dynamic" in message and "export it without dynamic_shapes" in message


def test_types_other_than_fp32(tmp_path: Path) -> None:
    message = refusal(tmp_path, nn.Conv2d(3, 4, 3).double(), IMAGE.double())
    assert "'x': the program: this input is float64" in message or "this input is float64" in message
    assert "its parameters are float64" in message and "call model.float() first" in message
    assert "this input is int64" in refusal(tmp_path, nn.Embedding(4, 4), torch.zeros(2, 3, dtype=torch.int64))


def test_models_that_change_inputs_or_buffers(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.conv(x)

    assert "'count'" in refusal(tmp_path, Counts())
    assert "it changes the input 'input'" in refusal(tmp_path, nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 1)))

    def seen_elsewhere(x: Tensor) -> Tensor:
        y = x.view(2, -1)
        x.relu_()
        return y

    import_model(exported(tmp_path, Of(seen_elsewhere), IMAGE), "net")


def test_control_flow_and_functions_of_ones_own(tmp_path: Path) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.sinh()

        @staticmethod
        def backward(ctx, *dy: Tensor) -> Tensor:
            return dy[0]

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    assert "no such operation" in refusal(tmp_path, Of(branches))
    message = refusal(tmp_path, Of(lambda x: Doubled.apply(x)))
    assert "no such operation" in message


def test_a_line_that_may_apply_a_function_with_a_backward_pass_is_named(tmp_path: Path) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.relu()

        @staticmethod
        def backward(ctx, *dy: Tensor) -> Tensor:
            return dy[0]

    def helper(x: Tensor) -> Tensor:
        return Same.apply(x)

    with pytest.warns(RuntimeWarning, match=r"may apply a torch.autograd.Function.*mbc.from_torch, which sees it"):
        import_model(exported(tmp_path, Of(lambda x: helper(x)), IMAGE), "net")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        import_model(exported(tmp_path, Of(lambda x: x.relu()), IMAGE), "net")


def test_outputs_that_are_none(tmp_path: Path) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.conv(x), x, self.conv.weight

    message = refusal(tmp_path, Same())
    assert "it returns an input as it is" in message and "it returns a parameter or buffer" in message

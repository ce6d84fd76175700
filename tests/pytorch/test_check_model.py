"""The check of an import: correct imports pass, an error is named, and the check leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.interchange import check
from mbc.interchange.check import Numbers, deviations
from mbc.interchange.steps import Step
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch, train_beside, trainer_of

trainers = pytest.importorskip("mbc.pytorch.make_trainer")
in_float64 = pytest.importorskip("mbc.pytorch.reference").in_float64
functional = nn.functional


def one_mask(y: Any) -> Any:
    mask = y.new_empty(y.shape[0], 1, 1, 1).bernoulli_(0.6).div_(0.6)
    return y * mask


def dropped(y: Any) -> Any:
    return functional.dropout(y.relu(), 0.3, training=True)


def without_gradient(y: Any) -> Any:
    with torch.no_grad():
        gate = functional.dropout(y, 0.2).sigmoid()
    return y * gate + y.detach()


RIGHT = {
    "no gradient": without_gradient,
    "relu": torch.relu,
    "batch norm": nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
    "hardsigmoid": nn.Hardsigmoid(),
    "one channel": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8)),
    "stochastic depth": one_mask,
    "function of dropout": dropped,
    "maximum pool": nn.MaxPool2d(3, 2, 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_launches_pass(name):
    trainer = trainer_of(Net(RIGHT[name]), check=True)
    assert trainer.open
    trainer.close()


def changed_rule(monkeypatch: Any, change: Any) -> None:
    """Let the import write a wrong network, as a bug in mbc would."""
    translate = trainers.network_of

    def wrong(*arguments: Any) -> Any:
        exported = translate(*arguments)
        steps = tuple(change(step) for step in exported.network.steps)
        return replace(exported, network=replace(exported.network, steps=steps))

    monkeypatch.setattr(trainers, "network_of", wrong)
    own = check.translate

    def wrong_part(program: Any, name: str) -> Any:
        network = own(program, name)
        return replace(network, steps=tuple(change(step) for step in network.steps))

    monkeypatch.setattr(check, "translate", wrong_part)


def smooth(step: Step) -> Step:
    return replace(step, op="silu") if step.op == "gelu" else step


def larger_norm(step: Step) -> Step:
    return replace(step, settings={"eps": 0.5}) if step.op == "bn" else step


def slower_norm(step: Step) -> Step:
    return replace(step, settings={"momentum": 0.2}) if step.op == "bn" else step


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(6)))
        self.act, self.norm = nn.GELU(), nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        return self.layers[3:](self.norm(self.act(self.layers[:3](x)))) + x


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (smooth, "aten.gelu.default in 'body.act' (GELU) at "),
        (larger_norm, "aten.batch_norm.default in 'body.norm' (BatchNorm2d) at "),
        (slower_norm, "the statistic of 'body.norm.running_mean' is "),
    ],
)
def test_a_deviation_names_the_first_operation_that_differs(monkeypatch, change, words):
    changed_rule(monkeypatch, change)
    with pytest.raises(
        MbcError, match=r"MBC345: the imported network computes something else than the model: "
    ) as caught:
        trainer_of(Net(Deep()))
    assert words in caught.value.message, caught.value.message
    trainer_of(Net(Deep()), check=False).close()


def test_a_wrong_gradient_is_reported(monkeypatch):
    ours = Numbers((np.ones(3),), 1.0, {"w": np.array([1.0, 2.0]), "b": np.array([1e-13])})
    theirs = Numbers((np.ones(3),), 1.0, {"w": np.array([1.0, 2.1]), "b": np.array([0.0])})
    assert list(deviations(ours, theirs)) == ["the gradient of 'w' is 4.3e-02 off, relative to the model's"]
    missing = Numbers((np.ones(3),), 1.0, {"b": np.array([0.0])})
    assert list(deviations(missing, theirs)) == ["the gradient of 'w' is missing"]
    assert list(deviations(Numbers(()), theirs)) == ["the model returns 1 tensors, and the network 0"]


def test_an_impossible_check(monkeypatch):
    def draw(*_: Any) -> Any:
        return torch.rand(3)

    words = r"MBC346: the import cannot be checked: the model draws random numbers by 'rand'"
    with in_float64(), pytest.raises(MbcError, match=words):
        draw()
    monkeypatch.setattr("mbc.pytorch.check_model._of_model", lambda *_: draw() @ torch.rand(2))
    with pytest.raises(MbcError, match=r"MBC346: the import cannot be checked: RuntimeError: "):
        trainer_of(Net(), check=True)
    trainer_of(Net()).close()


class Whole(Net):
    """A model that takes only mini-batches of four rows."""

    def forward(self, x: Any) -> Any:
        assert x.shape[0] == 4
        return super().forward(x)


def test_models_of_whole_mini_batches(monkeypatch):
    trainer_of(Whole(), check=True).close()
    changed_rule(monkeypatch, smooth)
    with pytest.raises(MbcError, match="MBC345"):
        trainer_of(Whole(Deep()), check=True)


def test_a_check_that_would_take_long_is_left_out(monkeypatch):
    changed_rule(monkeypatch, smooth)
    monkeypatch.setattr("mbc.pytorch.check_model.seconds_of", lambda _: 10.1)
    trainer_of(Net(Deep())).close()
    with pytest.raises(MbcError, match="MBC345"):
        trainer_of(Net(Deep()), check=True)


def test_the_check_leaves_no_trace():
    model = Net(nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.5)))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    trainer_of(model, check=True).close()
    assert torch.equal(torch.get_rng_state(), random) and torch.get_default_dtype() is torch.float32
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    wanted = functional.cross_entropy(Net().double()(IMAGES.double()), LABELS)
    with trainer_of(Net(), check=True) as trainer:
        assert float(trainer.step(IMAGES, LABELS)) == pytest.approx(wanted.item(), rel=1e-9)


def test_constant_examples_and_types_of_torch():
    train_beside(Net(nn.Hardswish()), inputs=(torch.zeros(4, 3, 9, 11),), check=True)


def test_time_grows_with_the_network():
    small, large = (
        check.training_graph(
            f"network n(batch = 2) {{ input x[batch, 3, {n}, {n}] : float\n input t[batch] : class\n"
            "y = x |> conv(8, 3) |> flatten |> linear(5)\n output y\n loss (y, t) |> softmax_cross_entropy }",
            2,
        )
        for n in (8, 80)
    )
    assert 50 * check.seconds_of(small) < check.seconds_of(large)

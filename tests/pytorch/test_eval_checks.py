"""Models that compute something else in eval mode than in training mode: PyTorch evaluates them, and mbc says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch, trainer_of
from tests.pytorch.test_planned_module import X, agree, evaluated, numbers, planned


class Moded(Net):
    """A network whose last operation depends on its mode."""

    def __init__(self, trained: Callable[[Any], Any], other: Callable[[Any], Any]) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        self.trained, self.other = trained, other

    def forward(self, x: Any) -> Any:
        return (self.trained if self.training else self.other)(super().forward(x))


def itself(y: Any) -> Any:
    return y


def drawn(y: Any) -> Any:
    return nn.functional.dropout(y, 0.5, training=True)


def by_mode(model: Any) -> Any:
    """Train a step and evaluate, twice."""
    for x in (X, X[:3]):
        output = model.train()(X)
        (output if isinstance(output, torch.Tensor) else output["logits"]).sum().backward()
        with torch.no_grad():
            yield model.eval()(x)
    yield model.first.weight.grad


@pytest.mark.parametrize("trained", [lambda y: {"logits": y, "auxiliary": 2 * y}, lambda y: 1.01 * y])
def test_a_model_of_two_modes_is_evaluated_by_torch(trained):
    model, twin = (Moded(trained, itself).double() for _ in range(2))
    planned(model, fallback="torch")
    with pytest.warns(RuntimeWarning, match="runs in PyTorch: in eval mode it") as raised:
        agree(numbers(by_mode, model), numbers(by_mode, twin))
    assert len(raised) == 1
    with pytest.raises(MbcError, match=r"MBC339: .* in eval mode it"):
        numbers(by_mode, planned(Moded(trained, itself).double()))


def test_a_difference_that_weights_of_0_hide_is_found_later():
    model, twin = (Moded(itself, lambda y: 3 * y).double() for _ in range(2))
    planned(model, fallback="torch")
    with torch.no_grad():
        for one in (model, twin):
            one.eval()
            one.head[-1].weight.zero_()
            one.head[-1].bias.zero_()
        assert torch.equal(model(X), twin(X))
        for one in (model, twin):
            one.head[-1].weight.fill_(0.1)
        with pytest.warns(RuntimeWarning, match="runs in PyTorch: in eval mode it computes something else: an output"):
            agree([model(X)], [twin(X)])


def test_dropout_that_stays_on_is_drawn():
    model = planned(Moded(drawn, drawn).double(), fallback="torch").eval()
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="in eval mode it computes something else"):
        assert not torch.equal(model(X), model(X))


def full(*_: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("lacking", ["twin", "difference"])
def test_without_memory_for_a_comparison_the_plan_evaluates(lacking: str, monkeypatch: pytest.MonkeyPatch):
    with trainer_of(Moded(itself, full if lacking == "twin" else itself)) as trainer:
        monkeypatch.setattr("mbc.pytorch.eval_checks.output_tensors", full)
        assert trainer.evaluate(IMAGES).isfinite().all()


def test_a_trainer_refuses_to_evaluate_a_model_of_two_modes():
    with trainer_of(model := Moded(itself, torch.tanh)) as trainer:
        trainer.step(IMAGES, LABELS)
        with pytest.raises(MbcError, match="MBC338: the trainer evaluates the network that it trains, but in eval"):
            trainer.evaluate(IMAGES)
        assert torch.equal(model.eval()(X), model(X))


class Sized(Net):
    """A network that takes four rows and no other number, and counts its calls."""

    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x).view(4, 5)


def test_a_comparison_leaves_no_trace_in_the_model():
    model, twin = Sized(nn.BatchNorm2d(8)).double(), Sized(nn.BatchNorm2d(8)).double()
    planned(model)
    with torch.no_grad():
        agree(*([one.eval()(X), one.train()(X), *one.buffers()] for one in (model, twin)))
    assert model.calls == 0


def test_statistics_of_the_mini_batch_need_all_its_rows():
    model, twin = (Net(nn.BatchNorm2d(8, track_running_stats=False)).double() for _ in range(2))
    planned(model, fallback="torch")
    with pytest.warns(RuntimeWarning, match=r"is \[3, 3, 9, 11\], but the plan is for \[4, 3, 9, 11\]"):
        agree(numbers(evaluated, model), numbers(evaluated, twin))

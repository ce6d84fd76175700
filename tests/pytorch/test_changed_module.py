"""Planned models that a loop changes: PyTorch runs what the plan no longer is, with PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import Net, nn, torch
from tests.pytorch.test_planned_module import X, agree, cross_entropy, numbers, plain, planned


class Scaled(Net):
    """A network whose scales, a number and a buffer, are constants of its plan."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        self.register_buffer("gain", torch.tensor(2.0))
        self.temperatures = [1.0]

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.gain / self.temperatures[0]


def swapped(model: Any) -> Any:
    """Evaluate with another weight, which takes the place of the weight for a while."""
    weight = model.first.weight
    for loss in plain(model):
        held, weight.data = weight.data, 0.5 * weight.data
        yield loss + cross_entropy(model)
        weight.data = held


def flattened(model: Any) -> Any:
    """Update one vector that holds all parameters."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    for _ in range(2):
        loss = cross_entropy(model)
        vector -= torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        yield loss


def adapted(model: Any) -> Any:
    """Pass gradients through weights that are computed, as meta-learning does."""
    fast = {name: 0.9 * p for name, p in model.named_parameters()}
    cross_entropy(lambda x: torch.func.functional_call(model, fast, (x,))).backward()
    yield model.first.weight.grad
    yield from plain(model)


CHANGES = (
    lambda model: model.first.requires_grad_(False),
    lambda model: model.body[0].eval(),
    lambda model: setattr(model.body[0], "momentum", 0.5),
    lambda model: setattr(model.body[0], "weight", model.body[0].bias),
    lambda model: setattr(model.first, "weight", nn.Parameter(2 * model.first.weight.detach(), requires_grad=False)),
    lambda model: setattr(model.body, "forward", lambda x: 2 * x),
    lambda model: setattr(model, "head", nn.Sequential(*model.head, nn.Tanh())),
    lambda model: model.head.append(nn.Sigmoid()),
    lambda model: model.gain.add_(1),
    lambda model: model.temperatures.insert(0, 0.5),
)


def observed(model: Any) -> Any:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 1.1)
    try:
        yield from [*plain(model)]
    finally:
        hook.remove()


def after(change: Any) -> Any:
    return lambda model: (change(model), *plain(model))[1:]


@pytest.mark.parametrize("loop", [swapped, flattened, adapted, observed, *map(after, CHANGES)])
def test_a_changed_model_runs_in_torch_and_says_so(loop):
    model = planned(Scaled().double(), fallback="torch")
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        ours = numbers(loop, model)
    agree(ours, numbers(loop, Scaled().double()))
    with pytest.raises(MbcError, match="does not cover this call"):
        numbers(loop, planned(Scaled().double()))


def test_a_backward_pass_is_refused_after_a_weight_was_replaced_and_taken_in():
    loss = cross_entropy(model := planned(Scaled().double()))
    model.body[0].weight.data = 2 * model.body[0].weight.data
    with torch.no_grad():
        model(X)
    with pytest.raises(RuntimeError, match=r"'body\.0\.weight' has changed since the forward pass"):
        loss.backward()


def test_a_backward_pass_after_an_update_is_refused_as_in_torch():
    for model in (planned(Scaled().double()), Scaled().double()):
        loss = cross_entropy(model)
        with torch.no_grad():
            model.head[-1].bias.add_(1)  # no backward pass reads it
        loss.backward()
        loss = cross_entropy(model)
        with torch.no_grad():
            model.body[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"has changed since|modified by an inplace operation"):
            loss.backward()


def test_second_derivatives_are_refused():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(planned(Scaled().double(), example=x)(x).sum(), x, create_graph=True)


def test_torch_compile_leaves_the_plan_alone():
    agree([*plain(torch.compile(planned(Scaled().double()), backend="eager"))], [*plain(Scaled().double())])

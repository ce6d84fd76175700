"""Planned models that a loop changes: PyTorch runs what the plan no longer is, with PyTorch's numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import Net, nn, torch
from tests.pytorch.test_planned_module import X, agree, batches, cross_entropy, numbers, plain, planned, stepped


class Scaled(Net):
    """A network whose scales, numbers and a buffer, are constants of its plan."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        self.register_buffer("gain", torch.tensor(2.0))
        self.temperatures = [1.0]
        self.config, self.options = SimpleNamespace(scale=1.0), {"scales": (1.0, 0.5)}

    def forward(self, x: Any) -> Any:
        scale = self.config.scale * self.options["scales"][0] / self.temperatures[0]
        return super().forward(x) * self.gain * scale


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


def directional(model: Any) -> Any:
    """A derivative along a direction of the inputs, by forward-mode differentiation."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X.flip(0))
        yield torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


def meta_learned(model: Any) -> Any:
    """Gradients through a step of gradient descent, and a penalty of gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, labels in batches(2):
        weights = list(model.parameters())
        gradients = torch.autograd.grad(cross_entropy(model, x, labels), weights, create_graph=True)
        fast = sum((w * g).sum() for w, g in zip(weights, gradients, strict=True))
        loss = cross_entropy(model) + fast + torch.stack([g.square().sum() for g in gradients]).sum()
        yield stepped(optimizer, loss)


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
    lambda model: setattr(model.config, "scale", 0.5),
    lambda model: model.options.update(scales=(2.0, 0.5)),
)


def observed(model: Any) -> Any:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 1.1)
    try:
        yield from [*plain(model)]
    finally:
        hook.remove()


def after(change: Any) -> Any:
    return lambda model: (change(model), *plain(model))[1:]


@pytest.mark.parametrize(
    "loop", [swapped, flattened, adapted, directional, meta_learned, observed, *map(after, CHANGES)]
)
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


def penalised(model: Any) -> Any:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    yield from (gradient, x.grad, *(p.grad for p in model.parameters()))


def test_a_penalty_of_gradients_of_inputs_is_torchs():
    model = planned(Scaled().double(), example=X.clone().requires_grad_(), fallback="torch")
    with pytest.warns(RuntimeWarning, match="it is differentiated twice"):
        agree(numbers(penalised, model), numbers(penalised, Scaled().double()))


def test_second_derivatives_of_random_layers_are_refused():
    model = planned(Net(nn.Dropout(0.5)).double(), example=X.clone().requires_grad_(), fallback="torch")
    with pytest.raises(RuntimeError, match="no second derivatives"):
        numbers(penalised, model)


def test_torch_compile_leaves_the_plan_alone():
    agree([*plain(torch.compile(planned(Scaled().double()), backend="eager"))], [*plain(Scaled().double())])

"""Loops in which several forward passes of a planned model await their backward pass: PyTorch's numbers."""

from __future__ import annotations

import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.pytorch import pending_passes
from mbc.runtime.halves import Halves
from tests.pytorch import test_planned_module as base
from tests.pytorch.nets import Net, nn, torch
from tests.pytorch.test_module_in_torch import raise_error

F = nn.functional


def losses(model: Any, count: int = 3) -> list[Any]:
    return [base.cross_entropy(model, base.X * (1 + n) + n) for n in range(count)]


def gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


def orders(model: Any) -> Any:
    """The backward passes run in the order of the forward passes, and in the opposite order; gradients add up."""
    for step in (1, -1):
        for loss in losses(model)[::step]:
            loss.backward()
            yield from gradients(model)


def taught(model: Any) -> Any:
    """The model is its own teacher, in training mode and in eval mode, between a forward and its backward pass."""
    optimizer = base.sgd(model)
    for number, (x, labels) in enumerate(base.batches(4)):
        optimizer.zero_grad()
        logits = model(x)
        with torch.no_grad():
            target = model.train(number < 2)(x.flip(3))
        loss = F.cross_entropy(logits, labels) + F.mse_loss(logits, target)
        model.train()
        loss.backward()
        optimizer.step()
        yield loss


def hooked(model: Any) -> Any:
    """In one backward pass a parameter's gradients are handed to PyTorch, the others added in place."""
    model.first.weight.register_hook(lambda gradient: 2 * gradient)
    torch.stack(losses(model)).sum().backward()
    yield from gradients(model)


def drawn(model: Any, seed: int = 0) -> Any:
    """Any order of passes, of two shapes; some outputs are dropped, and one backward pass serves all that remain."""
    draw, waiting = random.Random(seed), list[Any]()
    for _ in range(40):
        rows, act = draw.choice((4, 4, 3)), draw.choice(("forward", "forward", "backward", "drop", "train", "eval"))
        x = base.X[:rows] * draw.uniform(0.5, 2)
        if act == "forward":
            waiting.append(base.cross_entropy(model, x, base.LABELS[:rows]))
            yield waiting[-1]
        elif act in ("train", "eval"):
            with torch.no_grad():
                yield model.train(act == "train")(x)
            model.train()
        elif waiting:
            loss = waiting.pop(draw.randrange(len(waiting)))
            if act == "backward":
                loss.backward()
                yield model.first.weight.grad
    torch.stack([*waiting, *losses(model)]).sum().backward()
    yield from gradients(model)


def gan(generator: Any, critic: Any) -> Any:
    """A generator and a critic with a batch norm each; the critic takes real and generated images by turns."""
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (generator, critic))
    for x, _ in base.batches(3):
        fake = generator(x.flip(0))
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        ours.step()
        yield loss
    yield from (*generator.state_dict().values(), *critic.state_dict().values())


def generator() -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())


LOOPS = (base.siamese, orders, taught, hooked, drawn)


def twins(create: Any = base.normed, **other: Any) -> tuple[Any, Any]:
    return base.planned(create().double(), **other), create().double()


def alike(loop: Any, *models: Any) -> None:
    base.agree(*(base.numbers(loop, model) for model in models))


@pytest.mark.parametrize("loop", LOOPS)
def test_several_passes_that_wait_give_torchs_numbers(loop: Any):
    alike(loop, *twins())


@pytest.mark.parametrize("seed", range(1, 6))
def test_any_order_of_passes_gives_torchs_numbers(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Opening a program overwrites the arena, as on a GPU."""

    def overwriting(halves: Halves, plan: Any, check: Any = Halves.same_states) -> bool:
        for place in halves.kept:
            halves.shared(place)[...] = 0xFF
        return check(halves, plan)

    monkeypatch.setattr(Halves, "same_states", overwriting)
    alike(lambda model: drawn(model, seed), *twins())


def test_a_gan_of_two_planned_models_gives_torchs_numbers():
    pairs = twins(generator), twins(example=base.X.clone().requires_grad_())
    base.agree(*([*gan(*models)] for models in zip(*pairs, strict=True)))


def dropping() -> Any:
    return Net(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))


def assert_masks_are_kept(one: Any, other: Any) -> None:
    """Assert that `other`, whose backward passes run after three forward passes, gives the gradients of `one`.

    Both are planned models with dropout; `one` runs the backward pass of each forward pass before the next one.
    """

    def gradient(model: Any, output: Any) -> Any:
        return torch.autograd.grad(output.sum(), [model.first.bias])[0]

    wanted = [gradient(one, one(base.X)) for _ in range(3)]
    outputs = [other(base.X) for _ in range(3)]
    for number in (1, 0, 2):
        torch.testing.assert_close(gradient(other, outputs[number]), wanted[number], rtol=1e-4, atol=1e-6)
    assert not torch.equal(wanted[0], wanted[1])
    torch.testing.assert_close(other(base.X), one(base.X))  # the next random numbers


def test_each_pass_keeps_its_mask_of_dropout():
    assert_masks_are_kept(*(twins(dropping)[0] for _ in range(2)))


def test_each_pass_serves_one_backward_pass_whatever_happens_between():
    model, twin = twins()
    first, second = losses(model, 2)
    first.backward()
    with pytest.raises(ValueError, match="of the user"):
        raise_error(model(base.X))
    with pytest.raises(MbcError):
        model(base.X.to(torch.complex128))
    second.backward()
    [loss.backward() for loss in (*losses(twin, 2), twin(base.X).sum() * 0)]
    base.agree(gradients(model), gradients(twin))
    base.agree([*model.buffers()], [*twin.buffers()])


def test_passes_of_several_threads_add_up():
    model, twin = twins(Net)
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(lambda scale: model(base.X * scale).square().mean().backward(), range(1, 13))]) == 12
    for scale in range(1, 13):
        twin(base.X * scale).square().mean().backward()
    base.agree(gradients(model), gradients(twin))


def test_a_graph_that_dies_frees_its_memory():
    model = twins()[0]
    first, second = model(base.X), model(-base.X)
    copies = [weakref.ref(copy) for copy in first.grad_fn.ticket.copies]
    assert copies and all(copy() is not None for copy in copies)
    del first
    assert all(copy() is None for copy in copies)
    second.sum().backward()


def full(tensor: Any, to_host: bool, copied: Any = pending_passes._copied) -> Any:
    if not to_host:
        raise torch.OutOfMemoryError("no memory")
    return copied(tensor, to_host)


def test_without_memory_passes_wait_in_host_memory_and_then_run_in_torch(monkeypatch: pytest.MonkeyPatch):
    strict = twins()[0]
    first, second = losses(strict, 2)
    monkeypatch.setattr(pending_passes, "_copied", full)
    with pytest.warns(RuntimeWarning, match="wait in host memory") as raised:
        alike(drawn, *twins())
    assert len(raised) == 1
    monkeypatch.setattr(pending_passes, "_copied", lambda tensor, _: full(tensor, False))
    with pytest.raises(RuntimeError, match="too little memory"):
        first.backward(retain_graph=True)
    with pytest.raises(MbcError, match="too little memory"):
        strict(base.X)
    second.backward()
    first.backward()
    with pytest.warns(RuntimeWarning, match="runs in PyTorch: too little memory"):
        alike(drawn, *twins(fallback="torch"))


class Pair(nn.Module):
    """A network with two inputs, and two arguments more that have defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, left: Any, right: Any, shift: Any = 0.0, *, scale: Any = 1.0) -> Any:
        return self.net(left + 2 * right) * scale + shift


def test_arguments_by_name_run_in_the_plan():
    x, y = base.X, base.X + 1
    model, twin = twins(Pair, example=(x, y), fallback="torch")
    strict = twins(Pair, example=(x, y))[0]
    base.agree([strict(x, right=y), strict(right=y, left=x)], [twin(x, y), twin(x, y)])
    for other in ({"scale": 2.0}, {"shift": 2.0}, {"wrong": x}):
        with pytest.raises(MbcError, match="other arguments than the example"):
            strict(x, right=y, **other)
    with pytest.warns(RuntimeWarning, match="other arguments than the example"):
        base.agree([model(x, y, scale=2.0)], [twin(x, y, scale=2.0)])
    with pytest.raises(TypeError, match="wrong"):
        model(x, y, wrong=x)

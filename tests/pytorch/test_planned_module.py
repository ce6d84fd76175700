"""Loops of PyTorch with `mbc.module`: equal losses and states, whatever the loop does between the calls."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import mbc
from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch

F = nn.functional
X = IMAGES.double()


class Two(Net):
    """A network with an auxiliary head, whose outputs are in a dict."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        self.aux = nn.Conv2d(8, 2, 1)

    def forward(self, x: Any) -> Any:
        y = self.body(self.first(x))
        return {"logits": self.head(y), "masks": [self.aux(y), "channels"]}


def normed() -> Any:
    return Net(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))


def planned(model: Any, **other: Any) -> Any:
    given = {"precision": "fp64", "device": "cpu", "fallback": "error", "progress": False} | other
    return mbc.module(model, given.pop("example", X), **given)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def cross_entropy(model: Any, x: Any = X, labels: Any = LABELS) -> Any:
    return F.cross_entropy(model(x), labels)


def batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield (
            torch.randn(X.shape, generator=generator, dtype=torch.float64),
            torch.randint(5, (4,), generator=generator),
        )


def stepped(optimizer: Any, loss: Any) -> Any:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain(model: Any) -> Any:
    optimizer = sgd(model)
    for x, labels in batches(4):
        yield stepped(optimizer, cross_entropy(model, x, labels))


def mixed(model: Any) -> Any:
    """Mixup, accumulation over two batches, clipping, moving averages; gradients are kept and zeroed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    for number, (x, labels) in enumerate(batches(6)):
        x = 0.7 * x + 0.3 * x.flip(0)
        output = model(x)
        loss = 0.7 * F.cross_entropy(output, labels) + 0.3 * F.cross_entropy(output, labels.flip(0))
        (loss / 2).backward()
        if number % 2:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 3)
            average.update_parameters(model)
        yield loss
    yield average.module.first.weight


def dice(model: Any) -> Any:
    """A loss of the user's own on an auxiliary head, beside cross entropy, and a penalty of a weight."""
    optimizer = sgd(model)
    for x, labels in batches(3):
        outputs = model(x)
        p = outputs["masks"][0].softmax(1)[:, 1]
        overlap = 1 - (2 * (p * p.round().detach()).sum() + 1) / (p.sum() + p.round().detach().sum() + 1)
        loss = F.cross_entropy(outputs["logits"], labels) + 0.4 * overlap + 0.01 * model.first.weight.square().sum()
        yield stepped(optimizer, loss)


def resumed(model: Any) -> Any:
    """Save model and optimizer after a step, go on, go back to the saved ones, and go on again."""
    optimizer, file = sgd(model), io.BytesIO()
    for number, (x, labels) in enumerate([*batches(3), *batches(3)]):
        if number == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if number == 3:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer = sgd(model)
            optimizer.load_state_dict(saved["optimizer"])
        yield stepped(optimizer, cross_entropy(model, x, labels))


def differentiated(model: Any) -> Any:
    """`torch.autograd.grad` leaves `.grad` alone; `backward(inputs=…)` fills some."""
    yield from torch.autograd.grad(cross_entropy(model), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    cross_entropy(model).backward(inputs=[model.first.weight])
    assert model.first.bias.grad is None
    yield model.first.weight.grad


def hooked(model: Any) -> Any:
    """Hooks of parameters, before and after their accumulation."""
    seen: list[Any] = []
    model.first.weight.register_hook(lambda gradient: 2 * gradient)
    model.first.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        cross_entropy(model).backward()
    yield model.first.weight.grad
    yield from seen


def held(model: Any) -> Any:
    """A caller holds earlier gradients, puts gradients of its own in their place, and takes them back."""
    cross_entropy(model).backward()
    first = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    cross_entropy(model).backward()
    yield from first.values()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    model.first.bias.grad = first["first.bias"]
    cross_entropy(model).backward()
    yield from (p.grad for p in model.parameters())
    yield from first.values()


def replaced(model: Any) -> Any:
    """Gradients whose memory is replaced, or moved to shared memory, before others take their places."""
    for number, (x, labels) in enumerate(batches(6)):
        model.zero_grad(set_to_none=number != 2)
        cross_entropy(model, x, labels).backward()
        for parameter in list(model.parameters())[number % 2 :: 2] if number > 2 else ():
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
        if number in (0, 4):
            model.share_memory()
        cross_entropy(model, x / 2, labels).backward()
        yield from (parameter.grad.clone() for parameter in model.parameters())


def moved(model: Any) -> Any:
    """Parameters whose memory is replaced, or written in place."""
    optimizer = sgd(model)
    for number, (x, labels) in enumerate(batches(3)):
        if number == 1:
            model.first.weight.data = model.first.weight.data * 0.5
        if number == 2:
            with torch.no_grad():
                model.first.bias.fill_(0.25)
        yield stepped(optimizer, cross_entropy(model, x, labels))


def renewed(model: Any) -> Any:
    """A parameter is made anew over its memory while a pass waits, which belongs to the earlier parameter."""
    waiting, earlier = cross_entropy(model), model.first.weight
    model.first.weight = nn.Parameter(earlier.data)
    for _ in range(2):
        cross_entropy(model, X / 2).backward()
        yield from [p.grad.clone() for p in model.parameters()]
    waiting.backward()
    yield from (earlier.grad, *(p.grad for p in model.parameters()))


def evaluated(model: Any) -> Any:
    """Validation between steps, with fewer rows; a pass without gradients in training mode."""
    for loss in plain(model):
        yield loss
        model.eval()
        with torch.no_grad():
            yield model(X[:3])
        model.train()
        with torch.no_grad():
            yield model(X)


def numbers(loop: Callable[[Any], Any], model: Any) -> list[Any]:
    return [value.detach().clone() for value in loop(model)] + [t.clone() for t in model.state_dict().values()]


def agree(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def with_input(model: Any) -> Any:
    """Gradients of inputs, beside accumulated gradients of parameters."""
    for _ in range(2):
        yield from saliency(model)
    yield model.first.weight.grad


def test_an_example_that_needs_a_gradient_gives_gradients_of_inputs():
    model, twin = normed().double(), normed().double()
    planned(model, example=X.clone().requires_grad_())
    agree(numbers(with_input, model), numbers(with_input, twin))


@pytest.mark.parametrize(
    "loop", [plain, mixed, resumed, differentiated, hooked, held, replaced, moved, renewed, evaluated]
)
def test_a_loop_gives_torchs_numbers(loop):
    model, twin = normed().double(), normed().double()
    assert planned(model) is model
    agree(numbers(loop, model), numbers(loop, twin))


def unread(model: Any) -> Any:
    """Losses that do not read the second output: its head has no gradient, so that weight decay leaves it alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for number, (x, labels) in enumerate(batches(5)):
        outputs = model(x)
        loss = F.cross_entropy(outputs["logits"], labels)
        yield stepped(optimizer, loss + outputs["masks"][0].square().mean() if number == 2 else loss)
        yield torch.tensor([p.grad is None for p in model.parameters()])
    gradients = torch.autograd.grad(model(X)["logits"].sum(), [*model.parameters()], allow_unused=True)
    yield torch.tensor([gradient is None for gradient in gradients])


def again(model: Any) -> Any:
    """Two backward passes through one forward pass; another pass comes between them."""
    outputs = model(X)
    outputs["logits"].square().sum().backward(retain_graph=True)
    between = model(X / 2)["logits"]
    outputs["masks"][0].square().sum().backward()
    between.square().sum().backward()
    yield from (p.grad for p in model.parameters())


class Detached(Two):
    """A network that returns its features detached, as targets of another network."""

    def forward(self, x: Any) -> Any:
        outputs = super().forward(x)
        return outputs | {"target": outputs["logits"].detach()}


def distilled(model: Any) -> Any:
    outputs = model(X)
    yield torch.tensor([outputs["logits"].requires_grad, outputs["target"].requires_grad])
    (outputs["logits"] * outputs["target"]).sum().backward()
    yield model.first.weight.grad


@pytest.mark.parametrize(("loop", "kind"), [(dice, Two), (unread, Two), (again, Two), (distilled, Detached)])
def test_several_outputs_give_torchs_numbers(loop, kind):
    model, twin = kind().double(), kind().double()
    agree(numbers(loop, planned(model)), numbers(loop, twin))


def siamese(model: Any) -> Any:
    """Two passes before one backward pass."""
    optimizer = sgd(model)
    for x, _ in batches(3):
        yield stepped(optimizer, (model(x) - model(x.flip(0) + 1)).square().mean())


def last_batch(model: Any) -> Any:
    """A short last batch."""
    for rows in (4, 3, 4):
        model.zero_grad()
        loss = cross_entropy(model, X[:rows], LABELS[:rows])
        loss.backward()
        yield loss
        yield model.first.weight.grad


def saliency(model: Any) -> Any:
    x = X.clone().requires_grad_()
    yield from torch.autograd.grad(cross_entropy(model, x), x)
    cross_entropy(model, x).backward()
    yield x.grad


def attacked(model: Any) -> Any:
    """Gradients in eval mode."""
    model.eval()
    cross_entropy(model).backward()
    yield model.first.weight.grad


def inner_hook(model: Any) -> Any:
    seen: list[Any] = []
    model.body.register_forward_hook(lambda _, inputs, output: seen.append(output.detach()))
    yield cross_entropy(model)
    yield from seen


def test_a_shorter_batch_has_a_program_of_its_own_over_the_same_memory():
    model, twin = normed().double(), normed().double()
    planned(model)
    agree(numbers(last_batch, model), numbers(last_batch, twin))
    programs = model.forward.planned.programs
    assert [program.halves.batch for program in programs] == [4, 3]
    assert programs[1].halves.memory.arena_taken <= programs[0].halves.memory.arena_taken


def test_a_program_with_other_states_is_refused():
    model = planned(normed().double(), example=X.clone().requires_grad_())  # gradients of inputs are states
    with pytest.raises(MbcError, match="does not fit into the memory of the first one") as raised:
        numbers(last_batch, model)
    assert "MBC340" in raised.value.message


def larger(model: Any) -> Any:
    yield cross_entropy(model, torch.cat((X, X)), torch.cat((LABELS, LABELS)))


@pytest.mark.parametrize("loop", [larger, saliency, attacked, inner_hook])
def test_a_call_that_the_plan_does_not_cover_runs_in_torch_and_says_so(loop):
    model, twin = normed().double(), normed().double()
    planned(model, fallback="torch")
    with pytest.warns(RuntimeWarning, match="runs in PyTorch"):
        ours = numbers(loop, model)
    agree(ours, numbers(loop, twin))
    strict = planned(normed().double())
    with pytest.raises(MbcError, match="does not cover this call") as raised:
        numbers(loop, strict)
    assert raised.value.code == "MBC339"


def test_a_plan_on_the_cpu_refuses_a_tensor_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    model = planned(normed(), precision="fp32", example=IMAGES)
    on_gpu = SimpleNamespace(
        dtype=torch.float32, shape=X.shape, is_cuda=True, get_device=int, data_ptr=int, __dlpack_device__=lambda: (2, 0)
    )
    monkeypatch.setattr("mbc.pytorch.planned_program.readable", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", int)
    with pytest.raises(MbcError, match=r"MBC151: input .* is in the memory of a GPU"):
        model.forward.planned.programs[0].begin([on_gpu])


def test_a_covered_loop_runs_in_the_plan_without_a_warning():
    model = planned(normed().double(), fallback="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(numbers(evaluated, model)) > 12

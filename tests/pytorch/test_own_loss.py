"""Losses of the user's own, which PyTorch computes between the halves of a step, beside the loop in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest

from mbc.errors import MbcError
from tests.pytorch.nets import IMAGES, LABELS, Net, nn, torch, trainer_of

functional, tree_map = nn.functional, torch.utils._pytree.tree_map


class Heads(nn.Module):
    """A convolution with batch norm, and one head for each name."""

    def __init__(self, **heads: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Conv2d(6, channels, 1) for name, channels in heads.items()})

    def forward(self, x: Any) -> Any:
        features = self.body(x)
        return {name: head(features) for name, head in self.heads.items()}


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Any, other: Any) -> Any:
        return self.net(x), self.net(other)


class Contrastive(nn.Module):
    """The cross-entropy of similarities of pairs (van den Oord et al. 2018), with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, outputs: Any) -> Any:
        one, other = (functional.normalize(output) for output in outputs)
        similarities = self.scale * one @ other.T
        pairs = torch.arange(len(one))
        return (functional.cross_entropy(similarities, pairs) + functional.cross_entropy(similarities.T, pairs)) / 2


def dice_and_entropy(outputs: Any, labels: Any) -> Any:
    shares = outputs["main"].softmax(1)
    wanted = functional.one_hot(labels, 5).movedim(-1, 1)
    dice = (2 * (shares * wanted).sum((0, 2, 3)) + 1) / ((shares + wanted).sum((0, 2, 3)) + 1)
    entropies = [functional.cross_entropy(outputs[name], labels) for name in ("main", "aux")]
    return 1 - dice.mean() + entropies[0] + 0.4 * entropies[1]


def focal(logits: Any, labels: Any) -> Any:
    logits /= 2.0  # in place
    logs = logits.log_softmax(1).gather(1, labels[:, None])
    return (-((1 - logs.exp()) ** 2) * logs).mean()


def squares_and_distances(outputs: Any, targets: Any) -> Any:
    distance = functional.l1_loss(outputs["normals"], targets["normals"])
    return functional.mse_loss(outputs["depth"], targets["depth"]) + 0.5 * distance


def mixed(logits: Any, labels: Any, others: Any, share: float) -> Any:
    one, other = (functional.cross_entropy(logits, of, label_smoothing=0.1) for of in (labels, others))
    return share * one + (1 - share) * other


random = torch.Generator().manual_seed(7)
PIXELS = torch.randint(0, 5, (4, 9, 11), generator=random)
MAPS = {"depth": torch.randn(4, 1, 9, 11, generator=random).double(),
        "normals": torch.randn(4, 3, 9, 11, generator=random).double()}  # fmt: skip
CASES: dict[str, tuple[Callable[[], Any], Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "Dice and cross-entropy": (lambda: Heads(main=5, aux=5), dice_and_entropy, (IMAGES,), (PIXELS,)),
    "focal": (Net, focal, (IMAGES,), (LABELS,)),
    "squares and distances": (lambda: Heads(depth=1, normals=3), squares_and_distances, (IMAGES,), (MAPS,)),
    "contrastive": (Siamese, Contrastive(), (IMAGES, IMAGES.flip(3)), ()),
    "mixup": (Net, mixed, (IMAGES,), (LABELS, LABELS.flip(0), 0.3)),
}


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def assert_equal_states(ours: Any, theirs: Any) -> None:
    """Assert that all numbers of two state dicts agree; the factor of a clipped gradient is in float32."""
    for key, wanted in theirs.items():
        if isinstance(wanted, dict):
            assert_equal_states(ours[key], wanted)
        elif isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(ours[key].to(wanted.dtype), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("make", "count"), [(sgd, 1), (adamw, 1), (adamw, 3)])
def test_steps_beside_torch(case, make, count):
    build, loss, inputs, targets = CASES[case]
    loss, judge = copy.deepcopy(loss), copy.deepcopy(loss)
    ours, theirs = build(), build().double()
    optimizer, other = make(ours), make(theirs)
    parts = [
        tree_map(lambda x, n=n: getattr(x, "roll", lambda *_, x=x: x)(n, 0), (inputs, targets)) for n in range(count)
    ]
    whole = tree_map(lambda *x: torch.cat(x) if isinstance(x[0], torch.Tensor) else x[0], *parts)
    more = {"clip_norm": 0.5, "check": case == "focal", "accumulate": count}
    with trainer_of(ours, example=inputs, loss=loss, optimizer=optimizer, **more) as net:
        for _ in range(4):
            other.zero_grad()
            wanted = [judge(theirs(*[x.double() for x in part]), *of_part) / count for part, of_part in parts]
            torch.stack(wanted).sum().backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            other.step()
            got = net.step(*whole[0], *whole[1])
            assert not got.requires_grad and got.item() == pytest.approx(sum(loss.item() for loss in wanted), rel=1e-7)
        assert_equal_states(ours.state_dict(), theirs.state_dict())
        assert_equal_states(optimizer.state_dict()["state"], other.state_dict()["state"])
    for parameter, wanted in zip(*([*x.parameters()] if isinstance(x, nn.Module) else [] for x in (loss, judge)),
                                 strict=True):  # fmt: skip
        torch.testing.assert_close(parameter.grad, wanted.grad)  # the loop updates parameters of the loss itself


def test_a_mistake_in_a_later_mini_batch_leaves_the_parameters():
    model, twin, calls = Heads(main=5), Heads(main=5).double(), list[Any]()

    def second_fails(outputs: Any, objects: Any) -> Any:
        calls.append(objects)
        labels = torch.stack([one["labels"] for one in objects])
        return fails() if len(calls) == 2 else functional.cross_entropy(outputs["main"], labels)

    images, labels = torch.cat([IMAGES, IMAGES.flip(3)]), [{"labels": row} for row in (*PIXELS, *PIXELS)]
    optimizer, other = sgd(model), sgd(twin)
    before = copy.deepcopy(dict(model.named_parameters()))
    with trainer_of(model, loss=second_fails, optimizer=optimizer, accumulate=2) as trainer:
        with pytest.raises(ValueError, match="a mistake in the loss"):
            trainer.step(images, labels)
        assert_equal_states(dict(model.named_parameters()), before)
        with pytest.raises(MbcError, match="MBC331: the loss gets a set, which mbc does not divide into mini-batches"):
            trainer.step(images, {1})
        with pytest.raises(MbcError, match="MBC336: a batch has 4 samples, but a step of this trainer takes 8"):
            trainer.step(IMAGES, PIXELS)
        trainer.step(images, labels)
    twin(images[:4].double())  # the first mini-batch before the mistake changes the statistics, as in torch
    for part in (images[:4], images[4:]):
        (functional.cross_entropy(twin(part.double())["main"], PIXELS) / 2).backward()
    other.step()
    assert_equal_states(model.state_dict(), twin.state_dict())


def test_averages_schedules_and_evaluation():
    ours, theirs = Net(), Net().double()
    optimizer, other = sgd(ours), sgd(theirs)
    averages = torch.optim.swa_utils.AveragedModel(
        theirs, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(of, 0.5) for of in (optimizer, other)]
    with trainer_of(ours, loss=focal, optimizer=optimizer, ema=0.9) as trainer:
        for _ in range(3):
            other.zero_grad()
            focal(theirs(IMAGES.double()), LABELS).backward()
            other.step()
            averages.update_parameters(theirs)
            trainer.step(IMAGES, LABELS)
            for schedule in schedules:
                schedule.step()
        assert_equal_states(trainer.averages(), averages.module.state_dict())
        torch.testing.assert_close(trainer.evaluate(IMAGES), theirs.eval()(IMAGES.double()), rtol=1e-8, atol=1e-10)


def fails(*_: Any) -> Any:
    raise ValueError("a mistake in the loss")


def test_a_step_without_a_loss_changes_nothing():
    model, current = Heads(main=5, aux=2), [cast("Callable[..., Any]", fails)]
    optimizer = adamw(model)
    with trainer_of(model, loss=lambda *given: current[0](*given), optimizer=optimizer) as trainer:
        kernel, bias = model.body[0].weight, model.heads["main"].bias
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        losses: list[tuple[Any, str]] = [
            (lambda o, y: o["main"].mean(), r"MBC331: the loss reads no output on which 'heads.aux.weight'"),
            (lambda o, y: o["main"].mean(1), r"MBC331: the loss is a tensor of shape \[4, 9, 11\], not a tensor with"),
            (lambda o, y: o["main"].mean().item(), "MBC331: the loss is float, not a tensor with one number"),
            (lambda o, y: o["main"].detach().mean() * bias.sum(), "MBC331: the loss has no gradient with respect"),
            (lambda o, y: trainer.evaluate(IMAGES).mean(), "MBC331: the loss calls the trainer whose step"),
            (lambda o, y: torch.ones(()), "MBC331: the loss has no gradient with respect to the outputs"),
            (lambda o, y: o["main"].mean() + kernel.norm(), r"MBC331: the loss reads the parameter 'body\.0\.weight'"),
        ]
        for loss, words in losses:
            current[0] = loss
            with pytest.raises(MbcError, match=words):
                trainer.step(IMAGES, PIXELS)
        current[0] = fails
        with pytest.raises(ValueError, match="a mistake in the loss"):
            trainer.step(IMAGES, PIXELS)
        assert_equal_states(model.state_dict(), before[0])
        current[0] = lambda o, y: (o["main"].mean() + o["aux"].mean()) * torch.nan
        assert torch.isnan(trainer.step(IMAGES, PIXELS))
        assert_equal_states(model.state_dict(), {k: v for k, v in before[0].items() if "num_batches" not in k})
        assert_equal_states(optimizer.state_dict()["state"], before[1])
        current[0] = lambda o, y: functional.cross_entropy(o["main"], y) + o["aux"].square().mean()
        assert trainer.step(IMAGES, PIXELS) > trainer.step(IMAGES, PIXELS)
        with pytest.raises(MbcError, match="MBC167"):
            trainer.step()


@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_scale_is_that_of_losses_of_the_language(count):
    """Steps in fp16, of which the second overflows; gradients of the third are below the numbers of fp16."""
    ours, theirs = Net(), Net()
    judge, images = nn.CrossEntropyLoss(), [IMAGES, IMAGES * torch.inf, IMAGES]
    trainers = [trainer_of(net, loss=loss, precision="fp16", check=False, accumulate=count)
                for net, loss in ((ours, lambda output, labels: judge(output, labels)), (theirs, judge))]  # fmt: skip
    for x in images:
        one, other = (float(trainer.step(x.repeat(count, 1, 1, 1), LABELS.repeat(count))) for trainer in trainers)
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)
        assert trainers[0].module.control == trainers[1].module.control
    for key, wanted in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], wanted), key


def test_small_gradients_survive_in_fp16():
    model, twin = Net(), Net()
    optimizer, other = (torch.optim.SGD(net.parameters(), lr=1e7) for net in (model, twin))
    with trainer_of(
        model, loss=lambda o, y: 1e-8 * focal(o, y.to(o.device)), optimizer=optimizer, precision="fp16"
    ) as trainer:
        trainer.step(IMAGES, LABELS)
    (1e-8 * focal(twin(IMAGES), LABELS)).backward()
    other.step()
    for key, wanted in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], wanted, rtol=2e-3, atol=1e-3)

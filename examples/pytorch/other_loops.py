"""Training loops beyond the usual one, with and without mbc: the only difference is the call of `plan`.

`python other_loops.py` runs them in PyTorch, `python other_loops.py --mbc` with `mbc.module`; both print equal losses.
"""

import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from digits_network import loaders, network
from torch import nn
from torch.nn import functional as F

import mbc

STEPS = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Plan = Callable[[Any, Any], Any]  # from a model and an example of its input to the model


def batches() -> Iterator[Any]:
    return ([tensor.to(DEVICE) for tensor in batch] for batch in islice(iter(loaders()[0]), STEPS))


def mixed(plan: Plan) -> Iterator[Any]:
    """Train with mixup, gradients of two mini-batches, clipping, and a moving average of the weights."""
    model = plan(network().to(DEVICE), torch.zeros(64, 1, 8, 8, device=DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    for number, (images, labels) in enumerate(batches()):
        logits = model(0.8 * images + 0.2 * images.flip(0))
        loss = 0.8 * F.cross_entropy(logits, labels) + 0.2 * F.cross_entropy(logits, labels.flip(0))
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        yield loss


def gan(plan: Plan) -> Iterator[Any]:
    """Train a generator and a critic: a pass for real images, and one for drawn images, which passes gradients on."""
    generator = nn.Sequential(nn.ConvTranspose2d(16, 32, 4), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1))
    critic = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1))
    generator = plan(generator.to(DEVICE), torch.zeros(64, 16, 1, 1, device=DEVICE))
    critic = plan(critic.to(DEVICE), torch.zeros(64, 1, 8, 8, requires_grad=True, device=DEVICE))
    ours, theirs = (torch.optim.Adam(m.parameters(), 2e-3, (0.5, 0.99)) for m in (generator, critic))
    noise = torch.Generator().manual_seed(1)
    for images, _ in batches():
        drawn = generator(torch.randn(64, 16, 1, 1, generator=noise).to(DEVICE))
        loss = F.softplus(-critic(images)).mean() + F.softplus(critic(drawn.detach())).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        deceived = F.softplus(-critic(drawn)).mean()
        ours.zero_grad()
        deceived.backward()
        ours.step()
        yield loss + deceived


class Segmentation(nn.Module):
    """A network that finds the ink, with an auxiliary head that names the digit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU())
        self.mask, self.digit = nn.Conv2d(16, 2, 1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"mask": self.mask(y), "digit": self.digit(y.mean((2, 3)))}


def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, t = logits.softmax(1)[:, 1], target.float()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def segmentation(plan: Plan) -> Iterator[Any]:
    """Train with Dice and cross entropy of a mask, and the loss of an auxiliary head with weight 0.4."""
    model = plan(Segmentation().to(DEVICE), torch.zeros(64, 1, 8, 8, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.99, nesterov=True)
    for images, labels in batches():
        outputs, ink = model(images), (images[:, 0] > 0.5).long()
        loss = dice(outputs["mask"], ink) + F.cross_entropy(outputs["mask"], ink)
        loss = loss + 0.4 * F.cross_entropy(outputs["digit"], labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        optimizer.step()
        yield loss


def siamese(plan: Plan) -> Iterator[Any]:
    """Train with two images through one network, in two passes before one backward pass."""
    model = plan(network().to(DEVICE), torch.zeros(64, 1, 8, 8, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for images, labels in batches():
        one, two = model(images), model(images.roll(1, 0))
        far, alike = (one - two).square().sum(1), (labels == labels.roll(1, 0)).float()
        loss = (alike * far + (1 - alike) * F.relu(4 - far)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def resumed(plan: Plan) -> Iterator[Any]:
    """Train half of the steps, save model and optimizer, and start afresh from there."""
    file = io.BytesIO()
    for half in range(2):
        model = plan(network().to(DEVICE), torch.zeros(64, 1, 8, 8, device=DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if half:
            file.seek(0)
            saved = torch.load(file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for images, labels in islice(batches(), STEPS // 2 * half, STEPS // 2 * (half + 1)):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


LOOPS = (mixed, gan, segmentation, siamese, resumed)


def main(planned: bool) -> dict[str, list[float]]:
    """Run all loops, print the last loss of each, and return all losses."""
    plan = partial(mbc.module, memory="1GB", progress=False) if planned else lambda model, example: model
    losses: dict[str, list[float]] = {}
    for loop in LOOPS:
        torch.manual_seed(0)
        losses[loop.__name__] = [loss.item() for loss in loop(plan)]
        print(f"{loop.__name__}: loss {losses[loop.__name__][-1]:.4f}")
    return losses


if __name__ == "__main__":
    main("--mbc" in sys.argv)

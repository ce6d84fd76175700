"""Dice, Tversky and focal losses against the formulas of nnU-Net and MONAI in PyTorch, along one to three axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Optimizer
from mbc.ir.types import Precision
from mbc.ops.base import ShapeError
from mbc.passes.training_step import differentiate
from tests.ir.execution import new_control, parameter_gradients, step
from tests.ir.networks import Writer

torch = pytest.importorskip("torch", reason="the independent reference is PyTorch, which is not installed")
F = torch.nn.functional
SIZES = ((7,), (4, 6), (4, 2, 6))
CLASSES = 4
WEIGHTS = torch.tensor([0.75, 0.25, 0.25, 0.25]).double()  # of alpha = 0.25
Tensor = Any


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).movedim(-1, 1).double()


def totals(*terms: Tensor) -> list[Tensor]:
    """Return the sums over positions."""
    return [x.sum(tuple(range(2, x.ndim))) for x in terms]


def soft_dice(p: Tensor, t: Tensor, smooth: float = 1e-5, batch: bool = True, first: int = 1) -> Tensor:
    """1 plus nnU-Net's MemoryEfficientSoftDiceLoss."""
    both, sizes = (x[:, first:].sum(0) if batch else x[:, first:] for x in totals(p * t, p + t))
    return 1 - ((2 * both + smooth) / torch.clip(sizes + smooth, 1e-8)).mean()


def nnunet(x: Tensor, y: Tensor, **settings: Any) -> Tensor:
    """nnU-Net's DC_and_CE_loss, in which ignored positions count in no sum."""
    mask = (y != 255)[:, None]
    dice = soft_dice(x.softmax(1) * mask, hot(torch.where(y == 255, 0, y)) * mask, **settings)
    return dice + F.cross_entropy(x, y, ignore_index=255)


def nnunet_regions(x: Tensor, t: Tensor) -> Tensor:
    return soft_dice(x.sigmoid(), t, first=0) + F.binary_cross_entropy_with_logits(x, t)


def supervised(x: Tensor, y: Tensor) -> Tensor:
    wanted = F.interpolate(y[:, None].double(), x.shape[2:], mode="nearest")[:, 0].long()
    return nnunet(x, wanted) + 0.5 * F.cross_entropy(x, wanted)


def monai_squared(x: Tensor, t: Tensor) -> Tensor:
    """MONAI's DiceLoss(sigmoid=True, squared_pred=True, smooth_nr=0)."""
    both, sizes = totals(x.sigmoid() * t, t**2 + x.sigmoid() ** 2)
    return (1 - 2 * both / (sizes + 1e-5)).mean()


def monai_tversky(x: Tensor, y: Tensor, alpha: float = 0.3, beta: float = 0.7, gamma: float = 1.0) -> Tensor:
    p, t = x.softmax(1), hot(y)
    both, wrong = totals(p * t, alpha * p * (1 - t) + beta * (1 - p) * t)
    return ((1 - (both + 1e-5) / (both + wrong + 1e-5)) ** gamma).mean()


def monai_focal(x: Tensor, y: Tensor) -> Tensor:
    """MONAI's mean also divides by the number of classes."""
    loss = -((1 - x.softmax(1)) ** 2) * x.log_softmax(1) * hot(y)
    return (loss.movedim(1, -1) * WEIGHTS).mean() * CLASSES


def sigmoid_focal(x: Tensor, t: Tensor) -> Tensor:
    """torchvision's sigmoid_focal_loss, which is MONAI's, too."""
    wrong = x.sigmoid() * (1 - t) + (-x).sigmoid() * t
    loss = F.binary_cross_entropy_with_logits(x, t, reduction="none") * wrong**2
    return ((0.25 * t + 0.75 * (1 - t)) * loss).mean()


def weighted(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, WEIGHTS, ignore_index=255)


NNUNET = {"smooth": 1e-5, "background": False, "batch": True, "cross_entropy": 1.0}
TVERSKY = {"smooth": 1e-5, "alpha": 0.3, "beta": 0.7}
LOSSES: dict[str, tuple[str, dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "nnU-Net": ("dice", NNUNET, nnunet),
    "by image": ("dice", {**NNUNET, "batch": False, "smooth": 0.0}, lambda x, y: nnunet(x, y, batch=False, smooth=0.0)),
    "ignored": ("dice", {**NNUNET, "ignore_index": 255}, nnunet),
    "regions": ("dice", {**NNUNET, "background": True, "sigmoid": True}, nnunet_regions),
    "supervised": ("dice", NNUNET, supervised),
    "squared": ("dice", {"smooth": 0.0, "smooth_below": 1e-5, "squared": True, "sigmoid": True}, monai_squared),
    "Tversky": ("tversky", TVERSKY, monai_tversky),
    "Dice": ("dice", {"smooth": 2e-5}, lambda x, y: monai_tversky(x, y, 0.5, 0.5)),
    "focal Tversky": ("tversky", {**TVERSKY, "gamma": 0.75}, lambda x, y: monai_tversky(x, y, gamma=0.75)),
    "focal": ("focal", {"alpha": 0.25}, monai_focal),
    "focal regions": ("focal", {"alpha": 0.25, "sigmoid": True}, sigmoid_focal),
    "weighted": ("softmax_cross_entropy", {"ignore_index": 255, "class_weights": (0.75, 0.25, 0.25, 0.25)}, weighted),
}


@pytest.mark.parametrize("size", SIZES, ids=len)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_nnunet_and_monai(name: str, size: tuple[int, ...]):
    layer, settings, reference = LOSSES[name]
    random, w = np.random.default_rng(4), Writer(3)
    whole = (2 * size[0], *(3 * n for n in size[1:])) if name == "supervised" else size
    logits, shape = w.parameter("x", 3, CLASSES, *size), (CLASSES, *size) if settings.get("sigmoid") else whole
    target, values = w.input("t", *shape, classes=shape == whole), random.integers(0, 2, (3, *shape), np.int32)
    values[random.random(values.shape) < 0.3] = settings.get("ignore_index", 1)
    losses = [(w(layer, logits, target, **settings), 0.7)]
    if name == "supervised":
        losses.append((w("softmax_cross_entropy", logits, target), 0.35))
    graph = differentiate(w.finish((logits,), losses), Optimizer(), Precision.FP64)
    x = torch.tensor(3 * random.standard_normal((3, CLASSES, *size)), requires_grad=True)
    values = values if shape == whole else values.astype(np.float64)
    ours = step(graph, {"x": x.detach().numpy(), "t": values}, new_control(step=1, seed=0))
    loss = 0.7 * reference(x, torch.tensor(values, dtype=torch.int64 if shape == whole else torch.float64))
    loss.backward()
    assert abs(ours[graph.loss][0] - loss.item()) <= 1e-12
    np.testing.assert_allclose(parameter_gradients(graph, ours)["x"], x.grad.numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("size", SIZES, ids=len)
def test_a_target_that_no_whole_step_samples_is_refused(size: tuple[int, ...]):
    w = Writer(2)
    logits, target = w.input("x", CLASSES, *size), w.input("t", *(2 * n - 1 for n in size), classes=True)
    with pytest.raises(ShapeError, match=r"is neither of the size of the logits .* nor a whole multiple of it"):
        w("dice", logits, target)

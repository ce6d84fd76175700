"""Fifty steps of a loop in fp32, through `mbc.from_torch` and by PyTorch, and the same in float64: `from_torch.py
--steps50`.

Each loop has its own copy of one model, the same mini-batches and a schedule of PyTorch. Compared with float64 are the
losses of all steps, and parameters and statistics after the last one: the largest relative error of a loss, and the
median error over parameters, are at most twice PyTorch's own in float32; errors under LEAST, which are the luck of a
draw, count as LEAST. `model.state_dict()` then loads into a fresh model, which evaluates as mbc does within 1e-5. What
draws random numbers is set to drop nothing. The networks are small ones, with smooth activations: one ReLU that
comes out on the other side is wrong by more than fifty steps of rounding, whoever takes it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from imported import LARGEST_ERROR, built
from imported_gradients import drop_nothing
from modules import errors, median
from recipe_steps import LEAST, TIMES_TORCH
from record import attempt, results, show

import mbc

# Pixels and rows.
NETWORKS = {
    "timm/test_convnext": (64, 8),
    "timm/test_efficientnet": (64, 8),
    "timm/tinynet_e": (64, 8),
    "timm/vit_tiny_patch16_224": (224, 2),
}
STEPS, CLASSES = 50, 10
MEASURE_FOR = "20s"  # on a GPU: results are compared, not times
COLUMNS = ("name", "loss", "loss_error", "torch_loss_error", "median", "torch_median", "evaluation_error", "passed")


def compared(name: str, size: int, rows: int, device: str, steps: int = STEPS) -> dict[str, Any]:
    """The row of one network, with mini-batches of `rows` images of `size` pixels."""
    torch.manual_seed(0)
    model = built(name).train()
    drop_nothing(model)
    exact, theirs, ours = copy.deepcopy(model).double().to(device), copy.deepcopy(model).to(device), model.to(device)
    batches = [(torch.randn(rows, 3, size, size, device=device), torch.randint(0, CLASSES, (rows,), device=device))
               for _ in range(steps)]  # fmt: skip
    reference, own = (by_torch(one, batches) for one in (exact, theirs))
    optimizer, schedule = updates(ours)
    found: list[float] = []
    with mbc.from_torch(
        ours, batches[0][0], loss="softmax_cross_entropy", optimizer=optimizer, device=device, measure_for=MEASURE_FOR
    ) as trainer:
        for images, labels in batches:
            found.append(float(trainer.step(images, labels)))
            schedule.step()
        state = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
        evaluated = trainer.evaluate(batches[0][0]).cpu().numpy()
    fresh = built(name).to(device)
    fresh.load_state_dict(state)
    with torch.no_grad():
        expected = fresh.eval()(batches[0][0]).cpu().numpy()
    states, wanted = (_arrays(one.state_dict()) for one in (theirs, exact))
    mine, peer = errors(_arrays(state), wanted), errors(states, wanted)
    row = {
        "loss": reference[-1],
        "loss_error": _largest(found, reference),
        "torch_loss_error": _largest(own, reference),
        "median": median(mine.values()),
        "torch_median": median(peer.values()),
        "evaluation_error": float(np.linalg.norm(evaluated - expected) / np.linalg.norm(expected)),
    }
    return row | {"passed": keeps(row)}


def keeps(row: Mapping[str, Any]) -> bool:
    """Whether losses, states and the evaluation of the checkpoint are within the rule."""
    pairs = (("loss_error", "torch_loss_error"), ("median", "torch_median"))
    within = all(row[ours] <= TIMES_TORCH * max(row[theirs], LEAST) for ours, theirs in pairs)
    return within and row["evaluation_error"] <= LARGEST_ERROR


def updates(model: Any) -> tuple[Any, Any]:
    """An optimizer, and its schedule: the rate is halved twice."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)


def by_torch(model: Any, batches: Sequence[tuple[Any, Any]]) -> list[float]:
    """The losses of PyTorch's loop, in the precision of the model."""
    optimizer, schedule = updates(model)
    losses: list[float] = []
    dtype = next(model.parameters()).dtype
    for images, labels in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.to(dtype)), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def run(device: str, only: Sequence[str], again: bool) -> None:
    """Rows are written one by one, and those that are there stay."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    kept = results(f"from_torch_steps_{device}", again=again, steps=STEPS)
    for name in only or NETWORKS:
        if not kept.done(name):
            kept.put(attempt(lambda name=name: compared(name, *NETWORKS.get(name, (64, 8)), device), name))
            show([kept.rows[name]], COLUMNS)
    show(list(kept.rows.values()), COLUMNS)


def _largest(found: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(found, reference, strict=True))


def _arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters and statistics, without counters."""
    return {key: t.detach().cpu().double().numpy() for key, t in state.items() if t.is_floating_point()}

"""The tasks of `tuner.py`: networks, data, and what is known of them.

* `synthetic`: linear regression with noise of the targets, whose noise scale follows from the data by arithmetic
* `digits`: handwritten digits (scikit-learn's), shifted at random by up to a pixel within the step
* `textures`: patches of twelve pictures (`textures.py --prepare`), cropped and flipped at random within the step; test
  patches are of regions that no training patch sees
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from textures_task import DATA as PATCHES

Array = NDArray[np.float64]
FEATURES, ROWS, NOISE = 32, 4096, 4.0

SYNTHETIC = f"""network synthetic(batch = 64) {{
  input x[batch, {FEATURES}] : float
  input y[batch, 1] : float
  prediction = x |> linear(1) @head
  output prediction
  metric error = (prediction, y) |> mse
  loss (prediction, y) |> mse
}}
train {{ optimizer = sgd(momentum=0.9) }}
"""
DIGITS = """block stage(channels) on x {
  return x |> conv(channels, 3, pad=1) |> bn |> relu
}
network digits(batch = 64, classes = 10, width = 12) {
  input photo[batch, 1, 8, 8] : uint8
  input target[batch] : class
  logits = photo |> augment(crop=8, pad=1, mean=(0.3,), std=(0.38,)) |> stage(width) |> maxpool(2)
                 |> stage(2 * width) |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9, weight_decay=1e-4) }
"""
TEXTURES = """block stage(channels) on x {
  return x |> conv(channels, 3, stride=2, pad=1) |> bn |> relu
}
network textures(batch = 64, classes = 12, width = 16) {
  input photo[batch, 56, 56, 3] : uint8
  input target[batch] : class
  logits = photo |> augment(crop=48, flip=true, order=hwc, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
                 |> stage(width) |> stage(2 * width) |> stage(4 * width) |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9, weight_decay=5e-4) }
"""


@dataclass(frozen=True)
class Task:
    """A training is to reach `target` of `metric` on test data, in `epochs` at most."""

    name: str
    source: str
    metric: str
    target: float
    rises: bool
    epochs: int


# Of the synthetic task the target is the least loss that the rows of the training lead to, times so much.
ABOVE_LEAST = 1.01
TASKS = (
    Task("synthetic", SYNTHETIC, "error", ABOVE_LEAST, False, 12),
    Task("digits", DIGITS, "accuracy", 0.96, True, 24),
    Task("textures", TEXTURES, "accuracy", 0.85, True, 24),
)


def write_data(task: Task, folder: Path) -> None:
    """`train.npz` and `test.npz`."""
    if task.name == "synthetic":
        draws = np.random.default_rng(17)
        true = draws.normal(0, 1, (FEATURES, 1))
        for name in ("train", "test"):
            x = draws.normal(0, 1, (ROWS, FEATURES))
            y = x @ true + draws.normal(0, NOISE, (ROWS, 1))
            np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=y.astype(np.float32))
        return
    if task.name == "textures":
        if not PATCHES.exists():
            raise SystemExit(f"{PATCHES} is missing: python benchmarks/textures.py --prepare FOLDER_OF_PICTURES")
        patches = np.load(PATCHES)
        for name, prefix in (("train", ""), ("test", "test_")):
            np.savez(folder / f"{name}.npz", photo=patches[f"{prefix}photo"], target=patches[f"{prefix}target"])
        return
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    digits = load_digits()
    photos = (digits.images * 15.9375).astype(np.uint8)[:, None]  # pyright: ignore[reportAttributeAccessIssue]
    labels = digits.target.astype(np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    held_out = np.zeros(len(labels), bool)
    draws = np.random.default_rng(0)
    for digit in range(10):
        held_out[draws.permutation(np.flatnonzero(labels == digit))[::5]] = True
    for name, rows in (("train", ~held_out), ("test", held_out)):
        np.savez(folder / f"{name}.npz", photo=photos[rows], target=labels[rows])


def target_of(task: Task, folder: Path) -> float:
    """The value of the metric that is asked for, of the data that were written there."""
    if task.name != "synthetic":
        return task.target
    train, test = (np.load(folder / f"{name}.npz") for name in ("train", "test"))
    found = np.linalg.lstsq(np.c_[train["x"], np.ones(ROWS)], train["y"], rcond=None)[0]
    return task.target * float(np.mean((np.c_[test["x"], np.ones(ROWS)] @ found - test["y"]) ** 2))


def known_noise_scale(x: Array, y: Array, weight: Array, bias: Array) -> float:
    """Of the synthetic task at these weights: the trace of the covariance of a row's gradient over the squared norm of
    the mean one. Of (x . w + b - y)^2 the gradient is 2 (x . w + b - y) (x, 1)."""
    residual = x @ weight.reshape(-1, 1) + bias.reshape(1, -1) - y
    gradients = 2 * residual * np.concatenate([x, np.ones((len(x), 1))], axis=1)
    mean = gradients.mean(axis=0)
    return float(((gradients - mean) ** 2).sum(axis=1).mean() / (mean @ mean))

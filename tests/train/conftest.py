"""A network small enough to train by hand: softmax regression that saves real safetensors files."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from mbc.ir.graph import Attributes, Operation, Optimizer, Role, TrainingGraph, Value
from mbc.ir.types import DType, Precision, TensorType
from mbc.runtime.checkpoint import Checkpoint, write_checkpoint

BATCH, FEATURES, CLASSES = 8, 5, 3


class StepLoss(float):
    """A loss with the accuracy of its step. `looked`: number of steps at each time that somebody read the loss."""

    accuracy: float | None = None
    idle_s: float | None = None
    looked: list[int]
    steps: list[float]

    def __float__(self) -> float:
        self.looked.append(len(self.steps))
        return float.__float__(self)


class Regression:
    """The part of a module that the training loop needs. It is float64, so that equal inputs give equal bits."""

    def __init__(self) -> None:
        self.weights = np.zeros((FEATURES, CLASSES))
        self.rates: list[float] = []
        self.looked: list[int] = []
        self.skipped = 0
        self.overflow = 0  # steps that fp16 would skip
        self.poison = False
        self.poison_at = 0
        self.spoil_at = 0

    def step(self, x: Any, y: Any, *, lr: float) -> StepLoss:
        assert x.shape == (BATCH, FEATURES) and y.shape == (BATCH,)
        self.rates.append(lr)
        if self.poison or len(self.rates) == self.poison_at or not np.isfinite(self.weights).all():
            self.skipped += 1
            return self._loss(float("nan"), None)
        logits = self.forward(x)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        accuracy = float(np.mean(np.argmax(logits, 1) == y))
        if len(self.rates) <= self.overflow:
            self.skipped += 1
            return self._loss(1.0, accuracy)
        loss = float(-np.log(p[np.arange(BATCH), y]).mean())
        p[np.arange(BATCH), y] -= 1
        self.weights -= lr * x.astype(np.float64).T @ p / BATCH
        if len(self.rates) == self.spoil_at:
            self.weights[0, 0] = np.inf
        return self._loss(loss, accuracy)

    def _loss(self, value: float, accuracy: float | None) -> StepLoss:
        loss = StepLoss(value)
        loss.accuracy, loss.looked, loss.steps = accuracy, self.looked, self.rates
        return loss

    @property
    def control(self) -> dict[str, int]:
        return {"skipped": self.skipped}

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        return {"fixed": (1,), "w": self.weights.shape}

    def state(self, name: str) -> np.ndarray:
        return {"fixed": np.ones(1), "w": self.weights}[name]

    def set_state(self, name: str, array: np.ndarray) -> None:
        raise AssertionError("it has no statistics")

    def forward(self, x: Any) -> Any:
        return x.astype(np.float64) @ self.weights

    def save(self, path: Any, *, metadata: Any) -> None:
        write_checkpoint(Path(path), [("w", self.weights)], metadata)

    def load(self, path: Any) -> None:
        self.weights = Checkpoint(Path(path)).read("w").copy()


@pytest.fixture
def regression() -> Regression:
    return Regression()


@pytest.fixture
def graph() -> TrainingGraph:
    """Return a graph with inputs `image` and `target`, output `logits`, and a softmax cross-entropy loss."""
    values = {
        "image": Value("image", TensorType((BATCH, FEATURES), DType.FP32), Role.INPUT, True),
        "target": Value("target", TensorType((BATCH,), DType.INT32), Role.INPUT, True),
        "logits": Value("logits", TensorType((BATCH, CLASSES), DType.FP32), per_sample=True),
        "loss": Value("loss", TensorType((1,), DType.FP32)),
        "correct": Value("correct", TensorType((1,), DType.FP32)),
    }
    loss = Operation("loss", "softmax_cross_entropy", ("logits", "target"), ("loss", "correct"), Attributes())
    return TrainingGraph(
        name="regression", batch=BATCH, precision=Precision.FP32, optimizer=Optimizer(),
        values=MappingProxyType(values), train=(loss,), infer=(), states=(), inputs=("image", "target"),
        infer_inputs=("image",), outputs=("logits",), infer_outputs=("infer.logits",), loss="loss",
        metrics=("correct",), updates=(),
    )  # fmt: skip


@pytest.fixture
def rows() -> tuple[Any, Any]:
    """Return 61 separable rows, which are seven mini-batches and five rows left over."""
    generator = np.random.default_rng(3)
    y = generator.integers(0, CLASSES, 61)
    x = generator.normal(0, 0.3, (61, FEATURES)).astype(np.float32)
    x[np.arange(61), y] += 2
    return x, y

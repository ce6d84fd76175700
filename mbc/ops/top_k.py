"""Top-k accuracy: a metric, which nothing is trained by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.loss import check_classes, positions


@dataclass(frozen=True, slots=True)
class TopK(Attributes):
    """`k`: among how many of the largest logits the target may be."""

    k: int


def _shape(a: TopK, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    if not 1 <= a.k <= logits.shape[1]:
        raise ShapeError(f"k is {a.k}, but must be from 1 to {logits.shape[1]}, the number of classes")
    return (TensorType((1,), master(logits.dtype)),)


def _evaluate(a: TopK, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Of equal logits the first is the largest, and NaN is above all, so that a target whose logit is NaN is wrong."""
    logits, target = inputs
    classes = logits.shape[1]
    own = np.take_along_axis(logits, np.clip(target, 0, classes - 1)[:, None], 1)
    numbers: Array = np.arange(classes, dtype=np.int32).reshape(1, classes, *(1,) * (logits.ndim - 2))
    before = ~(logits <= own) | ((logits == own) & (numbers < target[:, None]))
    right = (before.sum(axis=1) < a.k) & (target >= 0) & (target < classes) & ~np.isnan(own[:, 0])
    return (np.array([right.sum() / positions(logits, call)], logits.dtype),)


OPS = (OpKind("top_k", TopK, _shape, _evaluate, reduces=True),)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("top_k", TopK(settings["k"]), inputs)[0]


LAYERS = (
    Layer(
        "top_k",
        (Parameter("k", "int", 5),),
        _build,
        (2, 2),
        "(logits, target) |> top_k: share of rows and positions whose target is among the k largest logits. A metric.",
        metric=True,
    ),
)

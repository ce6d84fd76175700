"""Mean intersection over union (the Jaccard index) of classes: a metric of segmentation, not a loss.

A position belongs to the class of its largest logit, and to the class of its target. For each class, the operation
counts the positions that belong to it by both, and by either, over the whole mini-batch (of all ranks). The mean is
over the classes that occur; it is NaN if none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Layer, LayerBuilder, NoAttributes, OpKind, ShapeError, master
from mbc.ops.collective import over_all_ranks
from mbc.ops.loss import check_classes
from mbc.ops.weighted_cross_entropy import IGNORE_INDEX, ignored_by

OVERLAP_MEAN = "mean_iou_of_overlap"  # the kind that reads the counts of all ranks


@dataclass(frozen=True, slots=True)
class MeanIou(Attributes):
    """Settings of the metric. `ignored`: class numbers of targets whose positions are left out, at most one."""

    ignored: tuple[int, ...]


def _shape(_: MeanIou, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    return (TensorType((1,), master(logits.dtype)),)


def _overlap_shape(_: MeanIou, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    logits, target = inputs
    check_classes(logits, target)
    return (TensorType((2, logits.shape[1]), master(logits.dtype)),)


def _mean_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (overlap,) = inputs
    if len(overlap.shape) != 2 or overlap.shape[0] != 2:
        raise ShapeError(f"two counts for each class are needed, but they are {overlap}")
    return (TensorType((1,), overlap.dtype),)


def _overlap(a: MeanIou, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    classes = logits.shape[1]
    counts = (target >= 0) & (target < classes) & ~np.isin(target, a.ignored)
    predicted, wanted = logits.argmax(axis=1)[counts], target[counts]
    both = np.bincount(wanted[predicted == wanted], minlength=classes)
    either = np.bincount(predicted, minlength=classes) + np.bincount(wanted, minlength=classes) - both
    return (np.stack((both, either)).astype(logits.dtype),)


def _mean(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    both, either = inputs[0].astype(np.float64)
    there = either > 0
    mean = (both[there] / either[there]).mean() if there.any() else np.nan
    return (np.array([mean], inputs[0].dtype),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    name = f"{op.outputs[0]}.overlap"
    overlap = over_all_ranks(e, "class_overlap", op.attributes, op.inputs, name)
    return e.emit(OVERLAP_MEAN, NoAttributes(), (overlap,), op.outputs, op.name)


OPS = (
    OpKind("mean_iou", MeanIou, _shape, expand=_expand, reduces=True),
    OpKind("class_overlap", MeanIou, _overlap_shape, _overlap, reduces=True),
    OpKind(OVERLAP_MEAN, NoAttributes, _mean_shape, _mean, reduces=True),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("mean_iou", MeanIou(ignored_by(settings)), inputs)[0]


LAYERS = (
    Layer(
        "mean_iou",
        (IGNORE_INDEX,),
        _build,
        (2, 2),
        "(logits, target) |> mean_iou: for each class, the positions that both logits and target assign to it, over "
        "those that either assigns to it; mean over the classes that occur. Positions whose target is ignore_index "
        "do not count. A metric.",
        metric=True,
    ),
)

"""Mean intersection over union (the Jaccard index) of classes: a metric of segmentation, which nothing is trained by.

A position belongs to the class of its largest logit, and to that of its target. Of each class the positions that belong
to it by both are counted, and those that do by either, over the whole mini-batch, of several ranks that of all of them.
The mean is over the classes that are there at all; where none is it is NaN.
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

OVERLAP_MEAN = "mean_iou_of_overlap"  # the kind that has the counts of all


@dataclass(frozen=True, slots=True)
class MeanIou(Attributes):
    """`ignored`: the class numbers of targets whose positions are left out, one at most."""

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
        raise ShapeError(f"two counts a class are wanted, but they are {overlap}")
    return (TensorType((1,), overlap.dtype),)


def _overlap(a: MeanIou, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    logits, target = inputs
    classes = logits.shape[1]
    counts = (target >= 0) & (target < classes) & ~np.isin(target, a.ignored)
    found, wanted = logits.argmax(axis=1)[counts], target[counts]
    both = np.bincount(wanted[found == wanted], minlength=classes)
    either = np.bincount(found, minlength=classes) + np.bincount(wanted, minlength=classes) - both
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
        "(logits, target) |> mean_iou: of each class the positions that logits and target both give it, over those "
        "that either gives it; mean over the classes that are there. Positions whose target is ignore_index do not "
        "count. A metric.",
        metric=True,
    ),
)

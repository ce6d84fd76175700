"""The layer `softmax_cross_entropy`: the choice of an operation by its settings and its target."""

from __future__ import annotations

from typing import Any

from mbc.ir.types import DType
from mbc.ops.base import Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.loss import CrossEntropy, check_log_probabilities, resampled
from mbc.ops.weighted_cross_entropy import IGNORE_INDEX, WeightedCrossEntropy, ignored_by


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    smoothing, weights, ignored = settings["smoothing"], settings["class_weights"], ignored_by(settings)
    if not 0 <= smoothing <= 1:
        raise ShapeError(f"smoothing is {smoothing}, but must be from 0 to 1")
    logits, target = (builder.type(value) for value in inputs)
    if target.dtype is not DType.INT32:
        if target.shape != logits.shape:
            raise ShapeError(
                f"the target holds class numbers (int32), or probabilities in the shape of the logits {logits}, "
                f"but is {target}"
            )
        if weights or ignored:
            given = "class_weights" if weights else "ignore_index"
            raise ShapeError(f"{given} is for targets that are class numbers, but the target is {target}")
        return builder.emit("soft_target_cross_entropy", CrossEntropy(smoothing), inputs)[0]
    inputs = (inputs[0], resampled(builder, *inputs))
    if weights or ignored:
        attributes = WeightedCrossEntropy(smoothing, weights, ignored)
        return builder.emit("weighted_cross_entropy", attributes, inputs)[0]
    return builder.emit("softmax_cross_entropy", CrossEntropy(smoothing), inputs)[0]


def _build_nll(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    """Return the cross entropy of log-probabilities, whose softmax is the probabilities themselves.

    Raises:
        ShapeError: The target holds no class numbers.
    """
    check_log_probabilities(builder, inputs[0], "nll")
    target = builder.type(inputs[1])
    if target.dtype is not DType.INT32:
        raise ShapeError(f"the target of nll holds class numbers (int32), but is {target}")
    return _build(builder, {**settings, "smoothing": 0.0}, inputs)


OPS: tuple[OpKind, ...] = ()  # in `loss`, `soft_cross_entropy` and `weighted_cross_entropy`

LAYERS = (
    Layer(
        "softmax_cross_entropy",
        (Parameter("smoothing", "float", 0.0), IGNORE_INDEX, Parameter("class_weights", "numbers", ())),
        _build,
        (2, 2),
        "(logits, target) |> softmax_cross_entropy: mean over rows and positions. The target holds class numbers, or "
        "the probabilities of all classes. class_weights: one weight for each class, for a weighted mean. Positions "
        "whose target is ignore_index do not count.",
        loss=True,
    ),
    Layer(
        "nll",
        (IGNORE_INDEX, Parameter("class_weights", "numbers", ())),
        _build_nll,
        (2, 2),
        "(log_probabilities, target) |> nll: softmax_cross_entropy of the result of log_softmax.",
        loss=True,
    ),
)

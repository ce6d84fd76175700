"""Softmax cross entropies of probabilities or weighted class numbers, the KL divergence, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, attributes_of, channels_first, image_of
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.cuda.pointwise.loss import (
    SCORE_BYTES,
    CrossEntropyArguments,
    elementwise_parts,
    entropy,
    entropy_parts,
)
from mbc.kernels.launch_struct import Struct
from mbc.ops.kl_divergence import KlBackward
from mbc.ops.soft_cross_entropy import SoftTargetBackward
from mbc.ops.weighted_cross_entropy import ClassWeights, Weighted, WeightedMean, WeightedMeanBackward

FILE = "pointwise/cross_entropy_targets.cu"


@dataclass(frozen=True, slots=True)
class ClassWeightArguments(Struct):
    """Integer arguments of a launch that sums the weights of the targets' classes; channels are classes."""

    positions: int
    channels: int
    weighted: int
    ignores: int
    ignored: int
    parts: int


@dataclass(frozen=True, slots=True)
class WeightedCrossEntropyArguments(ImageArguments):
    """Integer arguments of a launch of a weighted cross entropy, forward or backward; channels are classes."""

    parts: int
    weighted: int
    ignores: int
    ignored: int


def _parts_bytes(request: Request, layout: Layout) -> int:
    return entropy_parts(request.inputs[0], layout) * SCORE_BYTES


def _of_side(at: Slice) -> CrossEntropyArguments:
    a = at.request.attributes
    assert isinstance(a, SoftTargetBackward | KlBackward)
    return replace(entropy(at), side=a.side)


def _which(a: Weighted) -> tuple[int, int, int]:
    """Return whether classes have weights, whether a class is ignored, and the ignored class."""
    return bool(a.class_weights), bool(a.ignored), sum(a.ignored)


def _sums(at: Slice) -> ClassWeightArguments:
    a, target = at.request.attributes, at.request.inputs[0]
    assert isinstance(a, ClassWeights)
    return ClassWeightArguments(target.elements, a.classes, *_which(a), elementwise_parts(target))


def _sums_workspace(request: Request, layout: Layout) -> int:
    return elementwise_parts(request.inputs[0]) * SCORE_BYTES


def _weights(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, ClassWeights)
    return a.class_weights


def _mean(at: Slice) -> WeightedCrossEntropyArguments:
    a = at.request.attributes
    assert isinstance(a, WeightedMean | WeightedMeanBackward)
    return WeightedCrossEntropyArguments(*image_of(at), entropy_parts(at.request.inputs[0], at.layout), *_which(a))


def _mean_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, WeightedMean | WeightedMeanBackward)
    weight = (a.weight,) if isinstance(a, WeightedMeanBackward) else ()
    return (a.smoothing, a.share, *weight, *a.class_weights)


KERNELS = (
    OwnKernel(
        "soft_target_cross_entropy",
        FILE,
        CrossEntropyArguments,
        entropy,
        attributes_of("smoothing"),
        workspace=_parts_bytes,
        launches=2,
    ),
    OwnKernel(
        "soft_target_cross_entropy_backward",
        FILE,
        CrossEntropyArguments,
        _of_side,
        attributes_of("smoothing", "weight"),
    ),
    OwnKernel("kl_divergence", FILE, CrossEntropyArguments, entropy, workspace=_parts_bytes, launches=2),
    OwnKernel("kl_divergence_backward", FILE, CrossEntropyArguments, _of_side, attributes_of("weight")),
    OwnKernel(
        "class_weight_sum",
        FILE,
        ClassWeightArguments,
        _sums,
        _weights,
        layouts=channels_first,
        workspace=_sums_workspace,
        launches=2,
    ),
    OwnKernel(
        "weighted_cross_entropy_mean",
        FILE,
        WeightedCrossEntropyArguments,
        _mean,
        _mean_reals,
        workspace=_parts_bytes,
        launches=2,
    ),
    OwnKernel("weighted_cross_entropy_mean_backward", FILE, WeightedCrossEntropyArguments, _mean, _mean_reals),
)

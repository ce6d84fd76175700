"""Softmax cross entropies of probabilities or weighted class numbers, the KL divergence, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_first, image_of
from mbc.kernels.cuda.pointwise.loss import SCORE_BYTES, elementwise_parts, entropy_parts
from mbc.kernels.launch_struct import Struct
from mbc.ops.kl_divergence import KlBackward
from mbc.ops.loss import CrossEntropy
from mbc.ops.soft_cross_entropy import SoftTargetBackward
from mbc.ops.weighted_cross_entropy import ClassWeights, Weighted, WeightedMean, WeightedMeanBackward

FILE = "pointwise/cross_entropy_targets.cu"


@dataclass(frozen=True, slots=True)
class SoftTargetArguments(Struct):
    """Integer arguments of a launch of a loss whose targets are probabilities."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    parts: int


@dataclass(frozen=True, slots=True)
class SoftTargetBackwardArguments(Struct):
    """Integer arguments of a launch of the gradient of such a loss."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    side: int


@dataclass(frozen=True, slots=True)
class ClassWeightArguments(Struct):
    """Integer arguments of a launch that sums the weights of the targets' classes."""

    positions: int
    classes: int
    weighted: int
    ignores: int
    ignored: int
    parts: int


@dataclass(frozen=True, slots=True)
class WeightedCrossEntropyArguments(Struct):
    """Integer arguments of a launch of a weighted cross entropy, forward or backward."""

    type: int
    layout: int
    rows: int
    classes: int
    inner: int
    weighted: int
    ignores: int
    ignored: int
    parts: int


def _parts_bytes(request: Request, layout: Layout) -> int:
    return entropy_parts(request.inputs[0], layout) * SCORE_BYTES


def _soft(at: Slice) -> SoftTargetArguments:
    return SoftTargetArguments(*image_of(at), entropy_parts(at.request.inputs[0], at.layout))


def _soft_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, CrossEntropy)
    return (a.smoothing,)


def _soft_backward(at: Slice) -> SoftTargetBackwardArguments:
    a = at.request.attributes
    assert isinstance(a, SoftTargetBackward | KlBackward)
    return SoftTargetBackwardArguments(*image_of(at), a.side)


def _soft_backward_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, SoftTargetBackward)
    return a.smoothing, a.weight


def _divergence_backward_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, KlBackward)
    return (a.weight,)


def _which(a: Weighted) -> tuple[int, int, int]:
    """Return whether classes have weights, whether a class is ignored, and the ignored class."""
    return bool(a.class_weights), bool(a.ignored), sum(a.ignored)


def _sums(at: Slice) -> ClassWeightArguments:
    a, target = at.request.attributes, at.request.inputs[0]
    assert isinstance(a, ClassWeights)
    return ClassWeightArguments(target.elements, a.classes, *_which(a), elementwise_parts(target))


def _sums_workspace(request: Request, layout: Layout) -> int:
    return elementwise_parts(request.inputs[0]) * SCORE_BYTES


def _sums_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, ClassWeights)
    return a.class_weights


def _mean(at: Slice) -> WeightedCrossEntropyArguments:
    a = at.request.attributes
    assert isinstance(a, WeightedMean | WeightedMeanBackward)
    return WeightedCrossEntropyArguments(*image_of(at), *_which(a), entropy_parts(at.request.inputs[0], at.layout))


def _mean_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, WeightedMean | WeightedMeanBackward)
    weight = (a.weight,) if isinstance(a, WeightedMeanBackward) else ()
    return (a.smoothing, a.share, *weight, *a.class_weights)


KERNELS = (
    OwnKernel(
        "soft_target_cross_entropy",
        FILE,
        SoftTargetArguments,
        _soft,
        _soft_reals,
        workspace=_parts_bytes,
        launches=2,
    ),
    OwnKernel(
        "soft_target_cross_entropy_backward",
        FILE,
        SoftTargetBackwardArguments,
        _soft_backward,
        _soft_backward_reals,
    ),
    OwnKernel("kl_divergence", FILE, SoftTargetArguments, _soft, workspace=_parts_bytes, launches=2),
    OwnKernel(
        "kl_divergence_backward",
        FILE,
        SoftTargetBackwardArguments,
        _soft_backward,
        _divergence_backward_reals,
    ),
    OwnKernel(
        "class_weight_sum",
        FILE,
        ClassWeightArguments,
        _sums,
        _sums_reals,
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
    OwnKernel(
        "weighted_cross_entropy_mean_backward",
        FILE,
        WeightedCrossEntropyArguments,
        _mean,
        _mean_reals,
    ),
)

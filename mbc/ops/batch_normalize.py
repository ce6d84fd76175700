"""The phases of batch normalisation: statistics of the full mini-batch, their use, and the gradients of both.

The channel is axis 1. Ioffe and Szegedy, "Batch Normalization", 2015; the running variance is unbiased, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, NoAttributes, OpKind, ShapeError, master
from mbc.ops.bias import channel_sums
from mbc.ops.collective import AllGather
from mbc.ops.control_record import control_record, control_shape
from mbc.ops.device import Expression

MOST_RANKS = 256  # ranks whose statistics can be combined, as in templates/kernels/norm/sync_batch_norm.cu


@dataclass(frozen=True, slots=True)
class BatchNormalize(Attributes):
    """Settings of the second phase. `eps` is added to the variance."""

    eps: float


@dataclass(frozen=True, slots=True)
class BatchNormalizeBackward(Attributes):
    """Settings of the gradient of x. `count`: elements of a channel in the whole mini-batch."""

    eps: float
    count: int

    def with_rows(self, rows: int, before: int) -> Self:
        """Return the attributes for `rows` rows instead of `before`."""
        return replace(self, count=self.count * rows // before) if before else self


@dataclass(frozen=True, slots=True)
class CombineStatistics(Attributes):
    """Settings of the combination of all ranks' statistics. `counts`: elements of a channel on each rank."""

    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateRunning(Attributes):
    """Settings of the update of running statistics. `count`: elements of a channel in the whole mini-batch."""

    momentum: float
    count: int


def channels(x: TensorType) -> TensorType:
    """Return the type of a vector over the channels of x.

    Raises:
        ShapeError: x has no channels.
    """
    if len(x.shape) < 2:
        raise ShapeError(f"batch norm needs a tensor with rows and channels, but got {x}")
    return TensorType(x.shape[1:2], master(x.dtype))


def fitting(x: TensorType, vectors: tuple[TensorType, ...]) -> TensorType:
    """Return the type of a vector over channels.

    Raises:
        ShapeError: One of `vectors` has another type.
    """
    wanted = channels(x)
    for vector in vectors:
        if vector != wanted:
            raise ShapeError(f"{vector} does not fit the channels of {x}, which need {wanted}")
    return wanted


def count_of(x: TensorType) -> int:
    """Return the number of elements of each channel of x."""
    return x.elements // x.shape[1]


def _statistics_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    vector = channels(inputs[0])
    return vector, vector


def _join_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    means, variances = inputs[::2], inputs[1::2]
    if not means or means != variances or any(len(m.shape) != 1 or m.dtype != means[0].dtype for m in means):
        raise ShapeError(f"these are not pairs of mean and variance: {', '.join(map(str, inputs))}")
    vector = TensorType((sum(m.shape[0] for m in means),), means[0].dtype)
    return vector, vector


def _combine_shape(a: CombineStatistics, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    means, variances = inputs
    if means != variances or len(means.shape) != 2 or means.shape[0] != len(a.counts):
        raise ShapeError(f"{means} and {variances} are not mean and variance of {len(a.counts)} ranks")
    if len(a.counts) > MOST_RANKS:
        raise ShapeError(f"statistics of {len(a.counts)} ranks, but at most {MOST_RANKS} are combined")
    vector = TensorType(means.shape[1:], means.dtype)
    return vector, vector


def _update_shape(_: UpdateRunning, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    *vectors, control = inputs
    control_shape(control)
    if len(set(vectors)) != 1 or len(vectors) != 4:
        raise ShapeError(f"running statistics of different types: {', '.join(map(str, vectors))}")
    return vectors[0], vectors[1]


def _normalize_shape(_: BatchNormalize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    fitting(inputs[0], inputs[1:])
    return (inputs[0],)


def _sums_shape(_: BatchNormalize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, dy, *vectors = inputs
    if x != dy:
        raise ShapeError(f"value {x} and gradient {dy} differ")
    vector = fitting(x, tuple(vectors))
    return vector, vector


def _backward_shape(_: BatchNormalizeBackward, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, dy, *vectors = inputs
    if x != dy:
        raise ShapeError(f"value {x} and gradient {dy} differ")
    fitting(x, tuple(vectors))
    return (dy,)


def _per_channel(vector: Array, x: Array) -> Array:
    """Return the vector reshaped so that it broadcasts along the channels of x; one for each sample has x's axes."""
    return vector if vector.ndim == x.ndim else vector.reshape((1, -1) + (1,) * (x.ndim - 2))


def _totals(x: Array, by_sample: bool) -> Array:
    """Return the sums of each channel, or of each channel of each sample with all axes, in float64."""
    if not by_sample:
        return channel_sums(x)
    return np.asarray(x.sum(axis=tuple(range(2, x.ndim)), keepdims=True, dtype=np.float64))


def _statistics(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return statistics(inputs[0])


def statistics(x: Array, by_sample: bool = False) -> tuple[Array, ...]:
    """Return mean and variance of each channel, or of each channel of each sample."""
    count = x.size // x.shape[1] // (len(x) if by_sample else 1)
    mean = _totals(x, by_sample) / count
    # Deviations from the rounded mean are exact enough: the second term corrects the error of the mean.
    near = mean.astype(x.dtype)
    deviation = x - _per_channel(near, x)
    variance = _totals(deviation * deviation, by_sample) / count - (mean - near) ** 2
    return near, np.maximum(variance, 0).astype(x.dtype)


def _join(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return np.concatenate(inputs[::2]), np.concatenate(inputs[1::2])


def _combine(a: CombineStatistics, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return mean and variance of all rows, from those of all ranks.

    Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    means, variances = (operand.astype(np.float64) for operand in inputs)
    shares = np.array(a.counts)[:, None] / sum(a.counts)
    # Differences from the first rank's mean keep the digits that a large common mean would lose.
    mean = means[0] + (shares * (means - means[0])).sum(axis=0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(axis=0)
    kind = inputs[0].dtype
    return mean.astype(kind), variance.astype(kind)


def _update(a: UpdateRunning, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    running_mean, running_variance, mean, variance, control = inputs
    if not control_record(control)["proceed"]:
        return running_mean, running_variance
    kind = running_mean.dtype.type
    old, new = kind(1 - a.momentum), kind(a.momentum)
    unbiased = kind(a.count / (a.count - 1))
    return old * running_mean + new * mean, old * running_variance + new * (variance * unbiased)


def _deviation(variance: Array, eps: float) -> Array:
    """Return 1 / sqrt(variance + eps)."""
    return 1 / np.sqrt(variance + variance.dtype.type(eps))


def normalize(a: Any, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return x minus the mean, over the standard deviation, times gamma, plus beta."""
    x, mean, variance, *affine = inputs
    scale = _per_channel(_deviation(variance, a.eps), x)
    if affine:
        scale = scale * _per_channel(affine[0], x)
    y = (x - _per_channel(mean, x)) * scale
    return (y + _per_channel(affine[1], x) if affine else y,)


_INVERSE = "inverse = 1.0f / sqrtf(variance + eps);"


def normalize_on_device(a: Any, inputs: int) -> Expression:
    """Return the expression of the normalisation."""
    affine = inputs == 5
    scale = f"{_INVERSE} scale = {'gamma * ' * affine}inverse;"
    operands = ("x", "mean", "variance", *(("gamma", "beta") if affine else ()))
    return Expression(operands, f"{scale} fmaf(x - mean, scale, {'beta' if affine else '0.0f'})", (("eps", a.eps),))


def backward_sums(a: Any, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the sums of dy times the normalised x, and of dy, in the shape of the mean."""
    x, dy, mean, variance = inputs
    by_sample = mean.ndim == x.ndim
    centred = _totals(dy * (x - _per_channel(mean, x)), by_sample)
    dgamma = centred * _deviation(variance.astype(np.float64), a.eps)
    return dgamma.astype(x.dtype), _totals(dy, by_sample).astype(x.dtype)


def backward_on_device(a: Any, inputs: int) -> Expression:
    """Return the expression of the gradient of x."""
    operands = ("x", "dy", "mean", "variance", "dgamma", "dbeta", "gamma")[:inputs]
    lines = (
        _INVERSE,
        f"scale = {'gamma * ' * (inputs == 7)}inverse;",
        "slope = dgamma * inverse / count;",
        "shift = dbeta / count;",
        "scale * (dy - shift - (x - mean) * slope)",
    )
    return Expression(operands, " ".join(lines), (("eps", a.eps), ("count", float(a.count))))


def sums_on_device(a: Any, inputs: int) -> Expression:
    """Return the expression of the reductions of the backward pass."""
    return Expression(
        ("x", "dy", "mean", "variance"),
        "",
        (("eps", a.eps),),
        ("dy * (x - mean)", "dy"),
        ("sum0 / sqrt(variance + eps)", "sum1"),
    )


def backward(a: Any, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    """Return the gradient of x."""
    x, dy = inputs[:2]
    mean, variance, dgamma, dbeta, *gamma = (_per_channel(vector, x) for vector in inputs[2:])
    inverse = _deviation(variance, a.eps)
    slope = inverse * (dgamma / x.dtype.type(a.count))
    shift = dbeta / x.dtype.type(a.count)
    scale = inverse * gamma[0] if gamma else inverse
    return ((dy - shift - (x - mean) * slope) * scale,)


def _frozen_backward(a: BatchNormalize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    dy, variance, *gamma = inputs
    scale = _deviation(variance, a.eps) * (gamma[0] if gamma else variance.dtype.type(1))
    return (dy * _per_channel(scale, dy),)


def _frozen_on_device(a: Any, inputs: int) -> Expression:
    scale = f"{_INVERSE} scale = {'gamma * ' * (inputs == 3)}inverse;"
    return Expression(("dy", "variance", "gamma")[:inputs], f"{scale} dy * scale", (("eps", a.eps),))


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, BatchNormalize)
    x, mean, variance, *affine = op.inputs
    if g.producer(mean) is None:
        return _frozen_gradient(g, op, dy)
    # The gradient of x needs both reductions, whether or not there are parameters to train.
    names = tuple(affine) or (f"{op.outputs[0]}.scale", f"{op.outputs[0]}.shift")
    dgamma, dbeta = g.emit("batch_normalize_backward_reduce", a, (x, dy, mean, variance), *names)
    dx = None
    if g.needs(x):
        sums, count = (dgamma, dbeta), count_of(g.type(x))
        combined = g.producer(mean)
        if combined is not None and isinstance(combined.attributes, CombineStatistics):
            # The gradients of scale and shift remain those of this rank; they are summed over ranks with all others.
            counts, y = combined.attributes.counts, op.outputs[0]
            ranks = g.emit("all_gather", AllGather(len(counts)), sums, f"{y}.scale.ranks", f"{y}.shift.ranks")
            sums = g.emit("sum_gathered", NoAttributes(), ranks, f"{y}.scale.sum", f"{y}.shift.sum")
            count = sum(counts)
        inputs = (x, dy, mean, variance, *sums, *affine[:1])
        (dx,) = g.emit("batch_normalize_backward", BatchNormalizeBackward(a.eps, count), inputs, x)
    return (dx, None, None, dgamma, dbeta) if affine else (dx, None, None)


def _frozen_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    """Return the gradients if mean and variance are states, which do not depend on x."""
    x, mean, variance, *affine = op.inputs
    dx, gradients = None, (None,) * len(affine)
    if any(map(g.needs, affine)):
        gradients = g.emit("batch_normalize_backward_reduce", op.attributes, (x, dy, mean, variance), *affine)
    if g.needs(x):
        (dx,) = g.emit("batch_normalize_backward_frozen", op.attributes, (dy, variance, *affine[:1]), x)
    return (dx, None, None, *gradients)


OPS = (
    OpKind("batch_statistics", NoAttributes, _statistics_shape, _statistics, reduces=True),
    OpKind("concat_statistics", NoAttributes, _join_shape, _join, reduces=True),
    OpKind("combine_statistics", CombineStatistics, _combine_shape, _combine, reduces=True),
    OpKind("update_running", UpdateRunning, _update_shape, _update, updates=((0, 0), (1, 1)), reduces=True),
    OpKind(
        "batch_normalize",
        BatchNormalize,
        _normalize_shape,
        normalize,
        _gradient,
        divisible=True,
        in_place=((0, 0),),
        device=normalize_on_device,
    ),
    OpKind(
        "batch_normalize_backward_reduce",
        BatchNormalize,
        _sums_shape,
        backward_sums,
        divisible=True,
        accumulates=True,
        device=sums_on_device,
        reduces=True,
    ),
    OpKind(
        "batch_normalize_backward",
        BatchNormalizeBackward,
        _backward_shape,
        backward,
        divisible=True,
        in_place=((0, 1),),
        device=backward_on_device,
    ),
    OpKind(
        "batch_normalize_backward_frozen",
        BatchNormalize,
        _normalize_shape,
        _frozen_backward,
        divisible=True,
        in_place=((0, 0),),
        device=_frozen_on_device,
    ),
)

LAYERS: tuple[Layer, ...] = ()

"""Batch normalisation of each sample by itself, which is what instance normalisation becomes in a training graph.

Ulyanov et al., "Instance normalization: the missing ingredient for fast stylization", 2016. Statistics are reductions
over all positions, and all else is a function of one element, so that kernels are those of batch normalisation and of
generated groups (decision 077). Statistics belong to a row: rows may be divided, and inference equals training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, NoAttributes, OpKind, ShapeError, master
from mbc.ops.batch_normalize import (
    backward,
    backward_on_device,
    backward_sums,
    normalize,
    normalize_on_device,
    statistics,
    sums_on_device,
)
from mbc.ops.device import Device, Expression

MOST_SAMPLES = 65535  # a grid's third extent in the kernels


@dataclass(frozen=True, slots=True)
class InstanceNormalize(Attributes):
    """Settings of the second phase. `eps` is added to the variance."""

    eps: float


@dataclass(frozen=True, slots=True)
class InstanceNormalizeBackward(InstanceNormalize):
    """Settings of the gradient of x. `count`: positions of a sample."""

    count: int


def _statistic(x: TensorType) -> TensorType:
    """Return the type of numbers for each channel of each sample, [N, C, 1, ...].

    Raises:
        ShapeError: The tensor has no positions.
    """
    if len(x.shape) < 3:
        raise ShapeError(f"{x} has no positions, over which instance normalisation takes its statistics")
    return TensorType((*x.shape[:2], *(1,) * (len(x.shape) - 2)), master(x.dtype))


def _shape_with(vectors: int, tensors: int) -> Callable[[Any, tuple[TensorType, ...]], tuple[TensorType, ...]]:
    """Return the shape rule of `tensors` of one type, then `vectors` by sample, then vectors by channel."""

    def shape(_: Any, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        x, statistic = inputs[0], _statistic(inputs[0])
        by_channel = TensorType(x.shape[1:2], statistic.dtype)
        rest = len(inputs) - tensors - vectors
        if inputs != (*(x,) * tensors, *(statistic,) * vectors, *(by_channel,) * rest):
            raise ShapeError(f"{', '.join(map(str, inputs[1:]))} do not fit {x} and its statistics {statistic}")
        return (x,)

    return shape


_fits_sums = _shape_with(2, 2)


def _statistics_shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_statistic(inputs[0]),) * 2


def _sums_shape(a: InstanceNormalize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return (_statistic(_fits_sums(a, inputs)[0]),) * 2


def _statistics(_: NoAttributes, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    return statistics(inputs[0], by_sample=True)


def _by_sample(device: Callable[[Any, int], Expression]) -> Device:
    return lambda attributes, inputs: replace(device(attributes, inputs), by_sample=True)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    a = op.attributes
    assert isinstance(a, InstanceNormalize)
    x, mean, variance, *affine = op.inputs
    names = [f"{op.outputs[0]}.{name}.samples" for name in ("scale", "shift")]
    sums = g.emit("instance_normalize_backward_reduce", a, (x, dy, mean, variance), *names)
    dx = None
    if g.needs(x):
        positions = g.type(x).elements // g.type(mean).elements
        inputs = (x, dy, mean, variance, *sums, *affine[:1])
        (dx,) = g.emit("instance_normalize_backward", InstanceNormalizeBackward(a.eps, positions), inputs, x)
    gradients = (g.emit("channel_sum", NoAttributes(), (s,), p)[0] for p, s in zip(affine, sums, strict=False))
    return (dx, None, None, *gradients)


def expand_instance_norm(e: Expansion, op: Operation, eps: float) -> tuple[str, ...] | None:
    """Write an instance normalisation as statistics and a function of one element.

    Args:
        e: The graph that the operation is written into.
        op: An operation with the inputs x and, perhaps, gamma and beta.
        eps: Number that is added to the variance.

    Returns:
        The normalised tensor, mean and variance; None if there are no positions, or too many samples for a kernel.
    """
    x, *affine = op.inputs
    shape = e.type(x).shape
    if e.type(x).elements == shape[0] * shape[1] or shape[0] > MOST_SAMPLES:
        return None
    y = op.outputs[0]
    names = (f"{y}.mean", f"{y}.variance")
    mean, variance = e.emit("instance_statistics", NoAttributes(), (x,), names, f"{op.name}.statistics")
    normalised = e.emit("instance_normalize", InstanceNormalize(eps), (x, mean, variance, *affine), (y,), op.name)
    return (*normalised, mean, variance)


OPS = (
    OpKind("instance_statistics", NoAttributes, _statistics_shape, _statistics, divisible=True),
    OpKind(
        "instance_normalize",
        InstanceNormalize,
        _shape_with(2, 1),
        normalize,
        _gradient,
        divisible=True,
        in_place=((0, 0),),
        device=_by_sample(normalize_on_device),
    ),
    OpKind(
        "instance_normalize_backward_reduce",
        InstanceNormalize,
        _sums_shape,
        backward_sums,
        divisible=True,
        device=_by_sample(sums_on_device),
    ),
    OpKind(
        "instance_normalize_backward",
        InstanceNormalizeBackward,
        _shape_with(4, 2),
        backward,
        divisible=True,
        in_place=((0, 1),),
        device=_by_sample(backward_on_device),
    ),
)
LAYERS: tuple[Layer, ...] = ()

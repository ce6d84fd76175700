"""Standardised filters: a convolution reads each filter minus its mean, divided by its standard deviation.

Qiao et al., "Micro-batch training with batch-channel normalization and weight standardization", 2019; with a trained
gain: Brock et al., "Characterizing signal propagation to close the performance gap in unnormalized ResNets", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes, Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, ShapeError, master


@dataclass(frozen=True, slots=True)
class Standardize(Attributes):
    """Settings of the standardisation of filters [K, ...], each separately.

    `eps` is added to the variance. `factor` multiplies the result, besides the gain [K] if there is one.
    """

    eps: float
    factor: float = 1.0


def _fit(w: TensorType, gain: tuple[TensorType, ...]) -> TensorType:
    """Return the type of a vector with one number for each filter.

    Raises:
        ShapeError: These are no filters, or no gain for each of them.
    """
    vector = TensorType(w.shape[:1], w.dtype)
    if len(w.shape) < 2 or w.dtype is not master(w.dtype) or gain not in ((), (vector,)):
        raise ShapeError(f"{', '.join(map(str, (w, *gain)))} are not filters with a gain for each of them")
    return vector


def _shape(a: Standardize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    w, *gain = inputs
    vector = _fit(w, tuple(gain))
    return w, vector, vector


def _backward_shape(a: Standardize, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    w, dy, mean, inverse, *gain = inputs
    vector = _fit(w, tuple(gain))
    if dy != w or not mean == inverse == vector:
        raise ShapeError(f"gradient {dy} and statistics {mean} and {inverse} do not fit {w}")
    return w, *gain


def _of_filters(vector: Array, w: Array) -> Array:
    """Return a vector reshaped so that it broadcasts along filters."""
    return vector.reshape(-1, *(1,) * (w.ndim - 1))


def _scale(a: Standardize, gain: Sequence[Array], w: Array) -> Array:
    return _of_filters(gain[0] if gain else np.ones(len(w), w.dtype), w) * w.dtype.type(a.factor)


def _evaluate(a: Standardize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    w, *gain = inputs
    axes = tuple(range(1, w.ndim))
    wide = w.astype(np.float64)
    mean = wide.mean(axis=axes)
    inverse = 1 / np.sqrt(((wide - _of_filters(mean, w)) ** 2).mean(axis=axes) + a.eps)
    mean, inverse = mean.astype(w.dtype), inverse.astype(w.dtype)
    return (w - _of_filters(mean, w)) * _of_filters(inverse, w) * _scale(a, gain, w), mean, inverse


def _backward(a: Standardize, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    w, dy, mean, inverse, *gain = inputs
    axes = tuple(range(1, w.ndim))
    normal = (w - _of_filters(mean, w)) * _of_filters(inverse, w)
    shift, slope = (p.mean(axis=axes, dtype=np.float64).astype(w.dtype) for p in (dy, dy * normal))
    factor = _scale(a, gain, w) * _of_filters(inverse, w)
    dw = (dy - _of_filters(shift, w) - normal * _of_filters(slope, w)) * factor
    elements = math.prod(w.shape[1:])
    return (dw, *((slope * w.dtype.type(elements * a.factor),) if gain else ()))


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    w, *gain = op.inputs
    return g.emit("standardize_filters_backward", op.attributes, (w, dy, *op.outputs[1:], *gain), w, *gain)


def _rowless(a: Standardize, inputs: int) -> tuple[int, ...]:
    """Return all inputs: filters, statistics and gains have no rows."""
    return tuple(range(inputs))


OPS = (
    OpKind("standardize_filters", Standardize, _shape, _evaluate, _gradient, rowless=_rowless),
    OpKind(
        "standardize_filters_backward", Standardize, _backward_shape, _backward, in_place=((0, 1),), rowless=_rowless
    ),
)
LAYERS: tuple[Layer, ...] = ()


def standardized(builder: LayerBuilder, w: str, eps: float, gain: float) -> str:
    """Return the filters with which a layer computes, made from the filters `w` of its state.

    Args:
        builder: The builder of the layer.
        w: The filters.
        eps: Number that is added to the variance; 0: the result is `w`.
        gain: Factor g of g / sqrt(elements of a filter) and of trained gains, which start as 1; 0: there is no gain.

    Raises:
        ShapeError: A number is below 0, or there is a gain for filters that are not standardised.
    """
    for name, value in (("standardize", eps), ("gain", gain)):
        if not (value >= 0 and math.isfinite(value)):
            raise ShapeError(f"{name} is {value}, but must be 0 (none) or above")
    if not eps:
        if gain:
            raise ShapeError("gain is for standardised filters: give standardize, too, such as 1e-6")
        return w
    shape = builder.type(w).shape
    if not gain:
        return builder.emit("standardize_filters", Standardize(eps), (w,), "filters")[0]
    gains = builder.state("gain", shape[:1], Initializer("constant", 1.0))
    a = Standardize(eps, gain / math.sqrt(math.prod(shape[1:])))
    return builder.emit("standardize_filters", a, (w, gains), "filters")[0]

"""Root mean square normalisation over channels, for images each pixel separately: layer normalisation without means.

Zhang and Sennrich, "Root mean square layer normalization", 2019. `mbc.passes.rms_norms` replaces the operations
with which a source writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, OpKind, ShapeError, master


@dataclass(frozen=True, slots=True)
class RmsNorm(Attributes):
    """Settings of the normalisation over all channels of each pixel. `eps` is added to the mean square."""

    eps: float


def _fit(x: TensorType) -> tuple[TensorType, TensorType]:
    """Return the types of the inverse root mean squares, [rows, 1, ...], and of a vector over channels.

    Raises:
        ShapeError: `x` has no channels.
    """
    if len(x.shape) < 2:
        raise ShapeError(f"{x} has no channels")
    wide = master(x.dtype)
    return TensorType((x.shape[0], 1, *x.shape[2:]), wide), TensorType(x.shape[1:2], wide)


def _check(x: TensorType, types: tuple[TensorType, ...], wanted: tuple[TensorType, ...]) -> None:
    if types != wanted:
        raise ShapeError(f"{', '.join(map(str, types))} do not fit {x}, which needs {', '.join(map(str, wanted))}")


def _shape(a: RmsNorm, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, *others = inputs
    inverse, vector = _fit(x)
    _check(x, tuple(others), (vector,))
    return x, inverse


def _backward_shape(a: RmsNorm, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, *others = inputs
    inverse, vector = _fit(x)
    _check(x, tuple(others), (x, inverse, vector))
    return (x,)


def _reduce_shape(a: RmsNorm, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, *others = inputs
    inverse, vector = _fit(x)
    _check(x, tuple(others), (x, inverse))
    return (vector,)


def _of_channels(vector: Array, x: Array) -> Array:
    return vector.reshape(1, -1, *(1,) * (x.ndim - 2))


def _evaluate(a: RmsNorm, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, gamma = inputs
    inverse = 1 / np.sqrt(np.square(x, dtype=np.float64).mean(axis=1, keepdims=True) + a.eps)
    scale = inverse.astype(x.dtype)
    return x * scale * _of_channels(gamma, x), scale


def _backward(a: RmsNorm, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, dy, inverse, gamma = inputs
    normal, dnormal = x * inverse, dy * _of_channels(gamma, x)
    slope = (dnormal * normal).mean(axis=1, keepdims=True, dtype=np.float64).astype(x.dtype)
    return ((dnormal - normal * slope) * inverse,)


def _reduce(a: RmsNorm, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, dy, inverse = inputs
    axes = (0, *range(2, x.ndim))
    return (np.sum(dy * (x * inverse), axis=axes, dtype=np.float64).astype(x.dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, gamma = op.inputs
    read = (x, dy, op.outputs[1])
    dgamma = g.emit("rms_norm_backward_reduce", op.attributes, read, gamma)[0] if g.needs(gamma) else None
    dx = g.emit("rms_norm_backward", op.attributes, (*read, gamma), x)[0] if g.needs(x) else None
    return dx, dgamma


OPS = (
    OpKind("rms_norm", RmsNorm, _shape, _evaluate, _gradient, divisible=True, in_place=((0, 0),)),
    OpKind("rms_norm_backward_reduce", RmsNorm, _reduce_shape, _reduce, divisible=True, accumulates=True, reduces=True),
    OpKind("rms_norm_backward", RmsNorm, _backward_shape, _backward, divisible=True, in_place=((0, 1),)),
)
LAYERS: tuple[Layer, ...] = ()

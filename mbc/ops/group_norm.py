"""Normalisation within single images: layer normalisation over channels, group normalisation over channels and pixels.

Ba et al., "Layer normalization", 2016, in ConvNeXt's form for images: each pixel separately. Wu and He, "Group
normalization", 2018. Statistics belong to a row: rows may be divided, and inference equals training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.instance_norm import expand_instance_norm


@dataclass(frozen=True, slots=True)
class GroupNorm(Attributes):
    """Group normalisation over the channels of each group, and all pixels. `eps` is added to the variance."""

    eps: float
    groups: int

    def axes(self, rank: int) -> tuple[int, ...]:
        """Return the axes of [rows, groups, channels of a group, ...] that are normalised together."""
        return tuple(range(2, rank + 1))


@dataclass(frozen=True, slots=True)
class LayerNorm(Attributes):
    """Layer normalisation over all channels of each pixel. `eps` is added to the variance."""

    eps: float

    @property
    def groups(self) -> int:
        """Number of groups of channels: one."""
        return 1

    def axes(self, rank: int) -> tuple[int, ...]:
        """Return the axes of [rows, 1, channels, ...] that are normalised together."""
        return (2,)


Normalisation = GroupNorm | LayerNorm


def _statistic(a: Normalisation, x: TensorType) -> TensorType:
    """Return the type of means: [rows, groups, 1, ...], or [rows, 1, ...] with all pixels.

    Raises:
        ShapeError: The groups do not divide the channels of `x`.
    """
    if len(x.shape) < 2 or x.shape[1] % a.groups:
        raise ShapeError(f"{x} has no channels that can be divided into {a.groups} groups")
    pixels = tuple(1 if axis + 1 in a.axes(len(x.shape)) else x.shape[axis] for axis in range(2, len(x.shape)))
    return TensorType((x.shape[0], a.groups, *pixels), master(x.dtype))


def _fit(x: TensorType, vectors: tuple[TensorType, ...]) -> TensorType:
    wanted = TensorType(x.shape[1:2], master(x.dtype))
    if any(vector != wanted for vector in vectors):
        raise ShapeError(f"{', '.join(map(str, vectors))} do not fit the channels of {x}, which need {wanted}")
    return wanted


def _shape(a: Normalisation, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, *vectors = inputs
    statistic = _statistic(a, x)
    _fit(x, tuple(vectors))
    return x, statistic, statistic


def _backward_shape(a: Normalisation, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, dy, mean, inverse, *vectors = inputs
    if x != dy or not mean == inverse == _statistic(a, x):
        raise ShapeError(f"gradient {dy} and statistics {mean} and {inverse} do not fit {x}")
    _fit(x, tuple(vectors))
    return (dy,)


def _reduce_shape(a: Normalisation, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (dy,) = _backward_shape(a, inputs)
    vector = _fit(dy, ())
    return vector, vector


def _grouped(a: Normalisation, x: Array) -> Array:
    """Return x as [rows, groups, channels of a group, ...]."""
    return x.reshape(x.shape[0], a.groups, x.shape[1] // a.groups, *x.shape[2:])


def _of_channels(a: Normalisation, vector: Array, x: Array) -> Array:
    """Return a vector reshaped so that it broadcasts along the channels of a grouped x."""
    return vector.reshape(1, a.groups, -1, *(1,) * (x.ndim - 2))


def _evaluate(a: Normalisation, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, *affine = inputs
    grouped, axes = _grouped(a, x), a.axes(x.ndim)
    wide = grouped.astype(np.float64)
    mean = wide.mean(axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=axes, keepdims=True) + a.eps)
    near, scale = mean.astype(x.dtype), inverse.astype(x.dtype)
    y = (grouped - near) * scale
    if affine:
        y = y * _of_channels(a, affine[0], x) + _of_channels(a, affine[1], x)
    return y.reshape(x.shape), near.squeeze(2), scale.squeeze(2)


def _normalised(a: Normalisation, inputs: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Return the normalised x, dy and the factor of x, all grouped."""
    x, dy, mean, inverse = inputs[:4]
    scale = np.expand_dims(inverse, 2)
    return (_grouped(a, x) - np.expand_dims(mean, 2)) * scale, _grouped(a, dy), scale


def _backward(a: Normalisation, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, gamma = inputs[0], inputs[4:]
    normal, dy, scale = _normalised(a, inputs)
    dnormal, axes = dy * _of_channels(a, gamma[0], x) if gamma else dy, a.axes(x.ndim)
    shift, slope = (
        product.mean(axis=axes, keepdims=True, dtype=np.float64).astype(x.dtype)
        for product in (dnormal, dnormal * normal)
    )
    return (((dnormal - shift - normal * slope) * scale).reshape(x.shape),)


def _reduce(a: Normalisation, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    normal, dy, _ = _normalised(a, inputs)
    axes = (0, *range(3, dy.ndim))
    dgamma, dbeta = (np.sum(p, axis=axes, dtype=np.float64).reshape(-1).astype(dy.dtype) for p in (dy * normal, dy))
    return dgamma, dbeta


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, *affine = op.inputs
    read = (x, dy, *op.outputs[1:])
    gradients: tuple[str | None, ...] = (None,) * len(affine)
    dx = None
    if any(map(g.needs, affine)):
        gradients = g.emit(f"{op.kind}_backward_reduce", op.attributes, read, *affine)
    if g.needs(x):
        (dx,) = g.emit(f"{op.kind}_backward", op.attributes, (*read, *affine[:1]), x)
    return dx, *gradients


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    a = op.attributes
    if isinstance(a, GroupNorm) and a.groups == e.type(op.inputs[0]).shape[1]:
        outputs = expand_instance_norm(e, op, a.eps)
        if outputs is not None:
            return outputs
    return e.emit(op.kind, a, op.inputs, op.outputs, op.name)


def _kinds(name: str, attributes: type[Attributes]) -> tuple[OpKind, ...]:
    return (
        OpKind(name, attributes, _shape, _evaluate, _gradient, _expand, divisible=True, in_place=((0, 0),)),
        OpKind(
            f"{name}_backward_reduce",
            attributes,
            _reduce_shape,
            _reduce,
            divisible=True,
            accumulates=True,
            reduces=True,
        ),
        OpKind(f"{name}_backward", attributes, _backward_shape, _backward, divisible=True, in_place=((0, 1),)),
    )


OPS = (*_kinds("group_norm", GroupNorm), *_kinds("layer_norm", LayerNorm))


def _apply(builder: LayerBuilder, kind: str, a: Normalisation, x: str, affine: bool) -> str:
    shape = builder.type(x).shape
    if a.eps <= 0:
        raise ShapeError(f"eps is {a.eps}, but must be positive")
    if len(shape) < 2:
        raise ShapeError(f"{kind} needs a tensor with rows and channels, but got {builder.type(x)}")
    if a.groups < 1 or shape[1] % a.groups:
        raise ShapeError(f"groups is {a.groups}, which must divide the {shape[1]} channels")
    states = (("weight", 1.0), ("bias", 0.0)) if affine else ()
    vectors = (builder.state(name, shape[1:2], Initializer("constant", value)) for name, value in states)
    return builder.emit(kind, a, (x, *vectors))[0]


def _build_group_norm(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _apply(builder, "group_norm", GroupNorm(settings["eps"], settings["groups"]), inputs[0], settings["affine"])


def _build_instance_norm(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    shape = builder.type(inputs[0]).shape
    a = GroupNorm(settings["eps"], shape[1] if len(shape) > 1 else 1)
    return _apply(builder, "group_norm", a, inputs[0], settings["affine"])


def _build_layer_norm(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _apply(builder, "layer_norm", LayerNorm(settings["eps"]), inputs[0], settings["affine"])


_SETTINGS = (Parameter("eps", "float", 1e-5), Parameter("affine", "bool", True))
LAYERS = (
    Layer(
        "group_norm",
        (Parameter("groups", "int"), *_SETTINGS),
        _build_group_norm,
        help="Group normalisation: the channels of a group and all pixels of an image share mean and variance. "
        "affine: with a trained scale and shift for each channel.",
    ),
    Layer(
        "instance_norm",
        _SETTINGS,
        _build_instance_norm,
        help="Each channel of each image separately: groups of one channel.",
    ),
    Layer(
        "layer_norm",
        _SETTINGS,
        _build_layer_norm,
        help="Layer normalisation over channels, for images each pixel separately, as in ConvNeXt.",
    ),
)

"""ReLU bit masks, one bit for each element of its output, eight channels a byte; and the gradient of ReLU by masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mbc.ir.types import DType, TensorType
from mbc.ops.base import Array, NoAttributes, OpKind, ShapeError

CHANNELS = 8  # channels of a byte: bit i of byte c belongs to channel 8 c + i, in every layout


def _mask(_: Any, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    y = inputs[0]
    if len(y.shape) < 2 or y.shape[1] % CHANNELS:
        raise ShapeError(f"the number of channels of {y} is not a multiple of {CHANNELS}")
    return (TensorType((y.shape[0], y.shape[1] // CHANNELS, *y.shape[2:]), DType.UINT8),)


def _gradient(a: Any, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    dy, mask = inputs
    (wanted,) = _mask(a, (dy,))
    if mask != wanted:
        raise ShapeError(f"{mask} is not a bit mask of {dy}")
    return (dy,)


def _pack(y: Array) -> Array:
    """Return the bit mask; NaN counts as not positive, as in `relu_backward`."""
    rows, channels, *rest = y.shape
    bits = (y > 0).reshape(rows, channels // CHANNELS, CHANNELS, *rest)
    return np.packbits(bits, axis=2, bitorder="little").reshape(rows, channels // CHANNELS, *rest)


def _apply(dy: Array, mask: Array) -> Array:
    bits = np.unpackbits(mask[:, :, None], axis=2, bitorder="little").reshape(dy.shape)
    return np.where(bits, dy, 0).astype(dy.dtype)


OPS = (
    OpKind("relu_mask", NoAttributes, _mask, lambda a, inputs, call: (_pack(inputs[0]),), divisible=True, signs=(0,)),
    # The gradient comes first, so that the first operand is an image, as in other operations.
    OpKind(
        "relu_backward_masked",
        NoAttributes,
        _gradient,
        lambda a, inputs, call: (_apply(inputs[0], inputs[1]),),
        divisible=True,
        in_place=((0, 0),),
    ),
)
LAYERS = ()

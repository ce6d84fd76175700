"""The bias of attention within windows: a table of numbers for each offset between two pixels, and a mask.

The mask is for windows in which a shift has joined distant parts of an image. Liu et al., "Swin Transformer", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes, Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.window import by_pair, positive

MASKED = -100.0  # added to scores of pixels that were not neighbours before the shift


@dataclass(frozen=True, slots=True)
class WindowBias(Attributes):
    """Settings of the bias.

    Attributes:
        window: (height, width) of a window in pixels.
        grid: Number of windows down and across; (1, 1) without a shift, because all windows share one bias.
        shift: Pixels by which the image was rolled to the top and to the left.
    """

    window: tuple[int, int]
    grid: tuple[int, int] = (1, 1)
    shift: tuple[int, int] = (0, 0)

    @property
    def offsets(self) -> int:
        """Number of rows of the table; offset (dy, dx) has row (dy + h - 1) * (2 w - 1) + dx + w - 1."""
        return (2 * self.window[0] - 1) * (2 * self.window[1] - 1)

    @property
    def pixels(self) -> int:
        """Number of pixels of a window."""
        return self.window[0] * self.window[1]

    def numbers(self) -> Array:
        """Return the row of the table for each query and key, [T, T]."""
        h, w = self.window
        y, x = (p.reshape(-1) for p in np.indices((h, w)))
        return (y[:, None] - y + h - 1) * (2 * w - 1) + x[:, None] - x + w - 1

    def mask(self) -> Array:
        """Return whether query and key come from distant parts of the image, [windows, T, T]."""
        (h, w), (down, across) = self.window, self.grid
        y, x = np.arange(h * down) >= h * down - self.shift[0], np.arange(w * across) >= w * across - self.shift[1]
        part = (2 * y[:, None] + x).reshape(down, h, across, w).transpose(0, 2, 1, 3)
        part = part.reshape(down * across, h * w)
        return part[:, :, None] != part[:, None, :]


def _checked(a: WindowBias) -> None:
    for side, count, shift in zip(a.window, a.grid, a.shift, strict=True):
        if side < 1 or count < 1 or not 0 <= shift < side:
            raise ShapeError(f"there are no {a.grid} windows of {a.window} pixels, shifted by {a.shift}")


def _shape(a: WindowBias, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (table,) = inputs
    _checked(a)
    if len(table.shape) != 2 or table.shape[0] != a.offsets:
        raise ShapeError(f"{table} does not have a row for each of the {a.offsets} offsets in windows of {a.window}")
    return (TensorType((table.shape[1], 1, a.grid[0] * a.grid[1], a.pixels, a.pixels), table.dtype),)


def _backward_shape(a: WindowBias, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    (dy,) = inputs
    _checked(a)
    if len(dy.shape) != 5 or dy.shape[1:] != (1, a.grid[0] * a.grid[1], a.pixels, a.pixels):
        raise ShapeError(f"gradient {dy} does not belong to {a.grid} windows of {a.window}")
    return (TensorType((a.offsets, dy.shape[0]), master(dy.dtype)),)


def _evaluate(a: WindowBias, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (table,) = inputs
    bias = np.moveaxis(table[a.numbers()], -1, 0)[:, None, None]
    return ((bias + MASKED * a.mask()).astype(table.dtype),)


def _backward(a: WindowBias, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (dy,) = inputs
    total = np.zeros((a.offsets, dy.shape[0]))
    np.add.at(total, a.numbers(), np.moveaxis(dy.sum(axis=(1, 2), dtype=np.float64), 0, -1))
    return (total.astype(dy.dtype),)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit("window_bias_backward", op.attributes, (dy,), *op.inputs)


OPS = (
    OpKind("window_bias", WindowBias, _shape, _evaluate, _gradient, working_inputs=(0,)),
    OpKind("window_bias_backward", WindowBias, _backward_shape, _backward),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    window, size, shift = (by_pair(settings[name]) for name in ("window", "size", "shift"))
    positive("heads", (settings["heads"],))
    positive("window", window)
    a = WindowBias(window)
    if shift != (0, 0):
        if any(n < side or n % side or not 0 <= by < side for n, side, by in zip(size, window, shift, strict=True)):
            raise ShapeError(f"shift is {shift}: it needs a size that windows of {window} divide, not {size}, and less")
        a = WindowBias(window, (size[0] // window[0], size[1] // window[1]), shift)
    table = builder.state("weight", (a.offsets, settings["heads"]), Initializer("normal", 0.02))
    return builder.emit("window_bias", a, (table,))[0]


LAYERS = (
    Layer(
        "window_bias",
        (
            Parameter("heads", "int"),
            Parameter("window", "spatial"),
            Parameter("size", "spatial", 0),
            Parameter("shift", "spatial", 0),
        ),
        _build,
        (0, 0),
        "The trained bias of attention by offset within a window, [heads, 1, windows or 1, T, T]. With a shift of an "
        "image of `size`: minus 100 where two pixels were not neighbours before roll(-shift).",
    ),
)

"""Geometry of sliding windows (convolutions, pooling): how many windows fit, and the forms of sizes in the language."""

from __future__ import annotations

from typing import Any, cast

from mbc.ir.types import TensorType
from mbc.ops.base import ShapeError

Pair = tuple[int, int]  # (vertical, horizontal)
Pads = tuple[int, int, int, int]  # (top, bottom, left, right)


def as_pair(setting: Any) -> Pair:
    """Return (vertical, horizontal) from a setting of kind `pair`."""
    if isinstance(setting, tuple):
        first, second = cast("tuple[Any, Any]", setting)
        return int(first), int(second)
    return int(setting), int(setting)


def as_pads(setting: Any) -> Pads:
    """Return (top, bottom, left, right) from a setting of kind `pads`."""
    if isinstance(setting, tuple) and len(parts := cast("tuple[Any, ...]", setting)) == 4:
        top, bottom, left, right = (int(v) for v in parts)
        return top, bottom, left, right
    vertical, horizontal = as_pair(setting)
    return vertical, vertical, horizontal, horizontal


def positive(name: str, values: tuple[int, ...], least: int = 1) -> None:
    """Raise ShapeError unless every one of `values` is at least `least`.

    Raises:
        ShapeError: A value is less; `name` is what the message calls the setting.
    """
    if any(v < least for v in values):
        shown = values[0] if len(set(values)) == 1 else values
        raise ShapeError(f"{name} is {shown}, but must be at least {least}")


def image(x: TensorType, what: str) -> tuple[int, int, int, int]:
    """Return (rows, channels, height, width) of a tensor of images.

    Raises:
        ShapeError: The tensor has another number of axes; `what` is the operation that the message names.
    """
    if len(x.shape) != 4:
        raise ShapeError(f"{what} needs a tensor [rows, channels, height, width], but got {x}")
    rows, channels, height, width = x.shape
    return rows, channels, height, width


def spans(kernel: Pair, dilation: Pair) -> Pair:
    """Return the extent of a dilated window."""
    return (kernel[0] - 1) * dilation[0] + 1, (kernel[1] - 1) * dilation[1] + 1


def window_counts(size: Pair, span: Pair, stride: Pair, pad: Pads, ceil: bool = False) -> Pair:
    """Return the number of windows of extent `span` that fit vertically and horizontally.

    With `ceil` a last window may extend beyond the padded image, if it starts within the image or the leading padding
    (PyTorch's rule).

    Raises:
        ShapeError: No window fits.
    """
    counts: list[int] = []
    for axis in (0, 1):
        before, after = pad[2 * axis], pad[2 * axis + 1]
        room = size[axis] + before + after - span[axis]
        if room < 0:
            raise ShapeError(
                f"a window of {span[0]} x {span[1]} does not fit into an image of {size[0]} x {size[1]} "
                f"with padding {pad_text(pad)}"
            )
        count = (-(-room // stride[axis]) if ceil else room // stride[axis]) + 1
        if ceil and (count - 1) * stride[axis] >= size[axis] + before:
            count -= 1
        counts.append(count)
    return counts[0], counts[1]


def pad_text(pad: Pads) -> str:
    """Return the shortest text of a padding."""
    top, bottom, left, right = pad
    if top == bottom and left == right:
        return str(top) if top == left else f"({top}, {left})"
    return str(pad)

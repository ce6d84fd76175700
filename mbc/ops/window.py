"""Geometry of sliding windows (convolutions, pooling) over one to three spatial axes, and sizes in the language."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from mbc.ir.graph import Attributes
from mbc.ir.types import TensorType
from mbc.ops.base import ShapeError

Axes = tuple[int, ...]  # one number for each spatial axis: (width), (height, width) or (depth, height, width)
Sides = tuple[int, ...]  # before and after each axis: in two axes (top, bottom, left, right)
MOST_AXES = 3
_AXES = ("one to three spatial axes", "one spatial axis", "two spatial axes", "three spatial axes")


@dataclass(frozen=True, slots=True)
class Window(Attributes):
    """Settings of windows that slide over images.

    Attributes:
        size: Size of the image side, without padding.
        kernel: Positions of a window along each axis.
        stride: Distance of neighbouring windows; if empty, 1 along every axis.
        pad: Padding before and after each axis; if empty, none.
    """

    size: Axes
    kernel: Axes
    stride: Axes = ()
    pad: Sides = ()

    def __post_init__(self) -> None:
        """Fill in what is empty, for the number of axes that `size` has."""
        self._fill("stride", (1,) * len(self.size))
        self._fill("pad", (0, 0) * len(self.size))

    def _fill(self, name: str, default: Axes) -> None:
        if getattr(self, name) == ():
            object.__setattr__(self, name, default)

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.size)

    @property
    def spacing(self) -> Axes:
        """Distance of neighbouring positions of a window."""
        return (1,) * len(self.kernel)

    @property
    def span(self) -> Axes:
        """Pixels from the first position of a window to its last one."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.spacing, strict=True))

    @property
    def rounds_up(self) -> bool:
        """True if a last window may extend beyond the padded image, if it starts in the image or the leading padding.

        This is PyTorch's rule for pooling with ceil_mode.
        """
        return False

    @property
    def before(self) -> Axes:
        """Padding before each axis."""
        return self.pad[::2]

    @property
    def after(self) -> Axes:
        """Padding after each axis."""
        return self.pad[1::2]

    @property
    def is_padded_evenly(self) -> bool:
        """True if each axis has equal padding before and after."""
        return self.before == self.after

    @property
    def is_pointwise(self) -> bool:
        """True if each window is one pixel, and each pixel one window."""
        return {*self.kernel, *self.stride} == {1} and not any(self.pad)

    @property
    def output_size(self) -> Axes:
        """Number of windows along each axis.

        Raises:
            ShapeError: No window fits.
        """
        room = tuple(
            size + before + after - span
            for size, before, after, span in zip(self.size, self.before, self.after, self.span, strict=True)
        )
        if min(room) < 0:
            short = [f"axis {axis}" for axis, pixels in enumerate(room, 2) if pixels < 0]
            where = f" along {' and '.join(short)}" if len(short) < len(room) else ""
            raise ShapeError(
                f"a window of {by(self.span)} does not fit into an image of {by(self.size)} with padding "
                f"{pad_text(self.pad)}{where}"
            )
        if not self.rounds_up:
            return tuple(pixels // stride + 1 for pixels, stride in zip(room, self.stride, strict=True))
        counts = (-(-pixels // stride) + 1 for pixels, stride in zip(room, self.stride, strict=True))
        return tuple(
            count - ((count - 1) * stride >= size + before)
            for count, stride, size, before in zip(counts, self.stride, self.size, self.before, strict=True)
        )

    @property
    def covered(self) -> Axes:
        """Pixels that windows and image cover along each axis, from the start of the leading padding."""
        return tuple(
            max((count - 1) * stride + span, before + size)
            for count, stride, span, before, size in zip(
                self.output_size, self.stride, self.span, self.before, self.size, strict=True
            )
        )

    @property
    def inside(self) -> tuple[slice, ...]:
        """The image within the padded image."""
        return slice(None), slice(None), *(slice(b, b + n) for b, n in zip(self.before, self.size, strict=True))

    def positions(self) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """Yield each position in the window by number, and the pixels of the padded image at this position."""
        axes = tuple(zip(self.spacing, self.stride, self.output_size, strict=True))
        for number, place in enumerate(itertools.product(*map(range, self.kernel))):
            starts = (i * distance for i, (distance, _, _) in zip(place, axes, strict=True))
            pixels = (
                slice(start, start + stride * (count - 1) + 1, stride)
                for start, (_, stride, count) in zip(starts, axes, strict=True)
            )
            yield number, (slice(None), slice(None), *pixels)

    def check(self) -> None:
        """Check that all settings are in range.

        Raises:
            ShapeError: A setting is too small, or does not have as many numbers as the image has axes.
        """
        rank = self.rank
        for name, numbers, count, least in (
            ("size", self.size, rank, 1),
            ("kernel", self.kernel, rank, 1),
            ("stride", self.stride, rank, 1),
            ("pad", self.pad, 2 * rank, 0),
            ("dilation", self.spacing, rank, 1),
        ):
            if len(numbers) != count:
                raise ShapeError(f"{name} is {numbers}, but the image has {_AXES[rank]}")
            positive(name, numbers, least)


def by_axis(setting: Any, rank: int) -> Axes:
    """Return one number for each of `rank` axes from a setting of kind `spatial`.

    Raises:
        ShapeError: The setting has another number of numbers.
    """
    return tuple(map(int, each_axis(setting, rank)))


def each_axis(setting: Any, rank: int) -> tuple[float, ...]:
    """Return one number for each of `rank` axes from a setting of kind `spatial` or `factors`.

    Raises:
        ShapeError: The setting has another number of numbers.
    """
    numbers = cast("tuple[float, ...]", setting if isinstance(setting, tuple) else (setting,) * rank)
    if len(numbers) != rank:
        raise ShapeError(
            f"{numbers} has {len(numbers)} numbers, but the tensor has {_AXES[rank]}: write one number for each axis, "
            "or one for all"
        )
    return numbers


def by_pair(setting: Any) -> tuple[int, int]:
    """Return (vertical, horizontal) from a setting of kind `spatial` of a layer of two spatial axes.

    Raises:
        ShapeError: The setting has another number of numbers.
    """
    vertical, horizontal = by_axis(setting, 2)
    return vertical, horizontal


def by_side(setting: Any, rank: int) -> Sides:
    """Return the numbers before and after each of `rank` axes from a setting of kind `sides`.

    Raises:
        ShapeError: The setting has another number of numbers.
    """
    if isinstance(setting, tuple) and len(sides := cast("tuple[Any, ...]", setting)) == 2 * rank:
        return tuple(map(int, sides))
    return tuple(number for number in by_axis(setting, rank) for _ in range(2))


def by(sizes: Axes) -> str:
    """Return `3 x 3`."""
    return " x ".join(map(str, sizes))


def positive(name: str, values: tuple[float, ...], least: int = 1) -> None:
    """Raise ShapeError unless every one of `values` is at least `least`.

    Raises:
        ShapeError: A value is less; `name` is what the message calls the setting.
    """
    if any(v < least for v in values):
        shown = values[0] if len(set(values)) == 1 else values
        raise ShapeError(f"{name} is {shown}, but must be at least {least}")


def spatial(x: TensorType, what: str, rank: int = 0) -> tuple[int, int, Axes]:
    """Return rows, channels and size of a tensor with one, two or three spatial axes, or with `rank` of them.

    Raises:
        ShapeError: The tensor has another number of axes; `what` is the operation that the message names.
    """
    axes = len(x.shape) - 2
    if not 1 <= axes <= MOST_AXES or axes != (rank or axes):
        raise ShapeError(f"{what} needs a tensor [rows, channels, ...] with {_AXES[rank]}, but got {x}")
    rows, channels, *size = x.shape
    return rows, channels, tuple(size)


def pad_text(pad: Sides) -> str:
    """Return the shortest text of a padding."""
    before = pad[::2]
    if before == pad[1::2]:
        return str(before[0]) if len(set(before)) == 1 else str(before)
    return str(pad)

"""The structures with which the arguments of launches over a tensor of rows, channels and pixels begin."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.cuda.base import Slice, image_of
from mbc.kernels.launch_struct import Struct


@dataclass(frozen=True, slots=True)
class TensorArguments(Struct):
    """The first integer arguments of launches over a tensor of rows and channels."""

    type: int
    layout: int
    rows: int
    channels: int


@dataclass(frozen=True, slots=True)
class ImageArguments(TensorArguments):
    """Integer arguments of a launch over an image, as `image_of` returns them.

    Attributes:
        inner: Extent of all axes after the channels together.
    """

    inner: int


@dataclass(frozen=True, slots=True)
class SumArguments(ImageArguments):
    """Integer arguments of a launch that reduces each channel of an image.

    Attributes:
        parts: Blocks that share a channel.
        accumulate: Whether results are added to the present values.
    """

    parts: int
    accumulate: int


def image_arguments(at: Slice) -> ImageArguments:
    """Return the integer arguments of a launch over the first operand."""
    return ImageArguments(*image_of(at))

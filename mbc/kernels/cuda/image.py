"""The structure that launches over a tensor of rows, channels and pixels begin with."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.kernels.launch_struct import Struct


@dataclass(frozen=True, slots=True)
class ImageArguments(Struct):
    """Integer arguments of a launch over an image, as `image_of` returns them.

    Attributes:
        inner: Extent of all axes after the channels together.
    """

    type: int
    layout: int
    rows: int
    channels: int
    inner: int

"""Tiles of convolutions of stride one whose halo is in shared memory: their pixels and the arguments of launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Slice
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, attributes, sizes

# Equal to the constants in the sources.
GROUPS = 32  # groups of eight pixels in a tile
PIXELS = GROUPS * 8
MOST_HALO_PIXELS = 379


@dataclass(frozen=True, slots=True)
class HaloArguments(ConvolutionSizes):
    """Integer arguments of a launch with halos.

    Attributes:
        backward: Data gradient: weights are transposed and rotated.
    """

    backward: int
    lines: int
    pitch: int
    group: int
    strips: int


@dataclass(frozen=True, slots=True)
class HaloTile:
    """The numbering of the images' pixels, and the pixels of a tile: see halo.cuh."""

    lines: int
    pitch: int
    group: int
    strips: int

    def halo_pixels(self, shape: dict[str, int]) -> int:
        """Return the number of pixels of the halo of a tile."""
        return (GROUPS - 1) * self.group + 8 + (shape["kernel_height"] - 1) * self.pitch + shape["kernel_width"] - 1

    def fits(self, shape: dict[str, int]) -> bool:
        """Return whether a halo fits into shared memory, and all pixels and one more image into 32-bit numbers."""
        most = shape["rows"] * self.lines * self.pitch + self.lines * self.pitch + self.group * GROUPS
        return self.halo_pixels(shape) <= MOST_HALO_PIXELS and most < 1 << 31

    def pixels(self, shape: dict[str, int]) -> int:
        """Return the number of pixels that all tiles compute."""
        blocks = math.ceil(shape["rows"] * self.lines * self.pitch / (self.group * GROUPS)) * self.strips
        return blocks * PIXELS


def _halo_tile(shape: dict[str, int]) -> HaloTile | None:
    """Return the tile that fits and computes the fewest pixels, or None if none fits."""

    def extent(size: str, pad: str, kernel: str) -> int:
        """Return the extent of an image with its padding, which neighbouring images share."""
        after = shape["out_" + size] + shape[kernel] - 1 - shape[size] - shape[pad]
        return max(shape["out_" + size], shape[size] + max(shape[pad], after))

    lines = extent("height", "pad_top", "kernel_height")
    pitch = extent("width", "pad_left", "kernel_width")
    box = 8 + shape["kernel_width"] - 1
    tiles = HaloTile(lines, pitch, 8, 1), HaloTile(lines, box, box, math.ceil(shape["out_width"] / 8))
    return min((tile for tile in tiles if tile.fits(shape)), key=lambda tile: tile.pixels(shape), default=None)


def _sizes(request: Request) -> dict[str, int]:
    return sizes(request, request.kind == "convolution_backward_data")


def halo_arguments(at: Slice) -> HaloArguments:
    """Return the integer arguments of a launch."""
    shape = _sizes(at.request)
    tile = _halo_tile(shape)
    assert tile is not None
    return HaloArguments(
        **shape,
        backward=int(at.request.kind == "convolution_backward_data"),
        lines=tile.lines,
        pitch=tile.pitch,
        group=tile.group,
        strips=tile.strips,
    )


def halo_fits(request: Request) -> bool:
    """Return whether the convolution has a stride of one, a filter of several pixels, and a tile whose halo fits."""
    a = attributes(request)
    return a.stride == (1, 1) and a.kernel != (1, 1) and _halo_tile(_sizes(request)) is not None


def pixels_computed(request: Request) -> int:
    """Return the number of pixels that all tiles compute, including those outside the output."""
    tile = _halo_tile(_sizes(request))
    assert tile is not None
    return tile.pixels(_sizes(request))

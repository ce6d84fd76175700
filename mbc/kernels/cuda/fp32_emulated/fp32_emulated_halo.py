"""Convolutions in emulated fp32 (3xFP16), with filters of several pixels and a stride of one.

The halo of a block's tile is in shared memory, where it is split into fp16 words once for all filter pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, ConvOperands, attributes, sizes
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import KERNELS as CONV_KERNELS
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import STAGE_K, data_pass_sizes

# The constants up to SHARED_BYTES are equal to those in the source.
GROUPS = 32  # groups of eight pixels in a tile
PIXELS = GROUPS * 8
MOST_HALO_PIXELS = 379
SHARED_BYTES = 226 << 10
# Share of the time of `fp32_emulated_conv`, which splits words for each filter pixel, by judgement.
TIME_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class HaloArguments(ConvolutionSizes):
    """Integer arguments of a launch with halos."""

    backward: int
    lines: int
    pitch: int
    group: int
    strips: int


@dataclass(frozen=True, slots=True)
class HaloTile:
    """The numbering of the images' pixels, and the pixels of a tile: see `HaloArguments` in halo.cuh."""

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
    return data_pass_sizes(request) if request.kind == "convolution_backward_data" else sizes(request)


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


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Return the workspace for the split weights and for a scale for every filter and stage."""
    weight = ConvOperands.of(request).weight
    return weight.size_bytes + weight.elements // STAGE_K * 4


def _with_halo(kernel: OwnKernel) -> OwnKernel:
    def takes(request: Request) -> bool:
        return kernel.takes(request) and halo_fits(request)

    def time_us(request: Request, device: DeviceSpec) -> float:
        result = request.outputs[0]
        computed_per_pixel = pixels_computed(request) * result.shape[1] / result.elements
        return TIME_SHARE * computed_per_pixel * kernel.time_us(request, device)

    return replace(
        kernel,
        file="fp32_emulated/fp32_emulated_halo.cu",
        struct=HaloArguments,
        integers=halo_arguments,
        workspace=_weights_bytes,
        time_us=time_us,
        launcher="fp32_emulated_halo",
        named=f"fp32_emulated_halo{kernel.kind.removeprefix('convolution')}",
        takes=takes,
        shared=shared_of(SHARED_BYTES),
    )


KERNELS = tuple(_with_halo(kernel) for kernel in CONV_KERNELS if kernel.kind != "convolution_backward_filter")

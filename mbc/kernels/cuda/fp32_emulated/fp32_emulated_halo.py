"""Convolutions in emulated fp32 (3xFP16), with filters of several taps and a stride of one.

The halo of a block's tile lies in shared memory, split into fp16 words once for all filter taps.
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

# As in the source.
GROUPS = 32  # of eight pixels, in a tile
PIXELS = GROUPS * 8
MOST_HALO_PIXELS = 379
SHARED_BYTES = 226 << 10
TIME_SHARE = 0.9  # of the time of `fp32_emulated_conv`, which splits words for each filter tap, by judgement


@dataclass(frozen=True, slots=True)
class HaloArguments(ConvolutionSizes):
    backward: int
    lines: int
    pitch: int
    group: int
    strips: int


@dataclass(frozen=True, slots=True)
class HaloTile:
    """How the pixels of images are numbered, and which of them a tile takes: see `HaloArguments` in halo.cuh."""

    lines: int
    pitch: int
    group: int
    strips: int

    def halo_pixels(self, known: dict[str, int]) -> int:
        return (GROUPS - 1) * self.group + 8 + (known["kernel_height"] - 1) * self.pitch + known["kernel_width"] - 1

    def fits(self, known: dict[str, int]) -> bool:
        """Whether a halo fits into shared memory, and all pixels, and those of one image more, into 32 bits."""
        most = known["rows"] * self.lines * self.pitch + self.lines * self.pitch + self.group * GROUPS
        return self.halo_pixels(known) <= MOST_HALO_PIXELS and most < 1 << 31

    def pixels(self, known: dict[str, int]) -> int:
        blocks = math.ceil(known["rows"] * self.lines * self.pitch / (self.group * GROUPS)) * self.strips
        return blocks * PIXELS


def _halo_tile(known: dict[str, int]) -> HaloTile | None:
    """Of those that fit, the one by which the fewest pixels are computed."""

    def extent(size: str, pad: str, kernel: str) -> int:
        """Two neighbouring images share their padding."""
        after = known["out_" + size] + known[kernel] - 1 - known[size] - known[pad]
        return max(known["out_" + size], known[size] + max(known[pad], after))

    lines = extent("height", "pad_top", "kernel_height")
    pitch = extent("width", "pad_left", "kernel_width")
    box = 8 + known["kernel_width"] - 1
    tiles = HaloTile(lines, pitch, 8, 1), HaloTile(lines, box, box, math.ceil(known["out_width"] / 8))
    return min((tile for tile in tiles if tile.fits(known)), key=lambda tile: tile.pixels(known), default=None)


def _sizes(request: Request) -> dict[str, int]:
    return data_pass_sizes(request) if request.kind == "convolution_backward_data" else sizes(request)


def halo_arguments(at: Slice) -> HaloArguments:
    known = _sizes(at.request)
    tile = _halo_tile(known)
    assert tile is not None
    return HaloArguments(
        **known,
        backward=int(at.request.kind == "convolution_backward_data"),
        lines=tile.lines,
        pitch=tile.pitch,
        group=tile.group,
        strips=tile.strips,
    )


def halo_fits(request: Request) -> bool:
    a = attributes(request)
    return a.stride == (1, 1) and a.kernel != (1, 1) and _halo_tile(_sizes(request)) is not None


def pixels_computed(request: Request) -> int:
    """By all tiles, those outside the output too."""
    tile = _halo_tile(_sizes(request))
    assert tile is not None
    return tile.pixels(_sizes(request))


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Split weights, and a scale for every filter and stage."""
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

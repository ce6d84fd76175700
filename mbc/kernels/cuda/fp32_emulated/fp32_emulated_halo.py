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
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, Sides, attributes, sizes
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import KERNELS as IN_HALVES
from mbc.kernels.cuda.fp32_emulated.fp32_emulated_conv import TERMS, turned

# As in the source.
GROUPS = 32  # of eight places, of a block
PLACES = GROUPS * 8
MOST_PLACES = 379
SHARED_BYTES = 226 << 10
OF_ITS_TIME = 0.9  # of the kernel's that divides words for each tile, by judgement


@dataclass(frozen=True, slots=True)
class HaloArguments(ConvolutionSizes):
    backward: int
    lines: int
    pitch: int
    group: int
    strips: int


@dataclass(frozen=True, slots=True)
class Patch:
    """How places of images follow one another, and which of them a block takes: `HaloArguments`."""

    lines: int
    pitch: int
    group: int
    strips: int

    def places(self, known: dict[str, int]) -> int:
        return (GROUPS - 1) * self.group + 8 + (known["kernel_height"] - 1) * self.pitch + known["kernel_width"] - 1

    def fits(self, known: dict[str, int]) -> bool:
        """A patch into shared memory, and all places, an image more than there are, into 32 bits."""
        beside = known["rows"] * self.lines * self.pitch + self.lines * self.pitch + self.group * GROUPS
        return self.places(known) <= MOST_PLACES and beside < 1 << 31

    def made(self, known: dict[str, int]) -> int:
        tiles = math.ceil(known["rows"] * self.lines * self.pitch / (self.group * GROUPS)) * self.strips
        return tiles * PLACES


def _patch(known: dict[str, int]) -> Patch | None:
    """The one by which the fewest places are made, of those that fit in shared memory."""

    def extent(size: str, pad: str, kernel: str) -> int:
        """What is beside an image is beside its neighbour, too."""
        after = known["out_" + size] + known[kernel] - 1 - known[size] - known[pad]
        return max(known["out_" + size], known[size] + max(known[pad], after))

    lines = extent("height", "pad_top", "kernel_height")
    pitch = extent("width", "pad_left", "kernel_width")
    box = 8 + known["kernel_width"] - 1
    ways = Patch(lines, pitch, 8, 1), Patch(lines, box, box, math.ceil(known["out_width"] / 8))
    return min((way for way in ways if way.fits(known)), key=lambda way: way.made(known), default=None)


def _sizes(request: Request) -> dict[str, int]:
    return turned(request) if request.kind == "convolution_backward_data" else sizes(request)


def patch_arguments(at: Slice) -> HaloArguments:
    known = _sizes(at.request)
    patch = _patch(known)
    assert patch is not None
    return HaloArguments(
        **known,
        backward=int(at.request.kind == "convolution_backward_data"),
        lines=patch.lines,
        pitch=patch.pitch,
        group=patch.group,
        strips=patch.strips,
    )


def seen_in_patches(request: Request) -> bool:
    a = attributes(request)
    return a.stride == (1, 1) and a.kernel != (1, 1) and _patch(_sizes(request)) is not None


def places_made(request: Request) -> int:
    """By all blocks, those beside images too."""
    patch = _patch(_sizes(request))
    assert patch is not None
    return patch.made(_sizes(request))


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Weights in halves, and a scale for every filter and stage."""
    weight = Sides.of(request).weight
    return weight.size_bytes + weight.elements // TERMS * 4


def _of_patches(kernel: OwnKernel) -> OwnKernel:
    def takes(request: Request) -> bool:
        return kernel.takes(request) and seen_in_patches(request)

    def time_us(request: Request, device: DeviceSpec) -> float:
        result = request.outputs[0]
        made_per_pixel = places_made(request) * result.shape[1] / result.elements
        return OF_ITS_TIME * made_per_pixel * kernel.time_us(request, device)

    return replace(
        kernel,
        file="fp32_emulated/fp32_emulated_halo.cu",
        struct=HaloArguments,
        integers=patch_arguments,
        workspace=_weights_bytes,
        time_us=time_us,
        launcher=f"fp32_emulated_halo{kernel.kind.removeprefix('convolution')}",
        takes=takes,
        shared=shared_of(SHARED_BYTES),
    )


KERNELS = tuple(_of_patches(kernel) for kernel in IN_HALVES if kernel.kind != "convolution_backward_filter")

"""Convolutions in emulated fp32: three fp16 tensor-core products for one of fp32 (3xFP16).

Operands begin at multiples of 16 bytes: buffers do, and so do slices, whose rows are channels by the 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Request
from mbc.kernels.calibration import peak_tflops
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, product_us, shared_of
from mbc.kernels.cuda.conv.conv_operands import ConvolutionSizes, Sides, attributes, sizes

# As in the sources.
CHANNELS = 64  # by which both sides have them
AT_ONCE = 128  # filters or channels of a block, where it makes a multiple of so many
TERMS = 64  # of a stage
SCALE_BYTES = 16  # of weights of a stage, whose elements are four bytes in two halves
LARGEST_BYTES = 2048  # of what blocks find while they look for the largest of an image
SHARED_BYTES = 201 << 10
MOST_BLOCKS = 132  # of a large GPU at a time; a constant, so that sums are the same on all
LEAST_STAGES = 16  # of a part
ADDED_PIXELS = 185  # in whose time a part is written and read again: 8 bytes at 4 TB/s against 2 operations at 185 T/s
MOST_PIXELS = 1 << 15  # across or down, with padding: a place is packed into two halves of a word
PRODUCTS = 3
TENSOR_SHARE = 0.6  # of the peak, by judgement


@dataclass(frozen=True, slots=True)
class Fp32EmulatedArguments(ConvolutionSizes):
    backward: int
    parts: int
    accumulate: int


def _takes(request: Request) -> bool:
    sides = Sides.of(request)
    types = {sides.image.dtype, sides.features.dtype}
    return request.precision is Precision.FP32 and types == {DType.FP32} and by_the_64(request)


def by_the_64(request: Request) -> bool:
    """Channels on both sides, of images in whose elements 32 bits can count."""
    return by_the(CHANNELS, request)


def by_the(many: int, request: Request) -> bool:
    """The same of as many channels, or twice as many, and so on."""
    a, sides = attributes(request), Sides.of(request)
    image, features = sides.image, sides.features
    return (
        len(image.shape) == 4
        and image.shape[1] % many == 0
        and features.shape[1] % many == 0
        and max(*image.shape[2:], *features.shape[2:]) + max(a.pad) < MOST_PIXELS
        and max(image.elements, features.elements) < 1 << 31
        and (a.dilation, a.groups) == ((1, 1), 1)
    )


def _takes_data(request: Request) -> bool:
    return _takes(request) and turns(request)


def turns(request: Request) -> bool:
    """A step of one pixel, and no padding beyond the filter: then the pass to the image is a convolution itself."""
    a = attributes(request)
    return a.stride == (1, 1) and a.pad[0] < a.kernel[0] and a.pad[2] < a.kernel[1]


def _arguments(at: Slice) -> Fp32EmulatedArguments:
    request = at.request
    backward = request.kind == "convolution_backward_data"
    return Fp32EmulatedArguments(
        **(turned(request) if backward else sizes(request)),
        backward=int(backward),
        parts=_parts(request),
        accumulate=int(at.accumulate),
    )


def turned(request: Request) -> dict[str, int]:
    """Sizes of the convolution that makes the image of its gradients."""
    known = sizes(request)
    return known | {
        "channels": known["filters"],
        "height": known["out_height"],
        "width": known["out_width"],
        "filters": known["channels"],
        "out_height": known["height"],
        "out_width": known["width"],
        "pad_top": known["kernel_height"] - 1 - known["pad_top"],
        "pad_left": known["kernel_width"] - 1 - known["pad_left"],
    }


def _weights_bytes(request: Request, layout: Layout) -> int:
    """Weights in halves, and a scale for every stage of a block."""
    sides = Sides.of(request)
    backward = request.kind == "convolution_backward_data"
    made = (sides.image if backward else sides.features).shape[1]
    blocks = made // (AT_ONCE if made % AT_ONCE == 0 else CHANNELS)
    stages = sides.weight.elements // made // TERMS
    return sides.weight.size_bytes + blocks * stages * SCALE_BYTES


def _parts(request: Request) -> int:
    """Into which pixels are divided: so that blocks end at about the same time, and few sums are left to add up."""
    if request.kind != "convolution_backward_filter":
        return 1
    sides = Sides.of(request)
    filters = sides.features.shape[1]
    columns = sides.weight.elements // filters // CHANNELS  # by the 64
    tiles = (
        filters // AT_ONCE * math.ceil(columns / 2)
        if filters % AT_ONCE == 0
        else filters // CHANNELS * math.ceil(columns / 4)
    )
    return fewest_parts(tiles, sides.features.elements // filters)


def fewest_parts(tiles: int, pixels: int) -> int:
    """Of the pixels that each of so many tiles is summed up over."""
    adding = ADDED_PIXELS / pixels  # up a part, beside all products

    def takes(parts: int) -> float:
        return math.ceil(tiles * parts / MOST_BLOCKS) / parts * MOST_BLOCKS / tiles + adding * parts

    return min(range(1, max(2, min(MOST_BLOCKS, pixels // TERMS // LEAST_STAGES) + 1)), key=takes)


def _filter_bytes(request: Request, layout: Layout) -> int:
    """The image in halves, and what each part comes to."""
    sides = Sides.of(request)
    return LARGEST_BYTES + sides.image.size_bytes + _parts(request) * sides.weight.size_bytes


def _time_us(request: Request, device: DeviceSpec) -> float:
    sides = Sides.of(request)
    operations = 2 * sides.features.elements * math.prod(sides.weight.shape[1:]) * PRODUCTS
    return product_us(request, device, operations, peak_tflops(device, Precision.FP16), TENSOR_SHARE)


_FORWARD = OwnKernel(
    "convolution",
    "fp32_emulated/fp32_emulated_conv.cu",
    Fp32EmulatedArguments,
    _arguments,
    layouts=channels_last,
    workspace=_weights_bytes,
    time_us=_time_us,
    launches=2,
    launcher="convolution_in_halves",
    takes=_takes,
    shared=shared_of(SHARED_BYTES),
    tensor_cores=True,
    warpgroups=True,
    emulates_fp32=True,
    aligned=True,
)
_BACKWARD_DATA = replace(
    _FORWARD,
    kind="convolution_backward_data",
    launcher="convolution_backward_data_in_halves",
    takes=_takes_data,
)
_BACKWARD_FILTER = replace(
    _FORWARD,
    kind="convolution_backward_filter",
    file="fp32_emulated/fp32_emulated_conv_filter.cu",
    launcher="convolution_backward_filter_in_halves",
    workspace=_filter_bytes,
    launches=4,
    accumulates=True,
)

KERNELS = (_FORWARD, _BACKWARD_DATA, _BACKWARD_FILTER)

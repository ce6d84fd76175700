"""Data gradients of strided convolutions as implicit GEMMs by mma.sync, in bf16 and fp16, along one to three axes.

Results whose positions are equal modulo the stride form a class, which is a convolution at a stride of one by the taps
that reach it. One launch computes all classes (`implicit_gemm_strided.cu`, decision 099).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Slice, type_code
from mbc.kernels.cuda.conv import mma_gemm
from mbc.kernels.cuda.conv.conv_operands import attributes, data_pass_is_convolution, volume_sizes
from mbc.kernels.cuda.conv.implicit_gemm import (
    FORWARD,
    ImplicitGemmArguments,
    of_strided_volumes,
    takes_any_pass,
)

MOST_CLASSES = 64  # results of larger strides are mostly zeros


@dataclass(frozen=True, slots=True)
class ImplicitGemmStridedArguments(ImplicitGemmArguments):
    """Integer arguments of a launch: sizes of the gradients, with the sides of the forward pass exchanged.

    Attributes:
        together: Neighbouring pixels of a line of the result whose channels are columns of one GEMM: the stride, or 1.
    """

    together: int


def _takes(request: Request) -> bool:
    return (
        takes_any_pass(request)
        and not data_pass_is_convolution(request)
        and math.prod(attributes(request).stride) <= MOST_CLASSES
    )


def _together(request: Request) -> int:
    """Return the stride along a line if one GEMM for all its classes multiplies no more than a GEMM for each class."""
    a, filters = attributes(request), request.outputs[0].shape[1]
    kernel, stride = a.kernel[-1], a.stride[-1]
    together = mma_gemm.padded_filters(stride * filters) * math.ceil(kernel / stride)
    return stride if together <= mma_gemm.padded_filters(filters) * kernel else 1


def _pixels(request: Request) -> int:
    """Return the results of each class; some are outside the image where the stride does not divide its size."""
    a, (rows, _, *size) = attributes(request), request.outputs[0].shape
    size[-1] += a.before[-1] % a.stride[-1] if _together(request) > 1 else 0
    return rows * math.prod(math.ceil(extent / stride) for extent, stride in zip(size, a.stride, strict=True))


def _taps(request: Request) -> list[int]:
    """Return the taps of each class. Results of a class without taps are zeros."""
    a = attributes(request)
    classes = (*a.stride[:-1], a.stride[-1] // _together(request))
    axes = (
        [len(range(number, kernel, stride)) for number in range(count)]
        for kernel, stride, count in zip(a.kernel, a.stride, classes, strict=True)
    )
    return [math.prod(taps) for taps in product(*axes)]


def _columns(request: Request) -> int:
    return request.outputs[0].shape[1] * _together(request)


def _tiles(request: Request) -> int:
    return math.ceil(_pixels(request) / mma_gemm.PIXELS)


def _blocks(request: Request) -> int:
    return mma_gemm.blocks(_tiles(request) * len(_taps(request)) * mma_gemm.PIXELS, _columns(request))


def _arguments(at: Slice) -> ImplicitGemmStridedArguments:
    request = at.request
    return ImplicitGemmStridedArguments(
        **volume_sizes(request, backward=True),
        type=type_code(request.inputs[0]),
        blocks=_blocks(request),
        together=_together(request),
    )


def _shared_bytes(request: Request) -> int:
    return mma_gemm.shared_bytes(_columns(request))


def _arithmetic_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of the products of all classes in rounds of tiles, or of the tile with most taps if longer."""
    channels = math.ceil(request.inputs[0].shape[1] / mma_gemm.CHANNELS) * mma_gemm.CHANNELS
    columns, taps = _columns(request), _taps(request)
    tile = mma_gemm.tile_filters(columns)
    tiles = _tiles(request) * mma_gemm.padded_filters(columns) // tile
    of_a_tap = mma_gemm.PIXELS * tile * channels
    rounds = mma_gemm.tiles_us(request.precision, device, tiles * len(taps), of_a_tap) * sum(taps) / len(taps)
    return max(rounds, mma_gemm.tiles_us(request.precision, device, 1, of_a_tap) * max(taps))


KERNELS = (
    replace(
        FORWARD,
        kind="convolution_backward_data",
        file="conv/implicit_gemm_strided.cu",
        struct=ImplicitGemmStridedArguments,
        integers=_arguments,
        arithmetic_us=_arithmetic_us,
        launcher="implicit_gemm_strided_backward_data",
        takes=_takes,
        shared=_shared_bytes,
        measured_anyway=of_strided_volumes,
        version=1,
    ),
)

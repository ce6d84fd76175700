"""Depthwise convolutions of 5 x 5, 7 x 7, 1 x K and K x 1 (K up to 11), channels last, one filter for each channel.

Up to about 5 x 5 they are bound by memory; at 7 x 7 their fp32 arithmetic takes longer. Operands that are channels
first, have several filters for a channel or an odd number of channels are left to `direct` and to libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, moved_us
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes
from mbc.kernels.cuda.conv.depthwise import (
    COPY_SHARE,
    DepthwiseArguments,
    FilterBlocks,
    is_depthwise,
    partial_bytes,
    sizes_of,
)

# Share of the fp32 peak by stride: loads, conversions and index arithmetic are four of ten instructions, or two of
# three where windows share fewer pixels; and not every cycle issues an instruction.
FMA_SHARE = {1: 0.42, 2: 0.25}
PAIR = 2  # channels of a thread; DEPTHWISE_PAIR in the source
FILTER_THREADS = 128  # threads of a block of the filter pass; DEPTHWISE_FILTER_THREADS in the source
MOST_BLOCKS = 384  # blocks of the filter pass: three, for which registers suffice, on each of 128 multiprocessors
MOST_TAPS = 11  # pixels of a filter of one row or column; DEPTHWISE_LINES in the source


@dataclass(frozen=True, slots=True)
class DepthwiseRowsArguments(DepthwiseArguments):
    """Integer arguments of a launch of a depthwise convolution of this file."""

    kernel_height: int
    kernel_width: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """Filter sizes that one file of kernels is compiled for."""

    name: str
    holds: Callable[[tuple[int, ...]], bool]
    vector: int  # channels of a thread of the filter pass, which keeps all their sums in registers

    @property
    def blocks(self) -> FilterBlocks:
        return FilterBlocks(self.vector, FILTER_THREADS, MOST_BLOCKS)


def _one_row_or_column(kernel: tuple[int, ...]) -> bool:
    return min(kernel) == 1 < max(kernel) <= MOST_TAPS


_SHAPES = (_Shape("1d", _one_row_or_column, PAIR), _Shape("5x5", (5, 5).__eq__, PAIR), _Shape("7x7", (7, 7).__eq__, 1))


def _takes(shape: _Shape, request: Request) -> bool:
    channels, filters = (t.shape[1] for t in (ConvOperands.of(request).image, ConvOperands.of(request).features))
    return (
        is_depthwise(request)
        and shape.holds(attributes(request).kernel)
        and filters == channels
        and channels % PAIR == 0
    )


def _arguments(shape: _Shape, at: Slice) -> DepthwiseRowsArguments:
    height, width = attributes(at.request).kernel
    return DepthwiseRowsArguments(**asdict(sizes_of(at, shape.blocks)), kernel_height=height, kernel_width=width)


def _workspace(shape: _Shape, request: Request, layout: Layout) -> int:
    return partial_bytes(request, layout, shape.blocks)


def _time_us(request: Request, device: DeviceSpec) -> float:
    """Return the time of memory or of arithmetic, whichever is longer.

    Each pass multiplies every output pixel by every pixel of the filter.
    """
    a = attributes(request)
    operations = 2 * ConvOperands.of(request).features.elements * math.prod(a.kernel)
    arithmetic_us = operations / (device.fp32_tflops * 1e6 * FMA_SHARE[a.stride[0]])
    return max(moved_us(request, device) / COPY_SHARE, arithmetic_us)


def _kernels(shape: _Shape) -> tuple[OwnKernel, ...]:
    def kernel(suffix: str) -> OwnKernel:
        of_filter = suffix == "_backward_filter"
        file = f"conv/depthwise_{shape.name}{'_filter' if of_filter else ''}.cu"
        return OwnKernel(
            f"convolution{suffix}",
            file,
            DepthwiseRowsArguments,
            partial(_arguments, shape),
            layouts=channels_last,
            workspace=partial(_workspace, shape),
            time_us=_time_us,
            launches=2 if of_filter else 1,
            accumulates=of_filter,
            launcher=f"depthwise_{shape.name}{suffix}",
            takes=partial(_takes, shape),
            aligned=True,
        )

    return kernel(""), kernel("_backward_data"), kernel("_backward_filter")


KERNELS = tuple(kernel for shape in _SHAPES for kernel in _kernels(shape))

"""Depthwise convolutions of 5 x 5, 7 x 7, 1 x K and K x 1 (K up to 11), channels last, one filter a channel.

Up to about 5 x 5 they are memory-bound; of 7 x 7 their fp32 arithmetic takes longer. What lies channels first, has
several filters a channel or an odd number of channels is left to `direct` and to libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice, channels_last, gemm_us, moved_us
from mbc.kernels.cuda.conv.conv_operands import ConvOperands, attributes
from mbc.kernels.cuda.conv.depthwise import (
    COPY_SHARE,
    DepthwiseArguments,
    is_depthwise,
    partial_bytes,
    sizes_of,
    split_k,
)

# Of the fp32 peak: loads, conversions and index arithmetic are every third instruction, and not every cycle issues one.
FMA_SHARE = 0.45
PAIR = 2  # channels a thread; DEPTHWISE_PAIR in the source
MOST_TAPS = 11  # of a filter of one row or column; DEPTHWISE_LINES in the source


@dataclass(frozen=True, slots=True)
class DepthwiseRowsArguments(DepthwiseArguments):
    kernel_height: int
    kernel_width: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """Filters that one file of kernels is compiled for."""

    name: str
    holds: Callable[[tuple[int, int]], bool]
    filter_vector: int  # channels a thread of the filter pass, which keeps all their sums in registers


def _one_row_or_column(kernel: tuple[int, int]) -> bool:
    return min(kernel) == 1 < max(kernel) <= MOST_TAPS


_SHAPES = (
    _Shape("1d", _one_row_or_column, PAIR),
    _Shape("5x5", (5, 5).__eq__, PAIR),
    _Shape("7x7", (7, 7).__eq__, 1),
)


def _takes(shape: _Shape, request: Request) -> bool:
    channels, filters = (t.shape[1] for t in (ConvOperands.of(request).image, ConvOperands.of(request).features))
    return (
        shape.holds(attributes(request).kernel)
        and filters == channels
        and channels % PAIR == 0
        and is_depthwise(request)
    )


def _arguments(shape: _Shape, at: Slice) -> DepthwiseRowsArguments:
    sizes = sizes_of(at, split_k(at.request, at.layout, shape.filter_vector))
    height, width = attributes(at.request).kernel
    return DepthwiseRowsArguments(**asdict(sizes), kernel_height=height, kernel_width=width)


def _workspace(shape: _Shape, request: Request, layout: Layout) -> int:
    return partial_bytes(request, layout, shape.filter_vector)


def _time_us(request: Request, device: DeviceSpec) -> float:
    """Of memory at its share, or of arithmetic: each pass multiplies every output pixel with every tap."""
    operations = 2 * ConvOperands.of(request).features.elements * math.prod(attributes(request).kernel)
    return max(
        moved_us(request, device) / COPY_SHARE, gemm_us(request, device, operations, device.fp32_tflops, FMA_SHARE)
    )


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

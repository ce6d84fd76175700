"""Pooling, local response normalization and upsampling."""

from __future__ import annotations

from dataclasses import dataclass

from mbc.ir.types import TensorType
from mbc.kernels.cuda.base import Channels, OwnKernel, Slice, layout_code, type_code
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.launch_struct import Struct
from mbc.ops.pooling import AveragePool, MaxPool, Pool
from mbc.ops.resize import Resize
from mbc.ops.response import Lrn
from mbc.ops.shape import Upsample


@dataclass(frozen=True, slots=True)
class PoolArguments(Struct):
    """Integer arguments of a launch of pooling, forward or backward.

    Attributes:
        option: Max pooling: whether an index is written; average pooling: whether padding counts.
    """

    type: int
    layout: int
    rows: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_height: int
    kernel_width: int
    stride_height: int
    stride_width: int
    pad_top: int
    pad_bottom: int
    pad_left: int
    pad_right: int
    option: int


@dataclass(frozen=True, slots=True)
class LrnArguments(ImageArguments):
    """Integer arguments of a launch of local response normalization."""

    size: int


@dataclass(frozen=True, slots=True)
class UpsampleArguments(Struct):
    """Integer arguments of a launch of nearest-neighbour upsampling by whole factors.

    Attributes:
        height: Height of the small image.
    """

    type: int
    layout: int
    rows: int
    channels: int
    height: int
    width: int
    factor_height: int
    factor_width: int


@dataclass(frozen=True, slots=True)
class ResizeArguments(Struct):
    """Integer arguments of a launch that resizes images.

    Attributes:
        height: Height of the input.
    """

    type: int
    layout: int
    rows: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    bilinear: int


def _pool(at: Slice) -> PoolArguments:
    assert isinstance(at.request.attributes, Pool)
    return pool_arguments(at, at.request.attributes)


def pool_arguments(at: Slice, a: Pool, of: TensorType | None = None) -> PoolArguments:
    """Return the integers of a request that pools, alone or in a group.

    `of` is an image of the pool's rows, channels and type, for groups whose first output is not such an image.
    """
    request = at.request
    y = of or request.outputs[0]  # in the backward pass, the data gradient
    option = a.count_pad if isinstance(a, AveragePool) else isinstance(a, MaxPool) and len(request.outputs) == 2
    (height, width), (out_height, out_width) = a.size, a.output_size
    return PoolArguments(
        type=type_code(y),
        layout=layout_code(at.layout),
        rows=y.shape[0],
        channels=y.shape[1],
        height=height,
        width=width,
        out_height=out_height,
        out_width=out_width,
        kernel_height=a.kernel[0],
        kernel_width=a.kernel[1],
        stride_height=a.stride[0],
        stride_width=a.stride[1],
        pad_top=a.pad[0],
        pad_bottom=a.pad[1],
        pad_left=a.pad[2],
        pad_right=a.pad[3],
        option=int(option),
    )


def _lrn(at: Slice) -> LrnArguments:
    x, a = at.request.inputs[0], at.request.attributes
    assert isinstance(a, Lrn)
    c = Channels.of(x)
    return LrnArguments(type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner, a.size)


def _lrn_reals(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Lrn)
    return a.alpha, a.beta, a.k


def _upsample(at: Slice) -> UpsampleArguments:
    request, a = at.request, at.request.attributes
    assert isinstance(a, Upsample)
    small = min(request.inputs[0], request.outputs[0], key=lambda t: t.elements)
    rows, channels, height, width = small.shape
    return UpsampleArguments(type_code(small), layout_code(at.layout), rows, channels, height, width, *a.factor)


def _resize(at: Slice) -> ResizeArguments:
    x, a = at.request.inputs[0], at.request.attributes
    assert isinstance(a, Resize)
    rows, channels = x.shape[:2]
    return ResizeArguments(
        type_code(x), layout_code(at.layout), rows, channels, *a.size, *a.output_size, int(a.bilinear)
    )


KERNELS = (
    OwnKernel("max_pool", "pool/max_pool.cu", PoolArguments, _pool, version=3),
    OwnKernel("max_pool_backward", "pool/max_pool_backward.cu", PoolArguments, _pool, version=3),
    OwnKernel("avg_pool", "pool/avg_pool.cu", PoolArguments, _pool),
    OwnKernel("avg_pool_backward", "pool/avg_pool.cu", PoolArguments, _pool),
    OwnKernel("lrn", "pool/lrn.cu", LrnArguments, _lrn, _lrn_reals),
    OwnKernel("lrn_backward", "pool/lrn.cu", LrnArguments, _lrn, _lrn_reals),
    OwnKernel("upsample", "pool/upsample.cu", UpsampleArguments, _upsample),
    OwnKernel("upsample_backward", "pool/upsample.cu", UpsampleArguments, _upsample),
    OwnKernel("resize", "pool/resize.cu", ResizeArguments, _resize),
    OwnKernel("resize_backward", "pool/resize.cu", ResizeArguments, _resize),
)

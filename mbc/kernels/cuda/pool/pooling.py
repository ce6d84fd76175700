"""Pooling, local response normalization and upsampling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mbc.ir.types import TensorType
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Channels, OwnKernel, Slice, axis_fields, in_plane, layout_code, planar, type_code
from mbc.kernels.cuda.image import ImageArguments, TensorArguments
from mbc.ops.fused import Fused
from mbc.ops.pooling import AveragePool, MaxPool, Pool
from mbc.ops.resize import Resize
from mbc.ops.response import Lrn
from mbc.ops.shape import Upsample

PADS = ("pad_front", "pad_back", "pad_top", "pad_bottom", "pad_left", "pad_right")


@dataclass(frozen=True, slots=True)
class PooledArguments(TensorArguments):
    """The first integer arguments of launches that read the input of a pool and write its output, or the reverse.

    Attributes:
        depth: Depth of the input; 1 for images.
    """

    depth: int
    height: int
    width: int
    out_depth: int
    out_height: int
    out_width: int


@dataclass(frozen=True, slots=True)
class PoolArguments(PooledArguments):
    """Integer arguments of a launch of pooling, forward or backward.

    Attributes:
        any: Whether there are three spatial axes or dilated windows. Otherwise the depth is 1.
        option: Max pooling: whether an index is written; average pooling: whether padding counts.
    """

    kernel_depth: int
    kernel_height: int
    kernel_width: int
    stride_depth: int
    stride_height: int
    stride_width: int
    dilation_depth: int
    dilation_height: int
    dilation_width: int
    pad_front: int
    pad_back: int
    pad_top: int
    pad_bottom: int
    pad_left: int
    pad_right: int
    any: int
    option: int


@dataclass(frozen=True, slots=True)
class LrnArguments(ImageArguments):
    """Integer arguments of a launch of local response normalization."""

    size: int


@dataclass(frozen=True, slots=True)
class UpsampleArguments(TensorArguments):
    """Integer arguments of a launch of nearest-neighbour upsampling by whole factors.

    Attributes:
        height: Height of the small image.
    """

    height: int
    width: int
    factor_height: int
    factor_width: int


@dataclass(frozen=True, slots=True)
class ResizeArguments(TensorArguments):
    """Integer arguments of a launch that resizes images.

    Attributes:
        height: Height of the input.
        pixels: Neighbouring pixels that a position reads along an axis: 1 (nearest), 2 (linear) or 4 (cubic).
        step_height: Position o of the output is row (step * o + offset) / unit of the input.
    """

    height: int
    width: int
    out_height: int
    out_width: int
    pixels: int
    step_height: int
    offset_height: int
    unit_height: int
    step_width: int
    offset_width: int
    unit_width: int


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
    axes = {"": a.size, "out_": a.output_size, "kernel_": a.kernel, "stride_": a.stride, "dilation_": a.spacing}
    pads = zip(PADS, (*(0,) * (len(PADS) - len(a.pad)), *a.pad), strict=True)
    codes = (type_code(y), layout_code(at.layout), *y.shape[:2])
    return PoolArguments(*codes, **axis_fields(axes), **dict(pads), any=int(not _is_plain(a)), option=int(option))


def _is_plain(a: Pool) -> bool:
    """Return whether a pool has windows that are not dilated, along one or two axes."""
    return a.rank < 3 and set(a.spacing) == {1}


def takes_pool(request: Request) -> bool:
    """Return whether all pools of a group have windows that are not dilated, along one or two axes."""
    a = request.attributes
    assert isinstance(a, Fused)
    return all(_is_plain(m.attributes) for m in a.members if isinstance(m.attributes, Pool))


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
    rows, channels, *size = small.shape
    planes = *in_plane(tuple(size), 1), *in_plane(a.factor, 1)
    return UpsampleArguments(type_code(small), layout_code(at.layout), rows, channels, *planes)


def _resize(at: Slice) -> ResizeArguments:
    x, a = at.request.inputs[0], at.request.attributes
    assert isinstance(a, Resize)
    if len(a.size) == 1:
        one = (1, 1) if a.scale else ()
        a = replace(a, size=(1, *a.size), output_size=(1, *a.output_size), scale=(*one, *a.scale))
    rows, channels, *_ = x.shape
    planes = (*a.size, *a.output_size, a.pixels, *a.positions(0), *a.positions(1))
    return ResizeArguments(type_code(x), layout_code(at.layout), rows, channels, *planes)


KERNELS = (
    OwnKernel("max_pool", "pool/max_pool.cu", PoolArguments, _pool, operands="x y index?option", version=3),
    OwnKernel("max_pool_backward", "pool/max_pool_backward.cu", PoolArguments, _pool, version=3),
    OwnKernel("avg_pool", "pool/avg_pool.cu", PoolArguments, _pool),
    OwnKernel("avg_pool_backward", "pool/avg_pool.cu", PoolArguments, _pool),
    OwnKernel("lrn", "pool/lrn.cu", LrnArguments, _lrn, _lrn_reals),
    OwnKernel("lrn_backward", "pool/lrn.cu", LrnArguments, _lrn, _lrn_reals),
    OwnKernel("upsample", "pool/upsample.cu", UpsampleArguments, _upsample, takes=planar),
    OwnKernel("upsample_backward", "pool/upsample.cu", UpsampleArguments, _upsample, takes=planar),
    OwnKernel("resize", "pool/resize.cu", ResizeArguments, _resize, takes=planar),
    OwnKernel("resize_backward", "pool/resize.cu", ResizeArguments, _resize, takes=planar),
)

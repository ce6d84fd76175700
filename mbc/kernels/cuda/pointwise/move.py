"""Data movement: changes of layout and type, concatenation and slices of channels; also dropout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from mbc.ir.types import Layout
from mbc.kernels.base import Request
from mbc.kernels.cuda.base import Channels, Layouts, OwnKernel, Slice, layout_code, type_code
from mbc.kernels.cuda.image import ImageArguments
from mbc.kernels.launch_struct import Struct
from mbc.ops.random import Dropout
from mbc.ops.shape import ChannelSlice


@dataclass(frozen=True, slots=True)
class ConvertArguments(Struct):
    """Integer arguments of the only launch whose operands may have different layouts, which the provider passes."""

    from_type: int
    to_type: int
    from_layout: int
    to_layout: int
    rows: int
    channels: int
    inner: int


@dataclass(frozen=True, slots=True)
class ConcatArguments(Struct):
    """Integer arguments of a launch that concatenates channels.

    The channels of every input follow, `inputs` integers.
    """

    type: int
    layout: int
    rows: int
    inner: int
    inputs: int


@dataclass(frozen=True, slots=True)
class ChannelSliceArguments(ImageArguments):
    """Integer arguments of a launch that copies a slice of channels."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class DropoutArguments(ImageArguments):
    """Integer arguments of a launch of dropout.

    Attributes:
        threshold: An element is kept if its word is less.
    """

    first_row: int
    threshold: int
    key: int


def conversion(request: Request, layouts: Layouts) -> ConvertArguments:
    """Return the integers of a conversion of input 0 in `layouts[0]` to output 0 in `layouts[1]`."""
    source, result = request.inputs[0], request.outputs[0]
    c = Channels.of(source)
    before, after = (layout_code(layout) for layout in layouts)
    return ConvertArguments(type_code(source), type_code(result), before, after, c.rows, c.channels, c.inner)


def _convert(at: Slice) -> ConvertArguments:
    return conversion(at.request, (at.layout, at.layout))


def _any_layouts(request: Request) -> Iterable[Layouts]:
    """Yield every pair of layouts: one launch may change type and layout."""
    if not request.inputs[0].ordered:
        yield Layout.CHANNELS_FIRST, Layout.CHANNELS_FIRST
        return
    yield from itertools.product(Layout, repeat=2)


def _concat(at: Slice) -> ConcatArguments:
    y = at.request.outputs[0]
    c = Channels.of(y)
    return ConcatArguments(type_code(y), layout_code(at.layout), c.rows, c.inner, len(at.request.inputs))


def _channels_of_inputs(at: Slice) -> tuple[int, ...]:
    return tuple(x.shape[1] for x in at.request.inputs)


def _channel_slice(at: Slice) -> ChannelSliceArguments:
    x, a = at.request.inputs[0], at.request.attributes
    assert isinstance(a, ChannelSlice)
    c = Channels.of(x)
    return ChannelSliceArguments(type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner, a.start, a.count)


def _dropout(at: Slice) -> DropoutArguments:
    x, a = at.request.inputs[0], at.request.attributes
    assert isinstance(a, Dropout)
    c = Channels.of(x)
    return DropoutArguments(
        type_code(x), layout_code(at.layout), c.rows, c.channels, c.inner, at.first_row, a.threshold, a.key
    )


def _kept(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Dropout)
    return (1 / (1 - a.probability),)


KERNELS = (
    OwnKernel("convert", "pointwise/convert.cu", ConvertArguments, _convert, layouts=_any_layouts),
    OwnKernel("cast", "pointwise/convert.cu", ConvertArguments, _convert, layouts=_any_layouts, version=2),
    OwnKernel(
        "concat",
        "fused/concat.cu",
        ConcatArguments,
        _concat,
        trailing=_channels_of_inputs,
        operands="parts[inputs] y",
        version=2,
    ),
    OwnKernel("channel_slice", "fused/concat.cu", ChannelSliceArguments, _channel_slice),
    # The gradient is multiplied by the mask of the forward pass.
    *(
        OwnKernel(
            f"{kind}{direction}",
            "pointwise/dropout.cu",
            DropoutArguments,
            _dropout,
            _kept,
            launcher=kind,
            named=f"{kind}{direction}",
        )
        for kind in ("dropout", "drop_path", "channel_dropout")
        for direction in ("", "_backward")
    ),
)

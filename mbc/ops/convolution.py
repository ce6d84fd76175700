"""Convolutions: the three passes, and transposed convolution.

They are cross-correlations as in cuDNN and PyTorch, along one, two or three spatial axes. The filter is
[K, C / groups, ...], with K outputs and C channels of the image side. A transposed convolution is
`convolution_backward_data` as a forward operation, with the filter [C_in, C_out / groups, ...].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbc.ir.graph import Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Expansion, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError, master
from mbc.ops.bias import add_bias
from mbc.ops.im2col import correlate, correlate_filter, spread
from mbc.ops.initial import INITIALIZERS, initializer
from mbc.ops.rearrange import Rearrange
from mbc.ops.rounding import operand
from mbc.ops.standardize import standardized
from mbc.ops.window import Axes, Window, by, by_axis, by_side, positive, spatial


@dataclass(frozen=True, slots=True)
class Convolution(Window):
    """Settings of a convolution. `size` is that of the image side (the forward pass's input) in all three passes.

    Attributes:
        dilation: Distance of neighbouring positions of a window; if empty, 1 along every axis.
        groups: Groups of channels, each of which has filters of its own.
    """

    dilation: Axes = ()
    groups: int = 1

    def __post_init__(self) -> None:
        """Fill in what is empty, for the number of axes that `size` has."""
        Window.__post_init__(self)
        self._fill("dilation", (1,) * len(self.size))

    @property
    def spacing(self) -> Axes:
        """Distance of neighbouring positions of a window."""
        return self.dilation


def _check(a: Convolution) -> None:
    a.check()
    positive("groups", (a.groups,))


def _filter(a: Convolution, w: TensorType) -> tuple[int, int]:
    """Return (K, C) of a filter.

    Raises:
        ShapeError: The filter does not fit the attributes.
    """
    if w.shape[2:] != a.kernel or w.shape[0] % a.groups:
        raise ShapeError(f"filter {w} does not fit a kernel of {by(a.kernel)} in {a.groups} group(s)")
    return w.shape[0], w.shape[1] * a.groups


def _forward_shape(a: Convolution, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, w = inputs
    _check(a)
    rows, channels, size = spatial(x, "a convolution")
    outputs, filter_channels = _filter(a, w)
    if channels != filter_channels:
        raise ShapeError(f"input {x} has {channels} channels, but filter {w} reads {filter_channels}")
    if size != a.size:
        raise ShapeError(f"input {x} is not of the size {a.size} that the convolution is for")
    return (TensorType((rows, outputs, *a.output_size), x.dtype),)


def _backward_data_shape(a: Convolution, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    dy, w = inputs
    _check(a)
    rows, outputs, size = spatial(dy, "a transposed convolution")
    filter_outputs, channels = _filter(a, w)
    if outputs != filter_outputs or size != a.output_size:
        raise ShapeError(f"input {dy} does not fit filter {w} and an image of size {a.size}")
    return (TensorType((rows, channels, *a.size), dy.dtype),)


def _backward_filter_shape(a: Convolution, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x, dy = inputs
    _check(a)
    channels = spatial(x, "a convolution")[1]
    if x.shape[0] != dy.shape[0] or x.shape[2:] != a.size or dy.shape[2:] != a.output_size:
        raise ShapeError(f"image {x} and gradient {dy} do not belong to one convolution of size {a.size}")
    return (TensorType((dy.shape[1], channels // a.groups, *a.kernel), master(x.dtype)),)


def _forward(a: Convolution, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, w = (operand(v, call.precision) for v in inputs)
    return (correlate(a, x, w, a.groups),)


def _backward_data(a: Convolution, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    dy, w = (operand(v, call.precision) for v in inputs)
    return (spread(a, dy, w, a.groups),)


def _backward_filter(a: Convolution, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, dy = (operand(v, call.precision) for v in inputs)
    return (correlate_filter(a, x, dy, a.groups),)


def _forward_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, w = op.inputs
    # The filter's gradient comes first: then x may be freed while the image's gradient is computed.
    dw = g.emit("convolution_backward_filter", op.attributes, (x, dy), w)[0] if g.needs(w) else None
    dx = g.emit("convolution_backward_data", op.attributes, (dy, w), x)[0] if g.needs(x) else None
    return dx, dw


def _transposed_gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    x, w = op.inputs
    dw = g.emit("convolution_backward_filter", op.attributes, (dy, x), w)[0] if g.needs(w) else None
    dx = g.emit("convolution", op.attributes, (dy, w), x)[0] if g.needs(x) else None
    return dx, dw


# Windows of at least so many positions that do not overlap are multiplied as one matrix: with such large strides,
# kernels of convolutions take many times as long as the product.
_PATCH_POSITIONS = 16


def _cuts_patches(a: Convolution) -> bool:
    """Return whether the windows are large and adjacent, and cover the image."""
    whole = all(size % k == 0 for size, k in zip(a.size, a.kernel, strict=True))
    adjacent = a.kernel == a.stride and set(a.dilation) == {1} and not any(a.pad)
    return whole and adjacent and a.groups == 1 and math.prod(a.kernel) >= _PATCH_POSITIONS


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    """Return the outputs of the convolution; patches become a pointwise convolution.

    The pointwise convolution reads an image that has a pixel for every patch. The pixels of a patch become channels, in
    the order of a channels-last layout, so that whole lines are moved.
    """
    a = op.attributes
    assert isinstance(a, Convolution)
    x, w = op.inputs
    if not _cuts_patches(a):
        return e.emit(op.kind, a, op.inputs, op.outputs, op.name)
    channels, axes = e.type(x).shape[1], range(len(a.kernel))
    # Each axis becomes its windows and the positions in a window; the positions move behind the channels.
    windows, positions = tuple(1 + 2 * axis for axis in axes), tuple(2 + 2 * axis for axis in axes)
    ones = (1,) * len(axes)
    cut = Rearrange(
        ((channels,), *zip(a.output_size, a.kernel, strict=True)), (*positions, 0, *windows), (len(axes) + 1, *ones)
    )
    flat = Rearrange(
        ((channels,), *((k,) for k in a.kernel)), (*(1 + axis for axis in axes), 0), (len(axes) + 1, *(0 for _ in axes))
    )
    patches = e.emit("rearrange", cut, (x,), (f"{op.name}.patches",), f"{op.name}.patches")
    # The filters have the type of the state, so that the gradient has that type, too.
    filters = e.emit("rearrange", flat, (w,), (f"{op.name}.filters",), f"{op.name}.filters")
    return e.emit(op.kind, Convolution(a.output_size, ones), (*patches, *filters), op.outputs, op.name)


def read_share(a: Convolution) -> float:
    """Return the share of the image that is read: a stride above the kernel's size skips pixels."""
    return math.prod(min(1.0, k / s) for k, s in zip(a.kernel, a.stride, strict=True))


def _flops(filter_: TensorType, result: TensorType) -> int:
    """Return the multiplications and additions of any of the three passes."""
    return 2 * result.elements * math.prod(filter_.shape[1:])


OPS = (
    OpKind(
        "convolution",
        Convolution,
        _forward_shape,
        _forward,
        _forward_gradient,
        _expand,
        divisible=True,
        working_inputs=(1,),
        flops=lambda a, inputs, outputs: _flops(inputs[1], outputs[0]),
        reads=lambda a, _: (read_share(a), 1.0),
    ),
    OpKind(
        "convolution_backward_data",
        Convolution,
        _backward_data_shape,
        _backward_data,
        _transposed_gradient,
        divisible=True,
        working_inputs=(1,),
        flops=lambda a, inputs, outputs: _flops(inputs[1], inputs[0]),
    ),
    OpKind(
        "convolution_backward_filter",
        Convolution,
        _backward_filter_shape,
        _backward_filter,
        divisible=True,
        accumulates=True,
        reduces=True,
        flops=lambda a, inputs, outputs: _flops(outputs[0], inputs[1]),
        reads=lambda a, _: (read_share(a), 1.0),
    ),
)


def _channels(outputs: int, channels: int, groups: int) -> None:
    """Check that groups divide the channels.

    Raises:
        ShapeError: They do not, or a number is less than 1.
    """
    positive("channels", (outputs,))
    if channels % groups or outputs % groups:
        raise ShapeError(f"groups is {groups}, which must divide both {channels} input and {outputs} output channels")


def _build_conv(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    (x,) = inputs
    _, channels, size = spatial(builder.type(x), "conv")
    outputs, groups, rank = settings["channels"], settings["groups"], len(size)
    kernel, stride, dilation = (by_axis(settings[name], rank) for name in ("kernel", "stride", "dilation"))
    a = Convolution(size, kernel, stride, by_side(settings["pad"], rank), dilation, groups)
    _check(a)
    _channels(outputs, channels, groups)
    window = math.prod(kernel)
    init = initializer(settings["init"], channels // groups * window, outputs // groups * window)
    w = builder.state("weight", (outputs, channels // groups, *kernel), init)
    w = standardized(builder, w, settings["standardize"], settings["gain"])
    (y,) = builder.emit("convolution", a, (x, w))
    return add_bias(builder, y, outputs) if settings["bias"] else y


def _build_transposed(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    (x,) = inputs
    _, channels, counts = spatial(builder.type(x), "conv_transpose")
    outputs, groups, rank = settings["channels"], settings["groups"], len(counts)
    kernel, stride, dilation = (by_axis(settings[name], rank) for name in ("kernel", "stride", "dilation"))
    pad, extra = by_side(settings["pad"], rank), by_axis(settings["output_pad"], rank)
    window = Convolution(counts, kernel, stride, pad, dilation, groups)
    _check(window)
    positive("output_pad", extra, 0)
    _channels(outputs, channels, groups)
    if any(more >= step for more, step in zip(extra, stride, strict=True)):
        raise ShapeError(f"output_pad {extra} must be smaller than stride {stride}")
    size = tuple(
        (count - 1) * step + span + more - before - after
        for count, step, span, more, before, after in zip(
            counts, stride, window.span, extra, window.before, window.after, strict=True
        )
    )
    positive("the size of the output", size)
    # Every output pixel receives one in prod(stride) positions of the window.
    fan_in = max(1, channels // groups * math.prod(kernel) // math.prod(stride))
    init = initializer(settings["init"], fan_in, outputs // groups * math.prod(kernel))
    w = builder.state("weight", (channels, outputs // groups, *kernel), init)
    (y,) = builder.emit("convolution_backward_data", replace(window, size=size), (x, w))
    return add_bias(builder, y, outputs) if settings["bias"] else y


LAYERS = (
    Layer(
        "conv",
        (
            Parameter("channels", "int"),
            Parameter("kernel", "spatial"),
            Parameter("stride", "spatial", 1),
            Parameter("pad", "sides", 0),
            Parameter("dilation", "spatial", 1),
            Parameter("groups", "int", 1),
            Parameter("bias", "bool", False),
            Parameter("init", "word", "he", INITIALIZERS),
            Parameter("standardize", "float", 0.0),
            Parameter("gain", "float", 0.0),
        ),
        _build_conv,
        help="Convolution along the one to three spatial axes of its input. groups = input channels makes it "
        "depthwise. standardize = eps above 0: weight standardization, (filter - mean) / sqrt(variance + eps) for each "
        "filter. gain = g above 0: multiplied by g / sqrt(elements of a filter) and by a trained number for each "
        "filter.",
    ),
    Layer(
        "conv_transpose",
        (
            Parameter("channels", "int"),
            Parameter("kernel", "spatial"),
            Parameter("stride", "spatial", 1),
            Parameter("pad", "sides", 0),
            Parameter("output_pad", "spatial", 0),
            Parameter("dilation", "spatial", 1),
            Parameter("groups", "int", 1),
            Parameter("bias", "bool", False),
            Parameter("init", "word", "he", INITIALIZERS),
        ),
        _build_transposed,
        help="Transposed convolution: each size becomes (size - 1) * stride - pads + kernel + output_pad.",
    ),
)

"""Layers of the language that change shapes: reshape, permute, slice, split, stack, padding, shuffles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from mbc.ir.types import TensorType
from mbc.ops.base import Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.rearrange import PAD_MODES, WRAP, Pad, Rearrange, Split, StridedSlice, channels
from mbc.ops.shape import Unflatten
from mbc.ops.window import Axes, by_axis, by_pair, by_side, positive, spatial

TO_THE_END = 2**31 - 1
_MODES: Mapping[str, str] = {"circular": WRAP}  # modes of `padding` that operations call otherwise
OPS: tuple[OpKind, ...] = ()


def axis_of(x: TensorType, axis: int, what: str, more: int = 0) -> int:
    """Return an axis counted from the first.

    Args:
        x: Type of the tensor.
        axis: The axis; negative: counted from the last.
        what: Operation that the message names.
        more: Number of axes that the result has beyond those of x.

    Raises:
        ShapeError: The axis does not exist, or is axis 0, that of the rows.
    """
    rank = len(x.shape) + more
    positive = axis + rank if axis < 0 else axis
    if not 1 <= positive < rank:
        raise ShapeError(f"axis of {what} is {axis}, but must be from 1 to {rank - 1} for {x}, or -1 for the last")
    return positive


def permuted(x: TensorType, order: tuple[int, ...]) -> Rearrange:
    """Return a permutation of whole axes; `order` are all axes of x, with the rows first.

    Raises:
        ShapeError: `order` is no such permutation.
    """
    if len(order) != len(x.shape) or sorted(order) != list(range(len(order))) or order[0] != 0:
        raise ShapeError(
            f"{order} is not an order of the axes 0 to {len(x.shape) - 1} of {x} that leaves axis 0, the samples, first"
        )
    return Rearrange(tuple((n,) for n in x.shape[1:]), tuple(axis - 1 for axis in order[1:]), (1,) * (len(order) - 1))


def _to_channels(builder: LayerBuilder, x: str, axis: int, suffix: str) -> str:
    """Return a tensor with axis 1 and another axis exchanged."""
    order = list(range(len(builder.type(x).shape)))
    order[1], order[axis] = axis, 1
    return builder.emit("rearrange", permuted(builder.type(x), tuple(order)), (x,), suffix)[0]


def _build_permute(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("rearrange", permuted(builder.type(inputs[0]), settings["axes"]), inputs)[0]


def _build_reshape(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, sizes = builder.type(inputs[0]), settings["sizes"]
    elements, product = math.prod(x.shape[1:]), math.prod(n for n in sizes if n != -1)
    if sizes.count(-1) == 1 and product > 0 and elements % product == 0:
        sizes = tuple(elements // product if n == -1 else n for n in sizes)
    if min(sizes) < 1 or math.prod(sizes) != elements:
        raise ShapeError(
            f"a sample of {x} has {elements} elements, which do not fill {sizes}; -1 can stand for one size"
        )
    return builder.emit("unflatten", Unflatten(sizes), inputs)[0]


def _build_slice(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    axis, step = axis_of(x, settings["axis"], "slice"), settings["step"]
    positive("step", (step,))
    size = x.shape[axis]
    start, stop = (max(0, v + size) if v < 0 else min(v, size) for v in (settings["start"], settings["stop"]))
    if start >= stop:
        raise ShapeError(f"from {settings['start']} to {settings['stop']} there are none of the {size} elements of {x}")
    count = -(-(stop - start) // step)
    return builder.emit("strided_slice", channels(x.shape[1:], start, count, axis - 1, step), inputs)[0]


def parts(builder: LayerBuilder, x: str, sizes: tuple[int, ...], axis: int) -> tuple[str, ...]:
    """Return the parts of these sizes along an axis."""
    if axis == 1:
        return builder.emit("split", Split(sizes), (x,))
    shape = builder.type(x).shape
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        builder.emit("strided_slice", channels(shape[1:], start, size, axis - 1), (x,), f"part{number}")[0]
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def _build_split(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> tuple[str, ...]:
    x, sizes = builder.type(inputs[0]), settings["sizes"]
    axis = axis_of(x, settings["axis"], "split")
    positive("sizes", sizes)
    if len(sizes) == 1:  # the size of each part except the last
        whole, rest = divmod(x.shape[axis], sizes[0])
        sizes = (*sizes * whole, *(rest,) * (rest > 0))
    if sum(sizes) != x.shape[axis]:
        raise ShapeError(
            f"parts of {', '.join(map(str, sizes))} are {sum(sizes)}, but axis {axis} of {x} has {x.shape[axis]}"
        )
    return parts(builder, inputs[0], sizes, axis)


def _build_chunk(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> tuple[str, ...]:
    x, count = builder.type(inputs[0]), settings["count"]
    axis = axis_of(x, settings["axis"], "chunk")
    if count < 1 or x.shape[axis] % count:
        raise ShapeError(f"count is {count}, which must divide the {x.shape[axis]} elements along axis {axis} of {x}")
    return parts(builder, inputs[0], (x.shape[axis] // count,) * count, axis)


def _build_concat(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    axis = axis_of(builder.type(inputs[0]), settings["axis"], "concat")
    if axis == 1:
        return builder.emit("concat", NoAttributes(), inputs)[0]
    if any(len(builder.type(x).shape) != len(builder.type(inputs[0]).shape) for x in inputs):
        raise ShapeError(f"{' and '.join(str(builder.type(x)) for x in inputs)} do not have equally many axes")
    moved = tuple(_to_channels(builder, x, axis, f"part{number}") for number, x in enumerate(inputs))
    return _to_channels(builder, builder.emit("concat", NoAttributes(), moved, "joined")[0], axis, "")


def _build_stack(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    if any(builder.type(other) != x for other in inputs):
        raise ShapeError(f"{' and '.join(str(builder.type(v)) for v in inputs)} do not have one shape")
    axis = axis_of(x, settings["axis"], "stack", more=1)
    parts = tuple(
        builder.emit("unflatten", Unflatten((1, *x.shape[1:])), (value,), f"part{number}")[0]
        for number, value in enumerate(inputs)
    )
    if axis == 1:
        return builder.emit("concat", NoAttributes(), parts)[0]
    joined = builder.emit("concat", NoAttributes(), parts, "joined")[0]
    return builder.emit("rearrange", permuted(builder.type(joined), _first_to(len(x.shape) + 1, axis)), (joined,))[0]


def _first_to(rank: int, axis: int) -> tuple[int, ...]:
    """Return the order of axes that moves axis 1 to `axis`."""
    order = [0, *range(2, rank)]
    order.insert(axis, 1)
    return tuple(order)


def _build_padding(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, mode, outside = builder.type(inputs[0]), settings["mode"], settings["value"]
    _, deep, pixels = spatial(x, "padding")
    pad, size = by_side(settings["pad"], len(pixels)), (deep, *pixels)
    before, after = (0, *pad[::2]), (0, *pad[1::2])
    if mode != "zero":
        positive("pad", pad, 0)
        if outside:
            raise ShapeError(f"value is for mode=zero, not for mode={mode}: leave it out")
        return builder.emit("pad", Pad(_MODES.get(mode, mode), size, before, after), inputs)[0]
    count = tuple(map(sum, zip(before, size, after, strict=True)))
    if min(count) < 1:
        raise ShapeError(f"padding by {pad} leaves nothing of {x}")
    start, ones = tuple(-n for n in before), (1,) * len(size)
    number = {"infinite": int(math.copysign(1, outside))} if math.isinf(outside) else {"value": outside}
    return builder.emit("strided_slice", StridedSlice(size, start, ones, ones, count, **number), inputs)[0]


def _build_channel_shuffle(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x, groups = builder.type(inputs[0]), settings["groups"]
    if len(x.shape) < 2 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"groups is {groups}, which must divide the channels of {x}")
    others = x.shape[2:]
    factors = ((groups, x.shape[1] // groups), *((n,) for n in others))
    order = (1, 0, *range(2, 2 + len(others)))
    return builder.emit("rearrange", Rearrange(factors, order, (2, *(1,) * len(others))), inputs)[0]


def _build_pixel_shuffle(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    _, deep, size = spatial(x, "pixel_shuffle")
    factor = by_axis(settings["factor"], len(size))
    positive("factor", factor)
    if deep % math.prod(factor):
        raise ShapeError(f"factor is {factor}, whose product must divide the {deep} channels of {x}")
    return builder.emit("rearrange", _shuffle(deep // math.prod(factor), factor, size), inputs)[0]


def _build_pixel_unshuffle(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    deep, block, count = _blocks(builder.type(inputs[0]), settings["factor"], "factor", "pixel_unshuffle")
    return builder.emit("rearrange", _shuffle(deep, block, count).inverse, inputs)[0]


def _blocks(x: TensorType, given: Any, setting: str, layer: str, rank: int = 0) -> tuple[int, Axes, Axes]:
    """Return the channels of images, the blocks of pixels that a setting gives, and the number of blocks.

    Raises:
        ShapeError: The block does not divide the image.
    """
    _, deep, size = spatial(x, layer, rank)
    block = by_axis(given, len(size))
    positive(setting, block)
    if any(n % side for n, side in zip(size, block, strict=True)):
        raise ShapeError(f"{setting} is {block}, which must divide {size}, the size of {x}")
    return deep, block, tuple(n // side for n, side in zip(size, block, strict=True))


def _shuffle(deep: int, factor: Axes, size: Axes) -> Rearrange:
    """Return the permutation that makes each pixel's channels the pixels of a block."""
    rank = len(size)
    order = (0, *itertools.chain(*zip(range(1 + rank, 1 + 2 * rank), range(1, 1 + rank), strict=True)))
    return Rearrange(((deep, *factor), *((n,) for n in size)), order, (1, *(2,) * rank))


def _windows(deep: int, window: Axes, count: Axes) -> Rearrange:
    return Rearrange(((deep,), *zip(count, window, strict=True)), (0, 1, 3, 2, 4), (1, 2, 2))


def _build_windows(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    blocks = _blocks(builder.type(inputs[0]), settings["window"], "window", "windows", rank=2)
    return builder.emit("rearrange", _windows(*blocks), inputs)[0]


def _build_join_windows(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    size, window = (by_pair(settings[name]) for name in ("size", "window"))
    _, deep, counts = spatial(x, "join_windows", 2)
    positive("size", size)
    positive("window", window)
    whole = not (size[0] % window[0] or size[1] % window[1])
    if not whole or counts != (math.prod(size) // math.prod(window), math.prod(window)):
        raise ShapeError(f"{x} does not have the windows of {window} of an image of {size}")
    count = (size[0] // window[0], size[1] // window[1])
    return builder.emit("rearrange", _windows(deep, window, count).inverse, inputs)[0]


def _build_roll(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    x = builder.type(inputs[0])
    _, deep, size = spatial(x, "roll")
    shift = by_axis(settings["shift"], len(size))
    if any(abs(by) >= n for by, n in zip(shift, size, strict=True)):
        raise ShapeError(f"shift is {shift}, but must be less than {size}, the size of {x}")
    return builder.emit("pad", Pad(WRAP, (deep, *size), (0, *shift), (0, *(-by for by in shift))), inputs)[0]


_AXIS = Parameter("axis", "int", 1)
_FACTOR = (Parameter("factor", "spatial"),)
LAYERS = (
    Layer("concat", (_AXIS,), _build_concat, (1, None), "Tensors concatenated along their channels, or along `axis`."),
    Layer("stack", (_AXIS,), _build_stack, (1, None), "Tensors of one shape along a new axis."),
    Layer(
        "split",
        (Parameter("sizes", "sizes"), _AXIS),
        _build_split,
        help="Several tensors: the channels (or `axis`) divided into parts of these sizes, or all of one size.",
    ),
    Layer("chunk", (Parameter("count", "int"), _AXIS), _build_chunk, help="`count` tensors of equal size."),
    Layer(
        "slice",
        (_AXIS, Parameter("start", "int", 0), Parameter("stop", "int", TO_THE_END), Parameter("step", "int", 1)),
        _build_slice,
        help="Elements from `start` to before `stop` along an axis, every `step`-th; negative ones count from the end.",
    ),
    Layer(
        "permute",
        (Parameter("axes", "axes"),),
        _build_permute,
        help="The axes in another order, such as permute((0, 2, 3, 1)); axis 0 stays the first.",
    ),
    Layer(
        "reshape",
        (Parameter("sizes", "sizes"),),
        _build_reshape,
        help="Each sample in another shape, where one size may be -1: [N, 6, 4] |> reshape((3, -1)) is [N, 3, 8].",
    ),
    Layer(
        "padding",
        (
            Parameter("pad", "sides"),
            Parameter("mode", "word", "zero", ("zero", *PAD_MODES, *_MODES)),
            Parameter("value", "real", 0.0),
        ),
        _build_padding,
        help="Images with pixels around them: `value`, the outermost ones, mirrored, or those of the other side. "
        "Negative pads (zero) cut off.",
    ),
    Layer(
        "channel_shuffle",
        (Parameter("groups", "int"),),
        _build_channel_shuffle,
        help="Channel i of group g becomes channel i * groups + g, as ShuffleNet does.",
    ),
    Layer(
        "pixel_shuffle",
        _FACTOR,
        _build_pixel_shuffle,
        help="[N, C r s, H, W] becomes [N, C, H r, W s]: channels are the pixels of a block, of one to three axes.",
    ),
    Layer(
        "windows",
        (Parameter("window", "spatial"),),
        _build_windows,
        help="[N, C, H, W] becomes [N, C, windows, pixels]: windows that do not overlap, row by row, and their pixels.",
    ),
    Layer(
        "join_windows",
        (Parameter("size", "spatial"), Parameter("window", "spatial")),
        _build_join_windows,
        help="The inverse of windows, to images of `size`.",
    ),
    Layer(
        "roll",
        (Parameter("shift", "spatial"),),
        _build_roll,
        help="Images whose pixels move by `shift` along each axis, and enter again on the other side.",
    ),
    Layer("pixel_unshuffle", _FACTOR, _build_pixel_unshuffle, help="The inverse of pixel_shuffle."),
)

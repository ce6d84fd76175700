"""Parts of tensors; tensors that are joined, rolled and padded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mbc.interchange.aten.axes import padded, sized, sliced
from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.factors import axes_of, channels_behind, factored, regarded, selected, windowed
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    PLAIN,
    Activation,
    Factored,
    Known,
    Operand,
    Padded,
    Refused,
    Result,
    Weight,
    as_activation,
    as_setting,
)
from mbc.interchange.aten.shape import in_shape
from mbc.interchange.steps import Setting
from mbc.ops.window import MOST_AXES

_ROWS = "keep the samples of a mini-batch apart, in dimension 0"


def filled(call: Call, operand: Operand, like: Activation) -> Activation:
    """Return a tensor in the shape that the program sees; numbers become a tensor with the samples of `like`.

    Raises:
        Refused: The numbers are not one set for each sample.
    """
    if not isinstance(operand, Known):
        return call.settle(operand)
    shape = operand.array.shape
    if len(shape) != len(like.shape) or shape[0] != like.shape[0]:
        raise Refused(f"it joins numbers of the shape {list(shape)} with {list(like.shape)}", _ROWS)
    held, one = call.held(operand, shape), like
    for axis in range(1, len(shape)):
        one = sliced(call, one, axis, range(1)) if one.shape[axis] > 1 else one
    zeros = call.layer("detach", call.layer("clamp", one, one.shape, {"min": 0.0, "max": 0.0}), one.shape)
    return call.operator("+", zeros, call.tensor(held, held.shape), shape)


def _split(call: Call) -> Result:
    """Return the parts of a tensor along an axis, for `split`, `split_with_sizes` and `chunk`."""
    x, axis = call.along(call.activation("self"), call.integer("dim", 0))
    total = x.shape[axis]
    if call.argument("chunks") is not None:
        sizes = (-(-total // call.integer("chunks", 1)),)
    else:
        sizes = call.ints("split_size") or call.ints("split_sizes")
    if len(sizes) == 1 and sizes[0] < total:
        whole, rest = divmod(total, sizes[0])
        sizes = (*sizes * whole, *(rest,) * (rest > 0))
    if len(sizes) < 2:
        return (x,)
    settings: dict[str, Setting] = {"axis": axis}
    equal = len(set(sizes)) == 1
    settings |= {"count": len(sizes)} if equal else {"sizes": sizes}
    shapes = [sized(x.shape, axis, size) for size in sizes]
    pieces = call.parts("chunk" if equal else "split", x, shapes, settings)
    return tuple(replace(part, view=x.view) for part in pieces)


def _slice(call: Call) -> Result:
    x = call.activation("self")
    dim, rank = call.integer("dim", 0), len(x.seen)
    taken = call.slice_of(x.seen[dim])
    if taken == range(x.seen[dim]):
        return x
    x, axis = call.along(x, dim % rank)
    return sliced(call, x, axis, taken)


def _roll(call: Call) -> Result:
    x = call.image(call.activation("self"))
    x = x if x.view in (PLAIN, CHANNELS_LAST) else call.settle(x)
    shifts, dims = call.ints("shifts"), call.ints("dims")
    axis = {1: 2, 2: 3} if x.view == CHANNELS_LAST else {2: 2, 3: 3}
    if len(x.shape) != 4 or len(shifts) != len(dims) or any(d % 4 not in axis for d in dims):
        return _in_two_parts(call, shifts, dims)
    by = {2: 0, 3: 0}
    if (origin := call.maker(x)) is not None and origin[0].op == "roll":  # one roll along each axis
        before = origin[0].settings["shift"]
        down, across = before if isinstance(before, tuple) else (before, before)
        by = {2: int(down), 3: int(across)}
        x = replace(origin[1], view=x.view)
    for dim, shift in zip(dims, shifts, strict=True):
        size = x.shape[axis[dim % 4]]
        by[axis[dim % 4]] = int(math.fmod(by[axis[dim % 4]] + shift, size))
    if not any(by.values()):
        return x
    return replace(call.layer("roll", x, x.shape, {"shift": as_setting((by[2], by[3]))}), view=x.view)


def _in_two_parts(call: Call, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Result:
    """Return a tensor rolled along one other axis, such as channels: its end joined before its beginning.

    Raises:
        Refused: There are several axes.
    """
    if len(shifts) != 1 or len(dims) != 1:
        raise Refused(
            f"it rolls along dimensions {list(dims)}", "roll height and width of images, or one axis at a time"
        )
    x, axis = call.along(call.activation("self"), dims[0])
    first, size = -shifts[0] % x.shape[axis], x.shape[axis]
    if not first:
        return x
    parts = [sliced(call, x, axis, range(first, size)), sliced(call, x, axis, range(first))]
    return replace(call.layer("concat", parts, x.shape, {"axis": axis}), view=x.view)


def _select(call: Call) -> Result:
    """Return one index along an axis, without the axis."""
    x = call.lazy("self")
    if isinstance(x.view, Factored):
        dim = call.integer("dim", 0) % len(x.view.axes)
        element = selected(x, x.view, dim, call.integer("index", 0) % x.seen[dim])
        if element is not None:
            return element
    x, axis = call.along(x, call.integer("dim", 0))
    index = call.integer("index", 0) % x.shape[axis]
    one = call.settle(sliced(call, x, axis, range(index, index + 1)))
    return in_shape(call, one, call.result_shape)


def _stack(call: Call) -> Result:
    parts = [call.settle(x) for x in call.operands("tensors")]
    axis = call.integer("dim", 0) % (len(parts[0].shape) + 1)
    if axis == 0:
        raise Refused("it joins along a new dimension 0, of samples", _ROWS)
    return call.layer("stack", parts, call.result_shape, {"axis": axis})


def _cat(call: Call) -> Result:
    operands = call.operands("tensors")
    if any(isinstance(x, Weight) for x in operands):
        return _with_token(call, operands)
    if any(isinstance(x, Known) for x in operands):
        like = next(call.settle(x) for x in operands if isinstance(x, Activation))
        operands = tuple(filled(call, x, like) for x in operands)
    parts = [as_activation(x) for x in operands]
    if len(parts) == 1:
        return parts[0]
    view = parts[0].view
    if view not in (PLAIN, CHANNELS_LAST) or any(x.view != view for x in parts):
        parts, view = [call.settle(x) for x in parts], PLAIN
    _, axis = call.along(parts[0], call.integer("dim", 0))
    result = call.layer("concat", parts, sized(parts[0].shape, axis, sum(x.shape[axis] for x in parts)), {"axis": axis})
    return replace(result, view=view)


def _with_token(call: Call, operands: tuple[Operand, ...]) -> Result:
    """Return a sequence with a parameter joined before or after its positions.

    The sequence is padded with zeros, to which the parameter is added.

    Raises:
        Refused: There are several parameters, or the tensor is no sequence.
    """
    first = isinstance(operands[0], Weight)
    weight, x = operands if first else operands[::-1]
    if len(operands) != 2 or not isinstance(weight, Weight) or not isinstance(x, Activation):
        raise Refused("it joins several parameters", "join one parameter and the result of a layer")
    view, seen = factored(x), x.seen
    x = x if view is None else replace(x, view=view)
    if view is None or len(seen) != 3 or call.integer("dim", 0) != 1 or channels_behind(x) is None:
        raise Refused(f"it joins a parameter and {list(seen)}", "join along the positions of [N, T, C]")
    count, channels = weight.shape[1:]
    sequence = windowed(call, x, (), view.axes[1])
    shape = (*sequence.shape[:3], sequence.shape[3] + count)
    pads = (0, 0, count, 0) if first else (0, 0, 0, count)
    token = call.tensor(weight, weight.shape)
    if count > 1:
        token = call.layer("permute", token, (1, channels, count), {"axes": (0, 2, 1)})
    token = call.layer("reshape", token, (1, channels, 1, count), {"sizes": (channels, 1, count)})
    beside = (0, 0, 0, seen[1]) if first else (0, 0, seen[1], 0)
    token = call.layer("padding", token, (1, *shape[1:]), {"pad": beside})
    result = call.operator("+", call.layer("padding", sequence, shape, {"pad": pads}), token, shape)
    batch, channels_of, _, positions = axes_of(result)
    return regarded(result, Factored((batch, positions, channels_of)))


def _pad(call: Call) -> Result:
    """Return a padded tensor.

    Zeros around an image stay a view, which the convolution after it takes into its own padding.
    """
    x = call.image(call.lazy("self") if call.is_tensor("self") else call.lazy("input"))
    pads = call.ints("pad")
    call.ignore("mode", "value")  # they have no effect without padding
    if not any(pads):
        return x
    kind = call.text("mode", "constant")
    mode, number = "zero" if kind == "constant" else kind, call.real("value", 0.0)
    rank = len(x.seen) - 2
    outside = not 1 <= rank <= MOST_AXES or any(pads[2 * rank :])
    if number == -math.inf and mode == "zero" and not outside and min(pads) >= 0 and not x.is_pending:
        return replace(call.settle(x), view=Padded(_by_axis(pads, rank), -math.inf))
    if outside or (min(pads) < 0 and mode != "zero"):
        return padded(call, call.settle(x), pads, kind, number)
    own = _by_axis(pads, rank)
    zeros = x.view is PLAIN or (isinstance(x.view, Padded) and not x.view.value)
    if mode != "zero" or number or min(pads) < 0:
        settings: dict[str, Setting] = {"pad": as_setting(own), "mode": mode, "value": number}
        return call.layer("padding", call.settle(x), call.result_shape, settings)
    x = x if zeros else call.settle(x)
    outer = x.view.pad if isinstance(x.view, Padded) else (0,) * len(own)
    return replace(x, view=Padded(tuple(map(sum, zip(outer, own, strict=True)))))


def _by_axis(pads: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the padding before and after each spatial axis; PyTorch begins with the last axis."""
    given = (*pads, *(0,) * (2 * rank))
    return tuple(given[2 * axis + side] for axis in reversed(range(rank)) for side in range(2))


RULES: Mapping[str, Rule] = {
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.stack.default": _stack,
    "aten.cat.default": _cat,
    "aten.roll.default": _roll,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
}
NOT_TAKEN: Mapping[str, str] = {}

"""Operations along any one axis except the samples: padding, repetition, parts by their start and length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Activation, Known, Refused, Result
from mbc.interchange.steps import Setting

_ROWS = "keep the samples of a mini-batch apart, in dimension 0"


def sized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Return a shape with another size along an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def reshaped(call: Call, x: Activation, shape: tuple[int, ...]) -> Activation:
    """Return a tensor in another shape with its elements in equal order.

    Raises:
        Refused: The new shape has no dimension beside the samples.
    """
    if x.shape == shape:
        return x
    if len(shape) < 2:
        raise Refused(f"it makes {list(shape)} of {list(x.shape)}", "keep a dimension beside the samples")
    return call.layer("reshape", x, shape, {"sizes": shape[1] if len(shape) == 2 else shape[1:]})


def sliced(call: Call, x: Activation, axis: int, taken: range) -> Activation:
    """Return the elements of a tensor at the indices `taken` along an axis of its value.

    Raises:
        Refused: There are no indices.
    """
    if taken == range(x.shape[axis]):
        return x
    if not taken:
        raise Refused("its result is empty", "leave it out")
    settings: dict[str, Setting] = {"axis": axis, "start": taken.start, "step": taken.step}
    if taken.stop < x.shape[axis]:
        settings["stop"] = taken.stop
    return replace(call.layer("slice", x, sized(x.shape, axis, len(taken)), settings), view=x.view)


def _joined(call: Call, parts: Sequence[Activation], axis: int) -> Activation:
    if len(parts) == 1:
        return parts[0]
    size = sum(part.shape[axis] for part in parts)
    return call.layer("concat", parts, sized(parts[0].shape, axis, size), {"axis": axis})


def padded(call: Call, x: Activation, pads: Sequence[int], mode: str, value: float) -> Activation:
    """Return a tensor with elements before and after it along its last axes.

    Args:
        call: The node that is translated; the layers are written through it.
        x: The tensor, in the shape that the program sees.
        pads: How many elements come before and after, for the last axis first; a negative number removes elements.
        mode: `constant`, `reflect`, `replicate` or `circular`.
        value: The number that `constant` pads with.

    Raises:
        Refused: Samples would be padded.
    """
    rank = len(x.shape)
    around = [(rank - 1 - n // 2, pads[n], pads[n + 1]) for n in range(0, len(pads), 2) if any(pads[n : n + 2])]
    if any(axis <= 0 for axis, _, _ in around):
        raise Refused("it pads the samples of a mini-batch", _ROWS)
    wide = {axis for axis, _, _ in around}
    inside = np.ones([size if axis in wide else 1 for axis, size in enumerate(x.shape)], np.float32)
    for axis, before, behind in around:
        x = _pad(call, x, axis, before, behind, mode)
        cut = [(max(before, 0), max(behind, 0)) if n == axis else (0, 0) for n in range(rank)]
        whole = [slice(None)] * rank
        whole[axis] = slice(max(-before, 0), inside.shape[axis] - max(-behind, 0))
        inside = np.pad(inside[tuple(whole)], cut)
    if mode == "constant" and value and not inside.all():
        border = call.held(Known(np.where(inside, 0.0, value)), x.shape)
        x = call.operator("+", x, call.tensor(border, border.shape), x.shape)
    return x


def _pad(call: Call, x: Activation, axis: int, before: int, behind: int, mode: str) -> Activation:
    """Return a tensor padded along one axis, by the padding of the height of images."""
    if mode != "constant":  # elements are removed before the remaining ones are repeated
        x = sliced(call, x, axis, range(max(-before, 0), x.shape[axis] - max(-behind, 0)))
        before, behind = max(before, 0), max(behind, 0)
        if not before and not behind:
            return x
    rows, size = x.shape[0], x.shape[axis]
    ahead, after = math.prod(x.shape[1:axis]), math.prod(x.shape[axis + 1 :])
    settings: dict[str, Setting] = {"pad": (before, behind, 0, 0), "mode": "zero" if mode == "constant" else mode}
    image = reshaped(call, x, (rows, ahead, size, after))
    result = call.layer("padding", image, (rows, ahead, size + before + behind, after), settings)
    return reshaped(call, result, sized(x.shape, axis, size + before + behind))


def _repeat(call: Call) -> Result:
    x, times = call.plain("self"), call.ints("repeats")
    x = reshaped(call, x, (x.shape[0], *(1,) * (len(times) - len(x.shape)), *x.shape[1:]))
    if times[0] != 1 or (len(times) > len(call.plain("self").shape) and x.shape[0] != 1):
        raise Refused("it repeats the samples of a mini-batch", _ROWS)
    for axis, count in enumerate(times):
        if count < 1:
            raise Refused("its result is empty", "repeat the tensor at least once")
        x = _joined(call, [x] * count, axis)
    return x


def _repeat_interleave(call: Call) -> Result:
    x, count = call.plain("self"), call.integer("repeats", 1)
    axis = call.integer("dim", 0) % len(x.shape)
    call.ignore("output_size")  # the result's shape includes it
    if axis == 0 or call.argument("dim") is None:
        raise Refused("it repeats the samples of a mini-batch", _ROWS)
    stacked = (*x.shape[: axis + 1], count, *x.shape[axis + 1 :])
    result = call.layer("stack", [x] * count, stacked, {"axis": axis + 1})
    return reshaped(call, result, call.result_shape)


def _narrow(call: Call) -> Result:
    x = call.activation("self")
    dim = call.integer("dim", 0) % len(x.seen)
    start, length = call.integer("start", 0), call.integer("length", 0)
    start += x.seen[dim] if start < 0 else 0
    if (start, length) == (0, x.seen[dim]):
        return x
    x, axis = call.along(x, dim)
    return sliced(call, x, axis, range(start, start + length))


RULES: Mapping[str, Rule] = {
    "aten.narrow.default": _narrow,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
}
NOT_TAKEN: Mapping[str, str] = {}

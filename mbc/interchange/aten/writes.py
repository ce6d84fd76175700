"""The operations that replace writes in place: copies, and tensors of which a part is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mbc.interchange.aten.axes import reshaped, sized, sliced
from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Activation, Expanded, Known, Operand, Refused, Result, refuse_calculation
from mbc.interchange.aten.parts import filled

_ROWS = "keep the samples of a mini-batch apart, in dimension 0"
_MOST_PLACES = 64  # most indices that a write with a step may replace one by one


def _copy(call: Call) -> Result:
    """Return the tensor that is copied, repeated to the shape of the result.

    Raises:
        Refused: The tensors differ in the number of dimensions.
    """
    call.ignore("self")
    x, shape = call.activation("src"), call.result_shape
    if x.seen == shape:
        return x
    x = call.settle(x)
    if len(x.shape) != len(shape):
        raise Refused(f"it copies {list(x.shape)} into {list(shape)}", "copy a tensor of as many dimensions")
    return replace(x, view=Expanded(shape))


def _slice_scatter(call: Call) -> Result:
    """Return a tensor of which a slice along one dimension is replaced."""
    shape, dim = call.result_shape, call.integer("dim", 0) % len(call.result_shape)
    taken = call.slice_of(shape[dim])
    if taken.step != 1:
        return _steps_replaced(call, dim, taken, call.operand("src"))
    if taken == range(shape[dim]):
        call.ignore("self")
        return call.operand("src")
    return _replaced(call, dim, taken.start, taken.stop, call.operand("src"))


def _select_scatter(call: Call) -> Result:
    """Return a tensor of which one index along a dimension is replaced."""
    shape, dim = call.result_shape, call.integer("dim", 0) % len(call.result_shape)
    index = call.integer("index", 0) % shape[dim]
    one = sized(shape, dim, 1)
    src = call.operand("src")
    if isinstance(src, Known):
        src = replace(src, array=np.broadcast_to(src.array, (*shape[:dim], *shape[dim + 1 :])).reshape(one))
    else:
        src = reshaped(call, call.settle(src), one)
    return _replaced(call, dim, index, index + 1, src)


def _replaced(call: Call, dim: int, start: int, stop: int, src: Operand) -> Result:
    """Return the argument `self` with its slice along a dimension replaced by `src`.

    Raises:
        Refused: Only some samples would be replaced, or the elements of a parameter.
    """
    whole = call.operand("self")
    for operand in (whole, src):
        if isinstance(operand, Known) and operand.weight is not None:
            refuse_calculation(operand.weight)
    if isinstance(whole, Known) and isinstance(src, Known):
        array = np.array(np.broadcast_to(whole.array, call.result_shape))
        array[(slice(None),) * dim + (slice(start, stop),)] = src.array
        return Known(array)
    if dim == 0:
        raise Refused("it writes to some samples of a mini-batch", _ROWS)
    like = call.settle(src if isinstance(whole, Known) else whole)
    whole, src = (filled(call, x, like) for x in (whole, src))
    parts = [
        sliced(call, x, dim, range(first, last))
        for x, first, last in ((whole, 0, start), (src, 0, stop - start), (whole, stop, whole.shape[dim]))
        if first < last
    ]
    return call.layer("concat", parts, whole.shape, {"axis": dim})


def _steps_replaced(call: Call, dim: int, places: range, src: Operand) -> Result:
    """Return the argument `self` with single indices along a dimension replaced by `src`.

    Raises:
        Refused: The indices are samples or too many, or an operand is constant.
    """
    whole = call.operand("self")
    if isinstance(whole, Known) or isinstance(src, Known) or dim == 0 or len(places) > _MOST_PLACES:
        raise Refused("it writes to every other element", "write to slices without a step")
    whole, src = call.settle(whole), call.settle(src)
    parts: list[Activation] = []
    done = 0
    for number, place in enumerate(places):
        parts += [sliced(call, whole, dim, range(done, place))] if done < place else []
        parts.append(sliced(call, src, dim, range(number, number + 1)))
        done = place + 1
    parts += [sliced(call, whole, dim, range(done, whole.shape[dim]))] if done < whole.shape[dim] else []
    return call.layer("concat", parts, whole.shape, {"axis": dim})


RULES: Mapping[str, Rule] = {
    "aten.copy.default": _copy,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
}
NOT_TAKEN: Mapping[str, str] = {}

"""Operations on numbers that do not depend on the input, such as masks and tables by constant index: carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Known, Operand, Refused, Result, Weight
from mbc.interchange.program import Array


def known(call: Call, operand: Operand | float) -> Known | None:
    """A buffer or constant as numbers; None for what is no such thing."""
    if isinstance(operand, Weight) and operand.held.kind != "parameter":
        return Known(call.array(operand).reshape(operand.shape))
    return operand if isinstance(operand, Known) else None


def _table(call: Call) -> Result:
    """Rows of a parameter by a constant index, or elements along another dimension (`table[:, index]`)."""
    weight = call.weight("self")
    places = np.arange(int(np.prod(weight.shape))).reshape(weight.shape)
    return Known(places[tuple(_index(call, one) for one in call.optional_operands("indices"))], weight)


def _index(call: Call, operand: Operand | None) -> Array | slice:
    """Constant numbers, or a whole dimension."""
    if operand is None:
        return slice(None)
    index = known(call, operand)
    if index is None or index.weight is not None or index.array.dtype == np.bool_:
        raise Refused("it takes elements by an index that is computed", "index a parameter by constant numbers")
    return index.array.astype(np.int64)


def _zeros(call: Call) -> Result:
    call.ignore("self")  # its type and device
    return Known(np.zeros(call.shape_said_by("size")))


def _fill(call: Call) -> Result:
    """Return numbers of the shape of a tensor, whatever is in it."""
    call.ignore("self")
    value = _numbers(call, "value").array if call.is_tensor("value") else call.real("value", 0.0)
    return Known(np.broadcast_to(value, call.result_shape))


def _reshape(call: Call) -> Result:
    x = _held(call)
    shape = call.shape_said_by("size", "shape", "dim", "sizes", "start_dim", "end_dim", "other")
    return replace(x, array=x.array.reshape(shape))


def _permute(call: Call) -> Result:
    x = _held(call)
    return replace(x, array=x.array.transpose(call.ints("dims")))


def _slice(call: Call) -> Result:
    x = _held(call)
    return replace(x, array=x.array[_range(call, x.array)])


def _select(call: Call) -> Result:
    x = _held(call)
    return replace(x, array=x.array.take(call.integer("index", 0), call.integer("dim", 0)))


def _range(call: Call, array: Array) -> tuple[slice, ...]:
    """Return the index of a slice along one dimension."""
    dim = call.integer("dim", 0)
    size = array.shape[dim]
    part = slice(call.integer("start", 0), min(call.integer("end", size), size), call.integer("step", 1))
    index = [slice(None)] * array.ndim
    index[dim] = part
    return tuple(index)


def _copy(call: Call) -> Result:
    call.ignore("self")
    return Known(np.broadcast_to(_numbers(call, "src").array, call.result_shape))


def _transpose(call: Call) -> Result:
    x = _held(call)
    return replace(x, array=x.array.swapaxes(call.integer("dim0", 0), call.integer("dim1", 0)))


def _same(call: Call) -> Result:
    return _held(call)


def _binary(of: Callable[[Array, Array | float], Array], call: Call) -> Result:
    x = _numbers(call, "self")
    other = _numbers(call, "other").array if call.is_tensor("other") else call.real("other", 0.0)
    return Known(of(x.array, other))


def _masked_fill(call: Call) -> Result:
    x, mask = _numbers(call, "self"), _numbers(call, "mask")
    return Known(np.where(mask.array, call.real("value", 0.0), x.array))


def _held(call: Call) -> Known:
    found = known(call, call.operand("self"))
    if found is None:
        raise Refused("it takes something that is computed", "use it on numbers alone")
    return found


def _numbers(call: Call, name: str) -> Known:
    found = known(call, call.operand(name))
    if found is None or found.weight is not None:
        raise Refused(f"its '{name}' is computed", "use it on numbers alone")
    return found


# Where the first tensor is known.
OF_KNOWN: Mapping[str, Rule] = {
    **{
        f"aten.{name}": _reshape
        for name in (
            "view.default", "reshape.default", "flatten.using_ints", "unsqueeze.default", "squeeze.default",
            "squeeze.dim", "squeeze.dims", "unflatten.int",
        )
    },
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.copy.default": _copy,
    "aten.detach.default": _same,
    "aten.sub.Tensor": partial(_binary, np.subtract),
}  # fmt: skip
RULES: Mapping[str, Rule] = {
    "aten.index.Tensor": _table,
    "aten.new_zeros.default": _zeros,
    "aten.fill.Tensor": _fill,
    "aten.fill.Scalar": _fill,
    "aten.zero.default": _fill,
    "aten.ne.Scalar": partial(_binary, np.not_equal),
    "aten.eq.Scalar": partial(_binary, np.equal),
    "aten.masked_fill.Scalar": _masked_fill,
}
NOT_TAKEN: Mapping[str, str] = {}

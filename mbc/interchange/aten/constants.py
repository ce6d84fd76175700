"""Operations on numbers that do not depend on the input, such as masks and positions; NumPy computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mbc.interchange.aten.base import MOST_NUMBERS, Call, Rule
from mbc.interchange.aten.operands import Known, Operand, Refused, Result, Weight
from mbc.interchange.aten.operation_schemas import RESHAPES, SHAPE_ARGUMENTS
from mbc.interchange.program import NUMPY, Array
from mbc.ops.rounding import from_bf16

_chosen: Callable[..., Any] = np.where


def constant_of(call: Call, operand: Operand | float) -> Known | None:
    """Return a buffer or constant as numbers; None for any other operand."""
    if isinstance(operand, Weight) and operand.held.kind != "parameter":
        array, dtype = call.array(operand).reshape(operand.shape), operand.held.meta.dtype
        if dtype == "bfloat16":
            return Known(from_bf16(array))
        return Known(array.astype(NUMPY.get(dtype, array.dtype), copy=False))
    return operand if isinstance(operand, Known) else None


def is_number(operand: Operand | None) -> bool:
    """Return whether an operand is numbers that depend neither on the input nor on a parameter."""
    if isinstance(operand, Weight):
        return operand.held.kind != "parameter"
    return isinstance(operand, Known) and operand.weight is None


def folded(target: str, operands: Sequence[Operand | None]) -> Rule | None:
    """Return the rule that computes an operation on numbers; None if an operand depends on more than numbers.

    A buffer that only gets another shape stays a buffer.
    """
    if not all(map(is_number, operands)) or target not in FOLDS:
        return None
    is_regarded = target in _KEEPS and any(isinstance(x, Weight) for x in operands[:1])
    return None if is_regarded else partial(_carried_out, FOLDS[target])


def _carried_out(fold: Callable[[Call], Any], call: Call) -> Result:
    """Return the result of an operation on numbers, in the type and shape that the program states.

    Raises:
        Refused: The result is too large, or its type is not supported.
    """
    if math.prod(call.result_shape) > MOST_NUMBERS:
        raise Refused(f"it makes {math.prod(call.result_shape):,} numbers", "compute them where they are used")
    result = np.asarray(fold(call))
    dtype = NUMPY.get(call.result_dtype)
    if dtype is None or call.result_dtype == "bfloat16":
        raise Refused(f"it computes numbers of the type {call.result_dtype}", "compute them in float32")
    return Known(result.astype(dtype).reshape(call.result_shape))


def _numbers(call: Call, name: str) -> Array:
    numbers = constant_of(call, call.operand(name))
    if numbers is None or numbers.weight is not None:
        raise Refused(f"its '{name}' is computed", "use it on numbers alone")
    return numbers.array


def _either(call: Call, name: str) -> Any:
    """Return the numbers of a tensor argument, or the number that the argument is."""
    return _numbers(call, name) if call.is_tensor(name) else call.argument(name)


def _unary(of: Callable[[Array], Any], call: Call) -> Any:
    return of(_numbers(call, "self"))


def _binary(of: Callable[[Any, Any], Any], call: Call) -> Any:
    alpha = call.real("alpha", 1.0)
    a, b = _either(call, "self"), _either(call, "exponent" if call.argument("exponent") is not None else "other")
    return of(a, b if alpha == 1.0 else b * alpha)


def _view(call: Call) -> Any:
    return _numbers(call, "self").reshape(call.shape_said_by(*SHAPE_ARGUMENTS))


def _expand(call: Call) -> Any:
    return np.broadcast_to(_numbers(call, "self"), call.shape_said_by("size", "other"))


def _range_of(call: Call, array: Array) -> tuple[slice, ...]:
    """Return the index of a slice along one dimension."""
    dim = call.integer("dim", 0) % array.ndim
    taken = call.slice_of(array.shape[dim])
    return (*(slice(None),) * dim, slice(taken.start, taken.stop, taken.step))


def _slice(call: Call) -> Any:
    array = _numbers(call, "self")
    return array[_range_of(call, array)]


def _select(call: Call) -> Any:
    return _numbers(call, "self").take(call.integer("index", 0), call.integer("dim", 0))


def _slice_scatter(call: Call) -> Any:
    whole = np.array(_numbers(call, "self"))
    whole[_range_of(call, whole)] = _numbers(call, "src")
    return whole


def _select_scatter(call: Call) -> Any:
    whole = np.array(_numbers(call, "self"))
    dim = call.integer("dim", 0) % whole.ndim
    whole[(*(slice(None),) * dim, call.integer("index", 0))] = _numbers(call, "src")
    return whole


def _filled(value: float | None, call: Call) -> Any:
    """Return one number for all elements: `value`, or else the number among the operation's arguments."""
    call.ignore("self")  # its type and device
    shape = call.shape_said_by("size")
    names = [name for name in ("fill_value", "value", "s") if call.argument(name) is not None]
    number = _either(call, names[0]) if names else value
    return np.broadcast_to(np.asarray(number), shape)


def _copy(call: Call) -> Any:
    call.ignore("self")
    return np.broadcast_to(_numbers(call, "src"), call.result_shape)


def _arange(call: Call) -> Any:
    return np.arange(call.real("start", 0.0), call.real("end", 0.0), call.real("step", 1.0))


def _where(call: Call) -> Any:
    return _chosen(_numbers(call, "condition"), _either(call, "self"), _either(call, "other"))


def _masked_fill(call: Call) -> Any:
    return _chosen(_numbers(call, "mask"), _either(call, "value"), _numbers(call, "self"))


def _listed(of: Callable[..., Array], call: Call) -> Array:
    arrays = [constant_of(call, operand) for operand in call.operands("tensors")]
    return of([numbers.array for numbers in arrays if numbers is not None], axis=call.integer("dim", 0))


def _reduced(of: Callable[..., Any], call: Call) -> Any:
    return of(_numbers(call, "self"), axis=call.ints("dim") or None, keepdims=call.flag("keepdim", False))


def _triangle(of: Callable[[Array, int], Any], call: Call) -> Any:
    return of(_numbers(call, "self"), call.integer("diagonal", 0))


def _divided(call: Call) -> Any:
    mode, quotient = call.text("rounding_mode", ""), _binary(np.true_divide, call)
    return np.floor(quotient) if mode == "floor" else np.trunc(quotient) if mode == "trunc" else quotient


_UNARY: Mapping[str, Callable[[Array], Any]] = {
    "neg": np.negative, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "round": np.round, "reciprocal": np.reciprocal,
    "square": np.square, "logical_not": np.logical_not, "bitwise_not": np.bitwise_not,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "clone": np.asarray, "contiguous": np.asarray, "detach": np.asarray, "alias": np.asarray,
    "lift_fresh_copy": np.asarray, "lift_fresh": np.asarray,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "pow": np.power, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "maximum": np.maximum,
    "minimum": np.minimum, "logical_and": np.logical_and, "logical_or": np.logical_or, "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or, "floor_divide": np.floor_divide, "remainder": np.remainder,
    "rsub": lambda a, b: np.subtract(b, a),
}  # fmt: skip
_OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar")
FOLDS: Mapping[str, Callable[[Call], Any]] = {
    **{f"aten.{name}.default": partial(_unary, of) for name, of in _UNARY.items()},
    **{f"aten.{name}.{kind}": partial(_binary, of) for name, of in _BINARY.items() for kind in _OVERLOADS},
    **{f"aten.div.{kind}": _divided for kind in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")},
    **dict.fromkeys(RESHAPES, _view),
    **{f"aten.{name}.default": partial(_filled, 1.0) for name in ("ones", "ones_like", "new_ones")},
    **{f"aten.{name}.default": partial(_filled, 0.0) for name in ("zeros", "zeros_like", "new_zeros", "zero")},
    **{f"aten.{name}.default": partial(_filled, None) for name in ("full", "full_like", "new_full", "scalar_tensor")},
    "aten.fill.Scalar": partial(_filled, None),
    "aten.fill.Tensor": partial(_filled, None),
    **{f"aten.arange.{kind}": _arange for kind in ("default", "start", "start_step")},
    **{f"aten.{name}": partial(_unary, np.asarray) for name in ("to.dtype", "to.device", "to.dtype_layout")},
    "aten.expand.default": _expand,
    "aten.permute.default": lambda call: _numbers(call, "self").transpose(call.ints("dims")),
    "aten.transpose.int": lambda call: _numbers(call, "self").swapaxes(
        call.integer("dim0", 0), call.integer("dim1", 0)
    ),
    "aten.t.default": lambda call: _numbers(call, "self").T,
    "aten.repeat.default": lambda call: np.tile(_numbers(call, "self"), call.ints("repeats")),
    "aten.flip.default": lambda call: np.flip(_numbers(call, "self"), call.ints("dims")),
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.copy.default": _copy,
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.cat.default": partial(_listed, np.concatenate),
    "aten.stack.default": partial(_listed, np.stack),
    "aten.sum.dim_IntList": partial(_reduced, np.sum),
    "aten.mean.dim": partial(_reduced, np.mean),
    "aten.amax.default": partial(_reduced, np.max),
    "aten.tril.default": partial(_triangle, np.tril),
    "aten.triu.default": partial(_triangle, np.triu),
}
_KEEPS = RESHAPES | frozenset(
    f"aten.{name}.default" for name in ("clone", "contiguous", "detach", "alias", "lift_fresh_copy", "lift_fresh")
)


def _table(call: Call) -> Result:
    """Return rows of a parameter by a constant index, or elements along another dimension (`table[:, index]`)."""
    operand = call.operand("self")
    index = tuple(_index(call, one) for one in call.optional_operands("indices"))
    if (numbers := constant_of(call, operand)) is not None and numbers.weight is None:
        return Known(numbers.array[index])
    return _places(call.weight("self"), index)


def _places(weight: Weight, index: Any) -> Result:
    """Return elements of a parameter by their numbers; the parameter itself for all elements in order."""
    places = np.arange(math.prod(weight.shape)).reshape(weight.shape)[index]
    if places.size == math.prod(weight.shape) and (places.reshape(-1) == np.arange(places.size)).all():
        return replace(weight, shape=places.shape)
    return Known(places, weight)


def _embedding(call: Call) -> Result:
    """Return rows of a parameter by constant numbers, as embeddings of positions do.

    Raises:
        Refused: A row has no gradient (`padding_idx`).
    """
    call.ignore("scale_grad_by_freq", "sparse")  # each row is read once, or the result is refused
    if call.integer("padding_idx", -1) >= 0:
        raise Refused("its rows include one without a gradient (padding_idx)", "leave padding_idx out")
    return _places(call.weight("weight"), _numbers(call, "indices").astype(np.int64))


def _index(call: Call, operand: Operand | None) -> Array | slice:
    """Return a constant index as integers; a slice of all elements if the index is left out.

    Raises:
        Refused: The index is computed, or a mask.
    """
    if operand is None:
        return slice(None)
    index = constant_of(call, operand)
    if index is None or index.weight is not None or index.array.dtype == np.bool_:
        raise Refused("it takes elements by an index that is computed", "index a parameter by constant numbers")
    return index.array.astype(np.int64)


def _held(call: Call) -> Known:
    held = constant_of(call, call.operand("self"))
    if held is None:
        raise Refused("it takes a computed tensor", "use it on numbers alone")
    return held


def _regarded(of: Callable[[Call, Array], Array], call: Call) -> Result:
    """Return elements of a parameter, listed by their numbers, in another order."""
    held = _held(call)
    return replace(held, array=of(call, held.array))


# Operations whose first tensor is elements of a parameter.
OF_PARAMETER_ELEMENTS: Mapping[str, Rule] = {
    **dict.fromkeys(
        RESHAPES, partial(_regarded, lambda call, array: array.reshape(call.shape_said_by(*SHAPE_ARGUMENTS)))
    ),
    **{f"aten.{name}.default": partial(_regarded, lambda _, array: array) for name in ("clone", "contiguous", "alias")},
    "aten.permute.default": partial(_regarded, lambda call, array: array.transpose(call.ints("dims"))),
    "aten.transpose.int": partial(
        _regarded, lambda call, array: array.swapaxes(call.integer("dim0", 0), call.integer("dim1", 0))
    ),
    "aten.slice.Tensor": partial(_regarded, lambda call, array: array[_range_of(call, array)]),
}
# Operations that read the shape or type of a tensor of the network, but not its elements.
_ALIKE = tuple(
    f"aten.{name}"
    for name in (
        "zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default",
        "new_full.default", "fill.Scalar", "fill.Tensor", "zero.default",
    )
)  # fmt: skip
RULES: Mapping[str, Rule] = {
    "aten.index.Tensor": _table,
    "aten.embedding.default": _embedding,
    **{name: partial(_carried_out, FOLDS[name]) for name in _ALIKE},
}
NOT_TAKEN: Mapping[str, str] = {}

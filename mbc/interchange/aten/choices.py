"""Comparisons, masks, maxima, clamps, and casts that change nothing.

A tensor of booleans is a tensor of 1 and 0 in the network. It becomes a mask by `where` and `masked_fill`, or a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from mbc.interchange.aten.arithmetic import combine, side
from mbc.interchange.aten.attention import with_scores
from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.constants import constant_of, is_number
from mbc.interchange.aten.operands import Activation, Known, Operand, Refused, Result, Scores, Weight
from mbc.interchange.steps import Setting

_FLOAT, _EXACT = "float32", ("float32", "bool")
_ONE_TYPE = "compute in one type, and choose it with train { precision = bf16 }"


def _clamp(call: Call) -> Result:
    settings: dict[str, Setting] = {}
    for name in ("min", "max"):
        if call.argument(name) is not None:
            settings[name] = call.real(name, 0.0)
    return call.elementwise("clamp", call.lazy("self"), settings)


def _hardtanh(call: Call) -> Result:
    bounds = call.real("min_val", -1.0), call.real("max_val", 1.0)
    if bounds == (0.0, 6.0):
        return call.elementwise("relu6", call.lazy("self"))
    return call.elementwise("hardtanh", call.lazy("self"), {"min": bounds[0], "max": bounds[1]})


def _cast(call: Call) -> Result:
    """Return the tensor itself for a cast from numbers or booleans to fp32.

    Raises:
        Refused: The cast changes the precision.
    """
    call.ignore("other", "dtype")
    before, after = call.dtype_of("self"), call.result_dtype
    if after != before and (after != _FLOAT or before not in _EXACT):
        raise Refused(f"it casts {before} to {after}", _ONE_TYPE)
    return call.operand("self")


# ---- two tensors ----


def _operand(call: Call, name: str) -> Operand:
    """Return an operand; numbers and buffers of booleans are returned as constants of the network."""
    operand = side(call, name)
    if isinstance(operand, int | float):
        return call.held(Known(np.full((1,), operand)), call.result_shape)
    if not is_number(operand) or (isinstance(operand, Weight) and operand.held.meta.dtype == _FLOAT):
        return operand
    numbers = constant_of(call, operand)
    assert numbers is not None
    return call.held(numbers, call.result_shape)


def _extremum(op: str, call: Call) -> Result:
    return combine(op, call, _operand(call, "self"), _operand(call, "other"))


def _comparison(operator: str, call: Call) -> Result:
    if not call.is_tensor("other"):
        settings: Mapping[str, Setting] = {"operator": operator, "value": call.real("other", 0.0)}
        return call.elementwise("indicator", call.lazy("self"), settings)
    a, b = _operand(call, "self"), _operand(call, "other")
    return combine("compare", call.with_settings({"operator": operator}), a, b)


def _both(op: str, call: Call) -> Result:
    """Return the logical `and` or `or` of booleans.

    Raises:
        Refused: An operand has integers.
    """
    if call.dtype_of("self") != "bool" or call.dtype_of("other") != "bool":
        raise Refused("it takes the bits of whole numbers", "use it on booleans")
    return combine(op, call, _operand(call, "self"), _operand(call, "other"))


def _not(call: Call) -> Result:
    if call.dtype_of("self") != "bool":
        raise Refused("it takes the bits of whole numbers", "use it on booleans")
    return _inverted(call, call.lazy("self"))


def _inverted(call: Call, mask: Operand) -> Operand:
    numbers = constant_of(call, mask)
    if numbers is not None:
        return call.held(Known(np.equal(numbers.array, 0)), call.result_shape)
    result = combine("-", call, 1.0, mask)
    assert isinstance(result, Activation)
    return result


# ---- masks ----


def _filled(call: Call, x: Operand, mask: Operand, value: float) -> Result:
    """Return `value` where the mask is not 0, else x.

    Raises:
        Refused: Attention scores are masked in another way than by a constant mask and -inf.
    """
    if isinstance(x, Scores):
        numbers = constant_of(call, mask)
        if numbers is None or value != -math.inf:
            raise Refused("it does not mask scores of attention by -inf", "fill in -inf, by a constant mask")
        return with_scores("+", call, x, Known(np.where(numbers.array != 0, -np.inf, 0.0).astype(np.float32)))
    return combine("masked_fill", call.with_settings({"value": value}), x, mask)


def _masked_fill(call: Call) -> Result:
    value = side(call, "value")
    if not isinstance(value, float):
        raise Refused("it fills in a tensor", "fill in a number, or use torch.where")
    return _filled(call, _operand(call, "self"), _operand(call, "mask"), value)


def _where(call: Call) -> Result:
    mask, a, b = _operand(call, "condition"), side(call, "self"), side(call, "other")
    other = _inverted(call, mask)
    if isinstance(a, float) and isinstance(b, float):
        if not isinstance(mask, Activation):
            raise Refused("none of its operands is a tensor of the network", "use it on the result of a layer")
        partly_filled = _filled(call, mask, mask, a)
        assert isinstance(partly_filled, Activation)
        return _filled(call, partly_filled, other, b)
    if isinstance(b, float):
        return _filled(call, _operand(call, "self"), other, b)
    if isinstance(a, float):
        return _filled(call, _operand(call, "other"), mask, a)
    first, second = _operand(call, "self"), _operand(call, "other")
    if isinstance(first, Weight) and isinstance(mask, Weight):
        first, second, mask, other = second, first, other, mask
    taken = _filled(call, first, other, 0.0)
    assert not isinstance(taken, tuple)
    if isinstance(second, Weight) and isinstance(mask, Weight):
        array = np.where(call.array(mask).reshape(mask.shape) != 0, 0.0, _array(call, second))
        return combine("+", call, taken, call.held(Known(array), call.result_shape))
    rest = _filled(call, second, mask, 0.0)
    assert not isinstance(rest, tuple)
    return combine("+", call, taken, rest)


def _array(call: Call, weight: Weight) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if weight.held.kind == "parameter":
        raise Refused(f"it masks the parameter '{weight.held.key}'", "multiply the parameter by the mask")
    return call.array(weight).reshape(weight.shape)


RULES: Mapping[str, Rule] = {
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp_max.default": _clamp,
    "aten.hardtanh.default": _hardtanh,
    "aten.to.dtype": _cast,
    "aten.type_as.default": _cast,
    "aten._to_copy.default": _cast,
    "aten.maximum.default": partial(_extremum, "maximum"),
    "aten.minimum.default": partial(_extremum, "minimum"),
    "aten.max.other": partial(_extremum, "maximum"),
    "aten.min.other": partial(_extremum, "minimum"),
    **{
        f"aten.{operator}.{kind}": partial(_comparison, operator)
        for operator in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Scalar", "Tensor")
    },
    **{
        f"aten.{name}.{kind}": partial(_both, op)
        for name, kind, op in (
            ("logical_and", "default", "*"),
            ("logical_or", "default", "maximum"),
            ("bitwise_and", "Tensor", "*"),
            ("bitwise_or", "Tensor", "maximum"),
            ("__and__", "Tensor", "*"),
            ("__or__", "Tensor", "maximum"),
        )
    },
    "aten.logical_not.default": _not,
    "aten.bitwise_not.default": _not,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.where.self": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.Scalar": _where,
}
NOT_TAKEN: Mapping[str, str] = {
    f"aten.{name}.Tensor": "bound it by torch.maximum(x, low) and torch.minimum(x, high)"
    for name in ("clamp", "clamp_min", "clamp_max")
}

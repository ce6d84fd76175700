"""Arithmetic on parameters before a layer takes them, such as the concatenation of biases; each step computes it.

The results have no dimension for samples, as parameters have none; the network holds them with a first size of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mbc.interchange.aten.axes import sliced
from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.constants import constant_of, is_number
from mbc.interchange.aten.operands import Activation, Computed, Operand, Refused, Result, Scaled, Weight
from mbc.interchange.aten.operation_schemas import RESHAPES, SHAPE_ARGUMENTS
from mbc.interchange.aten.renamings import RENAMINGS, layer_of


def computed(target: str, operands: Sequence[Operand | None]) -> Rule | None:
    """Return the rule that computes with parameters; None if there are other tensors, or a layer takes the result.

    A parameter that only gets another shape stays a parameter; a parameter times a number stays a gain.
    """
    if target not in RULES or not all(x is not None and (is_number(x) or _is_trained(x)) for x in operands):
        return None
    trained = [x for x in operands if x is not None and _is_trained(x)]
    is_gain = target.startswith("aten.mul.") and len(operands) == 1 and all(isinstance(x, Weight) for x in trained)
    stays = is_gain or (target in _KEEPS and not any(isinstance(x, Computed) for x in trained))
    return None if not trained or stays else RULES[target]


def _is_trained(operand: Operand) -> bool:
    if isinstance(operand, Weight):
        return operand.held.kind == "parameter"
    return isinstance(operand, Computed | Scaled)


def tensor_of(call: Call, operand: Operand) -> Activation:
    """Return a parameter, a value computed from parameters, or numbers as a tensor whose first size is 1.

    Raises:
        Refused: The operand is another tensor.
    """
    if isinstance(operand, Computed):
        return Activation(operand.value, (1, *operand.shape))
    if isinstance(operand, Scaled):
        x = tensor_of(call, operand.weight)
        return call.operator("*", operand.factor, x, x.shape)
    if isinstance(operand, Weight):
        return call.tensor(operand, (1, *operand.shape))
    numbers = constant_of(call, operand)
    if numbers is None:
        raise Refused("it computes with parameters and other tensors at once", "compute with the parameters first")
    shape = (1, *numbers.array.shape)
    return call.tensor(call.held(replace(numbers, array=numbers.array.reshape(shape)), shape), shape)


def shaped(call: Call, operand: Operand, shape: tuple[int, ...]) -> Activation:
    """Return parameters as a tensor of another shape, whose first size is 1."""
    x = tensor_of(call, operand)
    return x if x.shape == shape else call.layer("reshape", x, shape, {"sizes": shape[1:]})


def _result(x: Activation) -> Computed:
    return Computed(x.value, x.shape[1:])


def _side(call: Call, name: str) -> Activation | float:
    if not call.is_tensor(name):
        return call.real(name, float("nan"))
    operand = call.operand(name)
    numbers = constant_of(call, operand) if is_number(operand) else None
    if numbers is not None and numbers.array.size == 1:
        return float(numbers.array.reshape(-1)[0])
    return tensor_of(call, operand)


def _binary(op: str, call: Call) -> Result:
    a, b, alpha = _side(call, "self"), _side(call, "other"), call.real("alpha", 1.0)
    if alpha != 1.0:
        b = call.operator("*", alpha, b, b.shape) if isinstance(b, Activation) else b * alpha
    shapes = [x.shape[1:] if isinstance(x, Activation) else () for x in (a, b)]
    shape = np.broadcast_shapes(*shapes)
    a, b = (_of_rank(call, x, len(shape)) if isinstance(x, Activation) else x for x in (a, b))
    return _result(call.operator(op, a, b, (1, *shape)))


def _of_rank(call: Call, x: Activation, rank: int) -> Activation:
    ones = (1,) * (rank + 1 - len(x.shape))
    return shaped(call, _result(x), (1, *ones, *x.shape[1:])) if ones else x


def _unary(call: Call) -> Result:
    layer, settings = layer_of(call)
    return _result(call.elementwise(layer, tensor_of(call, call.operand("self")), settings))


def _detach(call: Call) -> Result:
    return _result(call.elementwise("detach", tensor_of(call, call.operand("self"))))


def _negative(call: Call) -> Result:
    x = tensor_of(call, call.operand("self"))
    return _result(call.operator("*", -1.0, x, x.shape))


def _power(call: Call) -> Result:
    x = tensor_of(call, call.operand("self"))
    return _result(call.elementwise("pow", x, {"exponent": call.real("exponent", 2.0)}))


def _view(call: Call) -> Result:
    operand = call.operand("self")
    shape = call.shape_said_by(*SHAPE_ARGUMENTS)
    return _result(shaped(call, operand, (1, *shape)))


def _same(call: Call) -> Result:
    return call.operand("self")


def _cat(call: Call) -> Result:
    parts = [tensor_of(call, operand) for operand in call.operands("tensors")]
    axis = call.integer("dim", 0) % (len(parts[0].shape) - 1) + 1
    return _result(call.layer("concat", parts, (1, *call.result_shape), {"axis": axis}))


def _slice(call: Call) -> Result:
    x = tensor_of(call, call.operand("self"))
    axis = call.integer("dim", 0) % (len(x.shape) - 1) + 1
    return _result(sliced(call, x, axis, call.slice_of(x.shape[axis])))


def _reduced(op: str, call: Call) -> Result:
    x = tensor_of(call, call.operand("self"))
    rank = len(x.shape) - 1
    axes = tuple(sorted(dim % rank + 1 for dim in call.ints("dim") or range(rank)))
    settings = {"axes": axes[0] if len(axes) == 1 else axes, "keep": call.flag("keepdim", False)}
    return _result(call.layer(op, x, (1, *call.result_shape), settings))


_OPERATORS = (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))
_ALIKE = ("contiguous", "clone", "alias")
RULES: Mapping[str, Callable[[Call], Result]] = {
    **{f"aten.{name}.{kind}": partial(_binary, op) for name, op in _OPERATORS for kind in ("Tensor", "Scalar")},
    **dict.fromkeys(RENAMINGS, _unary),
    "aten.detach.default": _detach,
    **dict.fromkeys(RESHAPES, _view),
    **{f"aten.{name}.default": _same for name in _ALIKE},
    "aten.neg.default": _negative,
    "aten.pow.Tensor_Scalar": _power,
    "aten.cat.default": _cat,
    "aten.slice.Tensor": _slice,
    "aten.mean.dim": partial(_reduced, "mean"),
    "aten.sum.dim_IntList": partial(_reduced, "sum"),
}
_KEEPS = RESHAPES | frozenset(f"aten.{name}.default" for name in _ALIKE)

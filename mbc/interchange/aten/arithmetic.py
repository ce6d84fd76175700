"""Sums, products, differences, quotients, powers and products of matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mbc.interchange.aten.attention import of_shares, scaled, scores, with_scores
from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.constants import constant_of, is_number
from mbc.interchange.aten.factors import channels_behind, factored, in_order, picked, with_channels
from mbc.interchange.aten.operands import (
    CHANNELS_LAST,
    GATE,
    PLAIN,
    UNKNOWN,
    Activation,
    Computed,
    Expanded,
    Factored,
    Known,
    Noise,
    Operand,
    Padded,
    Refused,
    Result,
    Scaled,
    Scores,
    Standardized,
    Unknown,
    Weight,
    as_activation,
    refuse_calculation,
)
from mbc.interchange.aten.parameters import shaped, tensor_of


def _binary(op: str, call: Call) -> Result:
    a, b = side(call, "self"), side(call, "other")
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return UNKNOWN
    alpha = call.real("alpha", 1.0) if op in "+-" else 1.0
    if op in "+-" and call.result_dtype == "bool":
        raise Refused("it adds booleans", "combine them by | and &")
    return combine(op, call, a, b, alpha)


def _reversed_difference(call: Call) -> Result:
    """Return `other - alpha * self`."""
    return combine("-", call, side(call, "other"), side(call, "self"), call.real("alpha", 1.0))


def side(call: Call, name: str) -> Operand | float:
    """Return an operand of a binary operation. Numbers and constants of one element become a float."""
    if not call.is_tensor(name):
        return call.real(name, math.nan)
    operand = call.operand(name)
    numbers = constant_of(call, operand) if is_number(operand) else None
    if numbers is not None and numbers.array.size == 1:
        return float(numbers.array.reshape(-1)[0])
    return operand


def _held(call: Call, numbers: Known, other: Operand | float) -> Weight | float:
    """Return numbers as a float if all are equal and the other operand has the result's shape, else as a constant.

    Raises:
        Refused: The other operand is no tensor of the network.
    """
    if not isinstance(other, Activation):
        raise Refused("none of its operands is a tensor of the network", "use it on the result of a layer")
    shape, array = np.broadcast_shapes(numbers.array.shape, other.seen), numbers.array
    if numbers.weight is None and shape == other.seen and (array == array.reshape(-1)[0]).all():
        return float(array.reshape(-1)[0])
    return call.held(numbers, shape)


def combine(op: str, call: Call, a: Operand | float, b: Operand | float, alpha: float = 1.0) -> Result:
    """Return `a op alpha * b`.

    Args:
        op: An operator (`+ - * /`), or a layer of two tensors such as `maximum`.
        call: The node that is translated.
        a: The first operand.
        b: The second operand.
        alpha: The factor of the second operand.

    Returns:
        A tensor of the network, or scores, noise or a scaled parameter that a later operation takes.

    Raises:
        Refused: The language has no layer for the operands.
    """
    if alpha != 1.0:
        b = _times(call, b, alpha)
    for operand in (a, b):
        if isinstance(operand, Standardized):
            refuse_calculation(operand.weight)
    if isinstance(a, Scores) or isinstance(b, Scores):
        return with_scores(op, call, a, b)
    if isinstance(a, Noise) or isinstance(b, Noise):
        return _with_noise(op, call, a, b)
    a, b = (_held(call, x, other) if isinstance(x, Known) else x for x, other in ((a, b), (b, a)))
    if isinstance(a, Weight | Computed | Scaled) or isinstance(b, Weight | Computed | Scaled):
        return _with_weight(op, call, a, b)
    if isinstance(a, Activation) and isinstance(b, Activation):
        return _tensors(op, call, a, b)
    if isinstance(a, float) and isinstance(b, Activation):
        return _with_number(op, call, a, b, b)
    if isinstance(b, float) and isinstance(a, Activation):
        if (op in "+-" and b == 0.0) or (op in "*/" and b == 1.0):
            return a
        return _with_number(op, call, a, b, a)
    raise Refused("none of its operands is a tensor of the network", "use it on the result of a layer")


def _times(call: Call, operand: Operand | float, factor: float) -> Operand | float:
    """Return an operand times a number.

    Raises:
        Refused: The operand is neither a tensor nor a parameter.
    """
    if isinstance(operand, int | float):
        return operand * factor
    if isinstance(operand, Activation):
        return _with_number("*", call, factor, operand, operand)
    numbers = constant_of(call, operand) if is_number(operand) else None
    if numbers is not None:
        return replace(numbers, array=numbers.array * factor)
    if isinstance(operand, Weight):
        return Scaled(operand, factor)
    if isinstance(operand, Computed | Scaled):
        x = tensor_of(call, operand)
        return Computed(call.operator("*", factor, x, x.shape).value, x.shape[1:])
    raise Refused(f"it takes its second operand {factor:g} times (alpha)", "multiply it before")


def _with_number(op: str, call: Call, a: Activation | float, b: Activation | float, x: Activation) -> Activation:
    number = b if isinstance(b, float) else a if isinstance(a, float) else math.nan
    if op == "*" and isinstance(x.view, Factored) and x.is_pending:
        return scaled(x, number)
    zeros_stay = (op == "*" or (op == "/" and a is x)) and math.isfinite(number) and (op, number) != ("/", 0.0)
    if (
        x.is_pending
        and not isinstance(x.view, Expanded)
        and not (isinstance(x.view, Padded) and not x.view.value and zeros_stay)
    ):
        settled = call.settle(x)
        a, b, x = (settled if a is x else a), (settled if b is x else b), settled
    return replace(call.operator(op, a, b, x.shape), view=x.view)


def _with_noise(op: str, call: Call, a: Operand | float, b: Operand | float) -> Result:
    """Return scaled noise, or stochastic depth of a tensor that is multiplied by noise.

    Noise may be divided by the probability with which a sample is kept.

    Raises:
        Refused: The result is no stochastic depth of whole samples.
    """
    if isinstance(a, Noise) and isinstance(b, float) and op in "/*":
        return replace(a, scale=a.scale / b if op == "/" else a.scale * b)
    noise, x = (a, b) if isinstance(a, Noise) else (b, a)
    assert isinstance(noise, Noise)
    if op != "*" or not isinstance(x, Activation):
        raise Refused("it calculates with random numbers", "use nn.Dropout, or stochastic depth of whole samples")
    whole = noise.shape == (x.shape[0],) + (1,) * (len(x.seen) - 1)
    if not whole or not math.isclose(noise.scale * noise.keep, 1.0, rel_tol=1e-6):
        raise Refused(
            "it drops parts of samples, or does not scale the samples that it keeps",
            "drop whole samples, as mode='row' does",
        )
    call.claim(noise)
    return call.elementwise("drop_path", x, {"p": float(f"{1.0 - noise.keep:.12g}")})


def _with_weight(op: str, call: Call, a: Operand | float, b: Operand | float) -> Result:
    """Return a tensor combined with a parameter or buffer, as in LayerScale and position embeddings.

    Raises:
        Refused: There is no tensor of the network, or the parameter has a dimension for samples.
    """
    weight, x = (b, a) if isinstance(a, Activation | float) else (a, b)
    if isinstance(weight, Weight) and op == "*" and isinstance(x, float):
        return Scaled(weight, x)
    if not isinstance(x, Activation):
        raise Refused("it computes with parameters alone", "hold the result as a parameter")
    if isinstance(weight, Computed | Scaled):
        return _with_computed(op, call, x, weight, first=x is a)
    assert isinstance(weight, Weight)
    first = x is a
    if isinstance(x.view, Factored):
        x = picked(call, x)
    if (view := channels_behind(x)) is not None:
        return _with_positions(op, call, x, view, weight, first)
    if x.view not in (PLAIN, CHANNELS_LAST):
        x = call.settle(x)
    rank = len(x.seen)
    if rank == 1 and math.prod(weight.shape) == 1 and len(weight.shape) < 2:  # one number for each sample
        column = call.layer("reshape", x, (*x.shape, 1), {"sizes": 1})
        held = call.tensor(weight, (1,))
        result = call.operator(op, *((column, held) if first else (held, column)), column.shape)
        return call.layer("squeeze", result, x.shape)
    padded = (1,) * (rank - len(weight.shape)) + weight.shape
    if len(padded) > rank or padded[0] != 1:
        raise Refused(
            f"it combines {list(x.seen)} with the {weight.held.kind} '{weight.held.key}' of {list(weight.shape)}",
            "give it 1 in the dimension of the samples",
        )
    axis = rank - 1 if x.view == CHANNELS_LAST else 1
    if padded == tuple(x.shape[1] if i == axis else 1 for i in range(rank)):
        padded = (x.shape[1],)  # a vector is one number for each channel, in every view
    elif x.view == CHANNELS_LAST and math.prod(padded) > 1:
        x = call.settle(x)
    held = call.tensor(weight, padded)
    wide = x.shape
    if len(padded) > 1:
        wide = tuple(n if m == 1 else m for m, n in zip(x.shape, padded, strict=True))
    left, right = (x, held) if first else (held, x)
    return replace(call.operator(op, left, right, wide), view=x.view)


def _with_computed(op: str, call: Call, x: Activation, held: Computed | Scaled, first: bool) -> Result:
    """Return a tensor combined with a value computed from parameters, whose dimensions are aligned at the last ones.

    Raises:
        Refused: The value computed from parameters has a dimension for samples.
    """
    x = call.settle(x)
    own = held.shape if isinstance(held, Computed) else held.weight.shape
    padded = (1,) * (len(x.shape) - len(own)) + own
    if len(padded) != len(x.shape) or padded[0] != 1:
        raise Refused(
            f"it combines {list(x.shape)} with {list(own)} computed from parameters",
            "give it 1 in the dimension of the samples",
        )
    other = shaped(call, held, padded)
    wide = np.broadcast_shapes(x.shape, padded)
    return call.operator(op, *((x, other) if first else (other, x)), wide)


def _with_positions(op: str, call: Call, x: Activation, view: Factored, weight: Weight, first: bool) -> Activation:
    """Return a sequence [N, T, C], stored as an image, combined with a parameter [1, T, C] or [C].

    Raises:
        Refused: The parameter has another shape.
    """
    padded = (1,) * (len(x.seen) - len(weight.shape)) + weight.shape
    channels, wide = x.shape[1], x.shape
    if math.prod(padded) == padded[-1] == channels:
        held = call.tensor(weight, (channels,))
    elif padded == (1, *x.seen[1:]) and len(padded) == 3:
        x = in_order(call, x)
        view = channels_behind(x) or view
        held = call.tensor(weight, padded)
        held = call.layer("permute", held, (1, channels, padded[1]), {"axes": (0, 2, 1)})
        held = call.layer("reshape", held, (1, *x.shape[1:]), {"sizes": x.shape[1:]})
        wide = x.shape
    else:
        raise Refused(
            f"it combines {list(x.seen)} with the {weight.held.kind} '{weight.held.key}' of {list(weight.shape)}",
            "give it 1 in the dimension of the samples, and all positions and channels",
        )
    return with_channels(view, call.operator(op, *((x, held) if first else (held, x)), wide))


def _by_factors(call: Call, a: Activation, b: Activation) -> tuple[Activation, Activation]:
    """Return two tensors under a common view by factors if there is one, else both in the shape that the program sees.

    At least one of the tensors has a view by factors.
    """
    a, b = call.image(a), call.image(b)
    left, right = factored(a), factored(b)
    if a.is_pending or b.is_pending or left is None or left != right or a.shape != b.shape:
        return call.settle(a), call.settle(b)
    return replace(a, view=left), replace(b, view=left)


def _tensors(op: str, call: Call, a: Activation, b: Activation) -> Activation:
    # A repeated operand is combined before it is repeated; the result is repeated unless the other operand is as large.
    shape = np.broadcast_shapes(a.seen, b.seen)
    a, b = (replace(x, view=PLAIN) if isinstance(x.view, Expanded) else x for x in (a, b))
    result = _combined(op, call, a, b)
    return result if result.seen == shape else replace(call.settle(result), view=Expanded(shape))


def _combined(op: str, call: Call, a: Activation, b: Activation) -> Activation:
    if isinstance(a.view, Factored) or isinstance(b.view, Factored):
        a, b = _by_factors(call, a, b)
    if a.is_pending or b.is_pending or (a.view != b.view and GATE not in (a.view, b.view)):
        a, b = call.settle(a), call.settle(b)
    if a.shape == b.shape and a.view == b.view:
        return replace(call.operator(op, a, b, a.shape), view=a.view)
    for image, gate in ((a, b), (b, a)):
        if gate.view in (GATE, image.view) and image.view in (PLAIN, CHANNELS_LAST) and len(image.shape) == 4:
            ones = (*image.shape[:2], 1, 1)
            if gate.shape == ones or (gate.view == GATE and gate.shape == ones[:2]):
                return replace(call.operator(op, a, b, image.shape), view=image.view)
    a, b = call.settle(a), call.settle(b)
    if len(a.shape) != len(b.shape) or a.shape[0] != b.shape[0]:
        raise Refused(
            f"its operands {list(a.seen)} and {list(b.seen)} differ in samples or in the number of dimensions",
            "give both operands all dimensions, with 1 where one is to be repeated",
        )
    return call.operator(op, a, b, tuple(n if m == 1 else m for m, n in zip(a.shape, b.shape, strict=True)))


def _addcmul(call: Call) -> Result:
    """Return `self + value * tensor1 * tensor2`."""
    first, second, added = call.operand("tensor1"), call.operand("tensor2"), call.operand("self")
    product = combine("*", call, first, second, 1.0)
    if not isinstance(product, Activation):
        return UNKNOWN
    scaled = combine("*", call, product, call.real("value", 1.0), 1.0)
    if not isinstance(scaled, Activation):
        return UNKNOWN
    return combine("+", call, added, scaled, 1.0)


def _power(call: Call) -> Result:
    x, exponent = call.lazy("self"), call.real("exponent", 2.0)
    return x if exponent == 1.0 else call.elementwise("pow", x, {"exponent": exponent})


def _constant_power(exponent: float, call: Call) -> Result:
    return call.elementwise("pow", call.lazy("self"), {"exponent": exponent})


def _matmul(call: Call) -> Result:
    """Return the product of two tensors of the network, separately for each sample.

    Raises:
        Refused: The tensors differ in a dimension before the last two.
    """
    left, right = call.operand("self"), call.operand("other" if call.is_tensor("other") else "mat2")
    if isinstance(left, Scores):
        return of_shares(call, left, as_activation(right))
    a, b = as_activation(left), as_activation(right)
    if (attention_scores := scores(call, a, b)) is not None:
        return attention_scores
    a, b = call.settle(a), call.settle(b)
    if len(a.shape) != len(b.shape) or len(a.shape) < 3 or a.shape[:-2] != b.shape[:-2]:
        raise Refused(
            f"it multiplies {list(a.shape)} by {list(b.shape)}",
            "give both the same dimensions before the last two, or multiply by a parameter with nn.Linear",
        )
    return call.layer("matmul", (a, b), call.result_shape)


def _negative(call: Call) -> Result:
    x = call.lazy("self")
    return _with_number("*", call, -1.0, x, x)


RULES: Mapping[str, Rule] = {
    **{
        f"aten.{name}.{kind}": partial(_binary, op)
        for name, op in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))
        for kind in ("Tensor", "Scalar")
    },
    "aten.rsub.Scalar": _reversed_difference,
    "aten.pow.Tensor_Scalar": _power,
    "aten.addcmul.default": _addcmul,
    "aten.square.default": partial(_constant_power, 2.0),
    "aten.rsqrt.default": partial(_constant_power, -0.5),
    "aten.reciprocal.default": partial(_constant_power, -1.0),
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.neg.default": _negative,
}
_LOSS = "leave the loss out of the model, because the source states it; or reduce over dimensions other than samples"
NOT_TAKEN: Mapping[str, str] = {
    "aten.pow.Scalar": "use torch.exp",
    "aten.cumsum.default": "sum over whole dimensions",
    "aten.sum.default": _LOSS,
    "aten.mean.default": _LOSS,
}

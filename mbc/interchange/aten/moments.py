"""Normalisation and statistics that are written as several layers: means, differences and powers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from mbc.interchange.aten.base import Call, Rule
from mbc.interchange.aten.operands import Activation, Refused, Result, Untaken, Weight
from mbc.interchange.aten.pooling import square_root
from mbc.interchange.steps import Setting

_ROWS = "keep the samples of a mini-batch apart, in dimension 0"


def _axes(axes: Sequence[int], keep: bool) -> dict[str, Setting]:
    return {"axes": axes[0] if len(axes) == 1 else tuple(axes), "keep": keep}


def _kept(shape: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


def _mean(call: Call, x: Activation, axes: Sequence[int]) -> Activation:
    return call.layer("mean", x, _kept(x.shape, axes), _axes(axes, True))


def _centred(call: Call, x: Activation, axes: Sequence[int]) -> Activation:
    return call.operator("-", x, _mean(call, x, axes), x.shape)


def _mean_square(call: Call, x: Activation, axes: Sequence[int]) -> Activation:
    return _mean(call, call.layer("pow", x, x.shape, {"exponent": 2.0}), axes)


def _over_root(call: Call, x: Activation, axes: Sequence[int], eps: float) -> Activation:
    """Return x divided by the root of its mean square along axes; `eps` is added to the mean square."""
    square = _mean_square(call, x, axes)
    square = call.operator("+", square, eps, square.shape) if eps else square
    return call.operator("*", x, call.layer("pow", square, square.shape, {"exponent": -0.5}), x.shape)


def standardized(call: Call, x: Activation, axes: Sequence[int], eps: float) -> Activation:
    """Return x minus its mean, divided by its standard deviation along axes; `eps` is added to the variance."""
    return _over_root(call, _centred(call, x, axes), axes, eps)


def affine(call: Call, x: Activation, weight: Weight | None, bias: Weight | None, axis: int) -> Activation:
    """Return x times a scale plus an offset, whose dimensions are those of x from `axis` on, or that axis alone."""
    for op, held in (("*", weight), ("+", bias)):
        if held is None:
            continue
        shape = (*(1,) * axis, *held.shape, *(1,) * (len(x.shape) - axis - len(held.shape)))
        if math.prod(shape) == shape[1] == x.shape[1]:
            shape = (shape[1],)  # a vector is one number for each channel
        x = call.operator(op, x, call.tensor(held, shape), x.shape)
    return x


def layer_norm(call: Call, x: Activation, centre: bool = True) -> Result:
    """Return a tensor normalised over the last dimensions of each sample: layer norm, or RMS norm without `centre`.

    Raises:
        Refused: The dimensions include the samples.
    """
    sizes, x = call.ints("normalized_shape"), call.settle(x)
    rank = len(x.shape)
    axes = tuple(range(rank - len(sizes), rank))
    if not sizes or axes[0] == 0:
        raise Refused(f"it normalises all dimensions of {list(x.shape)}, the samples among them", _ROWS)
    eps = call.real("eps", 1e-5 if centre else 2.0**-23)
    bias = call.optional_weight("bias") if centre else None
    result = standardized(call, x, axes, eps) if centre else _over_root(call, x, axes, eps)
    return affine(call, result, call.optional_weight("weight"), bias, axes[0])


def _dims(call: Call, x: Activation) -> tuple[int, ...]:
    rank = len(x.shape)
    dims = tuple(sorted(d % rank for d in call.ints("dim") or tuple(range(rank))))
    if 0 in dims:
        raise Refused(f"it is over dimension 0 of {list(x.shape)}, the samples", _ROWS)
    return dims


def _variance(root: bool, call: Call) -> Result:
    x = call.plain("self")
    dims = _dims(call, x)
    count = math.prod(x.shape[d] for d in dims)
    correction = call.real("correction", 1.0) if call.flag("unbiased", True) else 0.0
    if count <= correction:
        raise Refused(f"it reduces {count} element{'s' * (count != 1)}, less {correction:g}", "give correction=0")
    result = _mean_square(call, _centred(call, x, dims), dims)
    if correction:
        result = call.operator("*", result, count / (count - correction), result.shape)
    if not call.flag("keepdim", False):
        result = _as_result(call, result)
    return square_root(call, result) if root else result


def _as_result(call: Call, x: Activation) -> Activation:
    """Return a tensor in the shape of the result, which may be one number for each sample."""
    shape = call.result_shape
    if len(shape) == 1:
        return call.layer("squeeze", x, shape)
    return call.layer("reshape", x, shape, {"sizes": shape[1] if len(shape) == 2 else shape[1:]})


def _extreme(sign: float, call: Call) -> Result:
    """Return the largest (or smallest) element along a dimension, with the gradient at the first one, by `maxpool`.

    Raises:
        Refused: The dimension is 0, the samples.
    """
    x = call.plain("self")
    dim = call.integer("dim", 0) % len(x.shape)
    if dim == 0:
        raise Refused(f"it is over dimension 0 of {list(x.shape)}, the samples", _ROWS)
    before, size, after = math.prod(x.shape[1:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    image = call.layer("reshape", x, (x.shape[0], before, size, after), {"sizes": (before, size, after)})
    image = image if sign > 0 else call.operator("*", -1.0, image, image.shape)
    result = call.layer("adaptive_maxpool", image, (x.shape[0], before, 1, after), {"size": (1, after)})
    result = result if sign > 0 else call.operator("*", -1.0, result, result.shape)
    call.ignore("keepdim")  # the result's shape includes it
    result = _as_result(call, result)
    return result, Untaken("it takes the position of an extreme", "use the values alone")


def _least(call: Call) -> Result:
    x = call.plain("self")
    dims = _dims(call, x)
    negative = call.operator("*", -1.0, x, x.shape)
    result = call.layer("amax", negative, call.result_shape, _axes(dims, call.flag("keepdim", False)))
    return call.operator("*", -1.0, result, result.shape)


def _log_sum_exp(call: Call) -> Result:
    x = call.plain("self")
    dims = _dims(call, x)
    kept = _kept(x.shape, dims)
    largest = call.layer("detach", call.layer("amax", x, kept, _axes(dims, True)), kept)
    powers = call.layer("exp", call.operator("-", x, largest, x.shape), x.shape)
    total = call.layer("log", call.layer("sum", powers, kept, _axes(dims, True)), kept)
    result = call.operator("+", total, largest, kept)
    if call.flag("keepdim", False):
        return result
    return _as_result(call, result)


RULES: Mapping[str, Rule] = {
    "aten.rms_norm.default": lambda call: layer_norm(call, call.plain("input"), centre=False),
    **{f"aten.var.{kind}": partial(_variance, False) for kind in ("correction", "dim")},
    **{f"aten.std.{kind}": partial(_variance, True) for kind in ("correction", "dim")},
    "aten.max.dim": partial(_extreme, 1.0),
    "aten.min.dim": partial(_extreme, -1.0),
    "aten.amin.default": _least,
    "aten.logsumexp.default": _log_sum_exp,
}
NOT_TAKEN: Mapping[str, str] = {}

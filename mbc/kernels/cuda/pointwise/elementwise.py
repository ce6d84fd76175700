"""Elementwise operations, in any layout: activations, their gradients, addition and multiplication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, no_reals, type_code
from mbc.kernels.launch_struct import Struct
from mbc.ops.activation import LeakyRelu, Scale
from mbc.ops.activation_variants import Elu
from mbc.ops.elementary import Power
from mbc.ops.piecewise import Clamp, Indicator

FILE = "pointwise/elementwise.cu"
VARIANTS_FILE = "pointwise/activation_variants.cu"
PIECEWISE_FILE = "pointwise/piecewise.cu"
RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")  # in the order of their numbers in piecewise.cu
ELEMENTARY_FILE = "pointwise/elementary.cu"


@dataclass(frozen=True, slots=True)
class MapArguments(Struct):
    """Integer arguments of an elementwise launch."""

    type: int
    elements: int


def _arguments(at: Slice) -> MapArguments:
    y = at.request.outputs[0]
    return MapArguments(type_code(y), y.elements)


def _slope(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, LeakyRelu)
    return (a.slope,)


def _alpha(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Elu)
    return (a.alpha,)


def _scale(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Scale)
    return a.factor, a.offset


def _exponent(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Power)
    return (a.exponent,)


def _bounds(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Clamp)
    return (*a.bounds, float(a.strict))


def _compared(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Indicator)
    return a.value, float(RELATIONS.index(a.operator))


_REALS: dict[str, Callable[[Slice], tuple[float, ...]]] = {
    "relu": no_reals,
    "relu_backward": no_reals,
    "leaky_relu": _slope,
    "leaky_relu_backward": _slope,
    "sigmoid": no_reals,
    "sigmoid_backward": no_reals,
    "tanh": no_reals,
    "tanh_backward": no_reals,
    "silu": no_reals,
    "silu_backward": no_reals,
    "gelu": no_reals,
    "gelu_backward": no_reals,
    "add": no_reals,
    "mul": no_reals,
    "scale": _scale,
}

_VARIANTS: dict[str, Callable[[Slice], tuple[float, ...]]] = {
    "relu6": no_reals,
    "relu6_backward": no_reals,
    "hardsigmoid": no_reals,
    "hardsigmoid_backward": no_reals,
    "hardswish": no_reals,
    "hardswish_backward": no_reals,
    "elu": _alpha,
    "elu_backward": _alpha,
    "mish": no_reals,
    "mish_backward": no_reals,
    "softplus": no_reals,
    "softplus_backward": no_reals,
}

_ELEMENTARY: dict[str, Callable[[Slice], tuple[float, ...]]] = {
    f"{kind}{suffix}": _exponent if kind == "pow" else no_reals
    for kind in ("sqrt", "abs", "exp", "log", "pow", "gelu_tanh")
    for suffix in ("", "_backward")
}

_PIECEWISE: dict[str, Callable[[Slice], tuple[float, ...]]] = {
    "clamp": _bounds,
    "clamp_backward": _bounds,
    "indicator": _compared,
}

# Rare operations have files of their own, so that networks without them compile less.
KERNELS = tuple(
    OwnKernel(kind, file, MapArguments, _arguments, reals)
    for file, kinds in (
        (FILE, _REALS),
        (VARIANTS_FILE, _VARIANTS),
        (ELEMENTARY_FILE, _ELEMENTARY),
        (PIECEWISE_FILE, _PIECEWISE),
    )
    for kind, reals in kinds.items()
)

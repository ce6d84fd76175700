"""Elementwise operations, in any layout: activations, their gradients, addition and multiplication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbc.kernels.cuda.base import OwnKernel, Slice, Struct, no_reals, type_code
from mbc.ops.activation import LeakyRelu, Scale

FILE = "pointwise/elementwise.cu"


@dataclass(frozen=True, slots=True)
class MapArguments(Struct):
    type: int
    elements: int


def _arguments(at: Slice) -> MapArguments:
    y = at.request.outputs[0]
    return MapArguments(type_code(y), y.elements)


def _slope(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, LeakyRelu)
    return (a.slope,)


def _scale(at: Slice) -> tuple[float, ...]:
    a = at.request.attributes
    assert isinstance(a, Scale)
    return a.factor, a.offset


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

KERNELS = tuple(OwnKernel(kind, FILE, MapArguments, _arguments, reals) for kind, reals in _REALS.items())

"""Attributes and inputs of functions of one tensor, drawn by their declarations: a new function needs no line here.

A number among the attributes is drawn from 0.2 to 1.8; attributes of other types have examples in `EXAMPLES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from zlib import crc32

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ops.base import Array
from mbc.ops.elementary import Power
from mbc.ops.piecewise import Clamp
from mbc.ops.pointwise import Pointwise

EXAMPLES: Mapping[type[Attributes], Sequence[Attributes]] = {
    Power: [Power(exponent) for exponent in (2.0, -1.0, 0.5, 3.0)],
    Clamp: [
        Clamp(lower, upper, strict)
        for lower, upper in (((-0.5,), (0.75,)), ((), (0.5,)), ((0.5,), ()), ((1.0,), (0.5,)))
        for strict in (False, True)
    ],
}
LARGEST = 7.0  # of the inputs: beyond the bounds of piecewise functions, and small enough for exponentials in fp16


def examples(function: Pointwise) -> Sequence[Attributes]:
    """Return attributes of a function."""
    kind = function.attributes
    rng = np.random.default_rng(crc32(function.name.encode()))
    numbers = [[round(rng.uniform(0.2, 1.8), 2) for _ in fields(kind)] for _ in range(2 if fields(kind) else 1)]
    return EXAMPLES.get(kind) or [kind(*drawn) for drawn in numbers]


def values(function: Pointwise, a: Attributes, x: Array) -> Array:
    """Return the function's values; NaN or infinite ones outside its domain."""
    with np.errstate(all="ignore"):
        return function.forward(a, x)


def needs_positive(function: Pointwise, a: Attributes) -> bool:
    """Return whether the function is undefined, or infinite, at some numbers that are not positive."""
    return not np.isfinite(values(function, a, np.linspace(-LARGEST, 0, 50))).all()


def inputs(function: Pointwise, a: Attributes, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return random numbers of the function's domain."""
    if needs_positive(function, a):
        return rng.uniform(0.1, 3.0, shape)
    return np.clip(2.5 * rng.standard_normal(shape), -LARGEST, LARGEST)


def steps(function: Pointwise, a: Attributes, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return multiples of 0.5, among which are the places where pieces of functions meet."""
    x = inputs(function, a, rng, shape)
    return np.maximum(np.round(2 * x) / 2, 0.5 if needs_positive(function, a) else -LARGEST)

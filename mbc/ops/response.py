"""Local response normalisation across channels (Krizhevsky et al., 2012), as in Caffe and PyTorch.

y = x / d^beta with d = k + alpha / size * sum of x * x over the window of `size` channels around each channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mbc.ir.graph import Attributes, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Call, Gradients, Layer, LayerBuilder, OpKind, Parameter, ShapeError
from mbc.ops.window import positive


@dataclass(frozen=True, slots=True)
class Lrn(Attributes):
    """Settings of local response normalisation. The window of channel c is [c - size // 2, c + (size - 1) // 2]."""

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0


def _shape(a: Lrn, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    x = inputs[0]
    if len(x.shape) < 2:
        raise ShapeError(f"lrn needs a tensor with rows and channels, but got {x}")
    for dy in inputs[1:]:
        if dy != x:
            raise ShapeError(f"value {x} and gradient {dy} differ")
    return (x,)


def _window_sums(x: Array, before: int, after: int) -> Array:
    """Return the sum over channels c - before … c + after, for every channel c."""
    channels = x.shape[1]
    total = x.copy()
    for shift in range(1, min(before, channels - 1) + 1):
        total[:, shift:] += x[:, :-shift]
    for shift in range(1, min(after, channels - 1) + 1):
        total[:, :-shift] += x[:, shift:]
    return total


def _divisor(a: Lrn, x: Array) -> Array:
    kind = x.dtype.type
    return kind(a.k) + kind(a.alpha / a.size) * _window_sums(x * x, a.size // 2, (a.size - 1) // 2)


def _evaluate(a: Lrn, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    (x,) = inputs
    return (x * _divisor(a, x) ** x.dtype.type(-a.beta),)


def _backward(a: Lrn, inputs: Sequence[Array], call: Call) -> tuple[Array, ...]:
    x, dy = inputs
    kind = x.dtype.type
    d = _divisor(a, x)
    power = d ** kind(-a.beta)
    # Channel c is in the windows of c - (size - 1) // 2 … c + size // 2.
    shared = _window_sums(dy * x * power / d, (a.size - 1) // 2, a.size // 2)
    return (dy * power - kind(2 * a.alpha * a.beta / a.size) * x * shared,)


def _gradient(g: Gradients, op: Operation, dy: str) -> tuple[str | None, ...]:
    return g.emit("lrn_backward", op.attributes, (*op.inputs, dy), *op.inputs)


OPS = (
    OpKind("lrn", Lrn, _shape, _evaluate, _gradient, divisible=True),
    OpKind("lrn_backward", Lrn, _shape, _backward, divisible=True),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    a = Lrn(settings["size"], settings["alpha"], settings["beta"], settings["k"])
    positive("size", (a.size,))
    if a.k <= 0 or a.alpha < 0:
        raise ShapeError(
            f"lrn divides by k + alpha * …, so k ({a.k}) must be positive and alpha ({a.alpha}) not negative"
        )
    return builder.emit("lrn", a, inputs)[0]


LAYERS = (
    Layer(
        "lrn",
        (
            Parameter("size", "int", 5),
            Parameter("alpha", "float", 1e-4),
            Parameter("beta", "float", 0.75),
            Parameter("k", "float", 1.0),
        ),
        _build,
        help="Local response normalisation across channels; alpha is divided by size.",
    ),
)

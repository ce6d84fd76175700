"""Functions of two or three pieces: clamp, comparison with a number; and tensors through which no gradient flows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mbc.ir.graph import Attributes
from mbc.ir.types import TensorType
from mbc.ops.base import Array, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.comparison import IN_C, RELATIONS
from mbc.ops.device import by_operator
from mbc.ops.framework_calls import Calls
from mbc.ops.pointwise import Pointwise, kinds_of


@dataclass(frozen=True, slots=True)
class Clamp(Attributes):
    """Settings of min(max(x, lower), upper).

    Attributes:
        lower: The lower bound; empty: there is none.
        upper: The upper bound; empty: there is none.
        strict: Whether the gradient at a bound is 0, as of hardtanh, rather than 1, as of clamp.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    strict: bool = False

    @property
    def lowest(self) -> float:
        """The lower bound, infinite if there is none."""
        return (*self.lower, -math.inf)[0]

    @property
    def highest(self) -> float:
        """The upper bound, infinite if there is none."""
        return (*self.upper, math.inf)[0]

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds, infinite if there is none."""
        return self.lowest, self.highest


@dataclass(frozen=True, slots=True)
class Indicator(Attributes):
    """Settings of a comparison: 1 where `x operator value` holds, else 0. `operator`: eq, ne, lt, le, gt, ge."""

    operator: str
    value: float


def _bounds(a: Clamp, x: Array) -> tuple[Array, Array]:
    lower, upper = a.bounds
    return x.dtype.type(lower), x.dtype.type(upper)


def _clamp(a: Clamp, x: Array) -> Array:
    lower, upper = _bounds(a, x)
    return np.minimum(np.maximum(x, lower), upper)


def _clamp_backward(a: Clamp, x: Array, dy: Array) -> Array:
    lower, upper = _bounds(a, x)
    inside = (x > lower) & (x < upper) if a.strict else (x >= lower) & (x <= upper)
    return np.where(inside, dy, 0).astype(dy.dtype)


def _first(_: Attributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return inputs[:1]


POINTWISE = (
    Pointwise(
        "clamp",
        _clamp,
        _clamp_backward,
        (
            "raised = x < lowest ? lowest : x; raised > highest ? highest : raised",
            "(strict != 0.0f ? x > lowest && x < highest : x >= lowest && x <= highest) ? dy : 0.0f",
        ),
        calls=Calls(
            "F.hardtanh(x, *bounds) if strict and lowest <= highest else torch.clamp(x, *bounds)",
            jax="jnp.clip(x, *bounds)",
            onnx="Clip(x, *bounds)",
        ),
        attributes=Clamp,
        reals=("lowest", "highest", "strict"),
    ),
)
OPS = (
    *kinds_of(POINTWISE),
    OpKind(
        "indicator",
        Indicator,
        _first,
        lambda a, inputs, call: (
            RELATIONS[a.operator](inputs[0], inputs[0].dtype.type(a.value)).astype(inputs[0].dtype),
        ),
        divisible=True,
        in_place=((0, 0),),
        device=by_operator("x", {o: f"x {c} value ? 1.0f : 0.0f" for o, c in IN_C.items()}, "value"),
        calls=Calls(
            "getattr(torch, operator)(x, value).to(x.dtype)", jax="getattr(x, f'__{operator}__')(value).astype(x.dtype)"
        ),
    ),
    # In a Network and in an unfinished training graph; `mbc.passes.detached` removes it.
    OpKind(
        "detach",
        NoAttributes,
        _first,
        lambda a, inputs, call: (inputs[0],),
        divisible=True,
        calls=Calls("x.detach()", jax="jax.lax.stop_gradient(x)"),
    ),
)


def clamped(builder: LayerBuilder, x: str, lower: float, upper: float, suffix: str = "") -> str:
    """Return the output of a clamp whose gradient at a bound is 1, which is emitted."""
    return builder.emit("clamp", _between(lower, upper), (x,), suffix)[0]


def _between(lower: float, upper: float, strict: bool = False) -> Clamp:
    if lower == math.inf or upper == -math.inf:
        raise ShapeError(f"the bounds are {lower} and {upper}, so that every number is outside")
    return Clamp((lower,) * math.isfinite(lower), (upper,) * math.isfinite(upper), strict)


def _build_clamp(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    if (settings["min"], settings["max"]) == (-math.inf, math.inf):
        raise ShapeError("clamp needs min, max or both")
    return clamped(builder, inputs[0], settings["min"], settings["max"])


def _build_hardtanh(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("clamp", _between(settings["min"], settings["max"], strict=True), inputs)[0]


def _build_indicator(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("indicator", Indicator(settings["operator"], settings["value"]), inputs)[0]


def _build_detach(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit("detach", NoAttributes(), inputs)[0]


LAYERS = (
    Layer(
        "clamp",
        (Parameter("min", "real", -math.inf), Parameter("max", "real", math.inf)),
        _build_clamp,
        help="min(max(x, `min`), `max`); its gradient at a bound is 1.",
    ),
    Layer(
        "hardtanh",
        (Parameter("min", "real", -1.0), Parameter("max", "real", 1.0)),
        _build_hardtanh,
        help="min(max(x, `min`), `max`); its gradient at a bound is 0.",
    ),
    Layer(
        "indicator",
        (Parameter("operator", "word", words=tuple(RELATIONS)), Parameter("value", "real", 0.0)),
        _build_indicator,
        help="x |> indicator(gt, 0.5): 1 where x > 0.5 and else 0. No gradient flows through it.",
    ),
    Layer("detach", (), _build_detach, help="x, through which no gradient flows."),
)

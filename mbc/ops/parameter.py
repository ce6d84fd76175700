"""Free tensors: parameters that belong to no other layer (LayerScale, position embeddings), and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mbc.ir.graph import Initializer, Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Expansion, Layer, LayerBuilder, NoAttributes, OpKind, Parameter, ShapeError
from mbc.ops.framework_calls import Calls
from mbc.ops.window import positive


def _same(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return inputs[:1]


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    """Return the state itself or its working copy, so that other operations read a tensor like any other."""
    return (e.working_copy(op.inputs[0]),)


OPS = (OpKind("state", NoAttributes, _same, expand=_expand, calls=Calls("x", jax="x")),)


def _shape_of(settings: dict[str, Any]) -> tuple[int, ...]:
    shape: tuple[int, ...] = settings["shape"]
    positive("shape", shape)
    if len(shape) > 8:
        raise ShapeError(f"shape has {len(shape)} dimensions; at most 8 are possible")
    return shape


def _emit(builder: LayerBuilder, shape: Sequence[int], start: Initializer, trained: bool) -> str:
    state = builder.state("", tuple(shape), start, trained)
    return builder.emit("state", NoAttributes(), (state,), "value")[0]


def _build_parameter(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    value, std = settings["value"], settings["std"]
    if std < 0 or not math.isfinite(std) or (std and value):
        raise ShapeError(f"std is {std} and value {value}: give either a positive std, or a value to start with")
    start = Initializer("normal", std) if std else Initializer("constant", value)
    return _emit(builder, _shape_of(settings), start, trained=True)


def _build_constant(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return _emit(builder, _shape_of(settings), Initializer("constant", settings["value"]), trained=False)


LAYERS = (
    Layer(
        "parameter",
        (Parameter("shape", "sizes"), Parameter("value", "float", 0.0), Parameter("std", "float", 0.0)),
        _build_parameter,
        (0, 0),
        "A trained tensor without rows: x * parameter(64). It starts as `value`, or normally distributed with `std`.",
    ),
    Layer(
        "constant",
        (Parameter("shape", "sizes"), Parameter("value", "float", 0.0)),
        _build_constant,
        (0, 0),
        "A tensor without rows that is not trained, but is part of checkpoints. It starts as `value`.",
    ),
)

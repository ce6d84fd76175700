"""The inner product of two tensors as a loss: the door to losses that another program computes.

The gradient of sum(y * g) with respect to y is g. If g is the gradient of another program's loss with respect to y, the
step computes the gradients of that loss.
"""

from __future__ import annotations

from typing import Any

from mbc.ir.graph import Operation
from mbc.ir.types import TensorType
from mbc.ops.base import Expansion, Layer, LayerBuilder, NoAttributes, OpKind, ShapeError, master
from mbc.ops.framework_calls import Calls
from mbc.ops.reduce import Reduce

INNER_PRODUCT = "inner_product"


def _shape(_: NoAttributes, inputs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    if inputs[0] != inputs[1]:
        raise ShapeError(f"an inner product needs two tensors of one type, but got {inputs[0]} and {inputs[1]}")
    return (TensorType((1,), master(inputs[0].dtype)),)


def _expand(e: Expansion, op: Operation, training: bool) -> tuple[str, ...]:
    axes = tuple(range(1, len(e.type(op.inputs[0]).shape)))
    return e.emit("row_reduce_dot", Reduce(axes, (1,)), op.inputs, op.outputs, op.name)


_SUM = "(wide(x) * wide(y)).sum()"
OPS = (
    OpKind(INNER_PRODUCT, NoAttributes, _shape, expand=_expand, reduces=True, loss=True, calls=Calls(_SUM, jax=_SUM)),
)


def _build(builder: LayerBuilder, settings: dict[str, Any], inputs: tuple[str, ...]) -> str:
    return builder.emit(INNER_PRODUCT, NoAttributes(), inputs)[0]


LAYERS = (
    Layer(
        INNER_PRODUCT,
        (),
        _build,
        (2, 2),
        "(y, g) |> inner_product: the sum of all products y g, not a mean. Its gradient with respect to y is g: give "
        "the gradient of a loss that another program computes.",
        loss=True,
    ),
)

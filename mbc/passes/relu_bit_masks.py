"""ReLU bit masks: the gradient of ReLU reads a bit mask of ReLU's output instead of the output.

The gradient of ReLU needs only the sign of its output. A step that stores the signs, eight to a byte, need not read the
output again, nor keep it for that. This is done after a residual sum; elsewhere the sign is recomputed from operands
that are read anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.ops.relu_mask import CHANNELS


def residual_relus(graph: TrainingGraph) -> tuple[str, ...]:
    """Return the names of every ReLU after a residual sum whose gradient could read a bit mask."""
    makers = {value: op for op in graph.train for value in op.outputs}
    read = {op.inputs[0] for op in graph.train if op.kind == "relu_backward"}
    return tuple(
        op.name
        for op in graph.train
        if op.kind == "relu"
        and op.outputs[0] in read
        and (maker := makers.get(op.inputs[0])) is not None
        and maker.kind == "add"
        and _channels(graph.values[op.outputs[0]]) % CHANNELS == 0
    )


def mask_relus(graph: TrainingGraph, relus: Collection[str]) -> TrainingGraph:
    """Return the graph with a `relu_mask` after each of these ReLUs, and `relu_backward_masked` for their gradients.

    The gradients keep their names. The bit mask of `y` is `y.mask`.
    """
    values = dict(graph.values)
    masks: dict[str, str] = {}  # by the value whose sign they hold
    train: list[Operation] = []
    for op in graph.train:
        if op.name in relus:
            (y,) = op.outputs
            name = masks[y] = f"{y}.mask"
            assert name not in values
            kind = KINDS["relu_mask"]
            (type_,) = kind.shape(NoAttributes(), (values[y].type,))
            values[name] = replace(values[y], name=name, type=type_)
            train += [op, Operation(f"{op.name}.mask", kind.name, (y,), (name,), NoAttributes(), op.span)]
        elif op.kind == "relu_backward" and op.inputs[0] in masks:
            y, dy = op.inputs
            train.append(replace(op, kind="relu_backward_masked", inputs=(dy, masks[y])))
        else:
            train.append(op)
    return replace(graph, values=values, train=tuple(train))


def _channels(value: Value) -> int:
    return value.type.shape[1] if len(value.type.shape) > 1 else 1

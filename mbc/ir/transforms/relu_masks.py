"""relu's gradient by the signs of its output, in the place of the output.

Of relu's output its gradient reads the sign only. Where a step keeps the signs, eight to a byte, it need not read the
output again, nor keep it for that. Behind a residual sum nothing else tells what relu let through: elsewhere it is
recomputed of what is read anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mbc.ir.graph import Operation, TrainingGraph, Value
from mbc.ops import KINDS
from mbc.ops.base import NoAttributes
from mbc.ops.signs import CHANNELS


def relus_behind_sums(graph: TrainingGraph) -> tuple[str, ...]:
    """The names of every relu behind a sum whose gradient could be told by signs."""
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


def with_signs(graph: TrainingGraph, relus: Collection[str]) -> TrainingGraph:
    """The graph with `relu_signs` behind each of these, and `relu_backward_signs` for their gradients, which keep their
    names. The signs of `y` are `y.signs`."""
    values = dict(graph.values)
    signs: dict[str, str] = {}  # by what they are the signs of
    train: list[Operation] = []
    for op in graph.train:
        if op.name in relus:
            (y,) = op.outputs
            name = signs[y] = f"{y}.signs"
            assert name not in values
            kind = KINDS["relu_signs"]
            (type_,) = kind.shape(NoAttributes(), (values[y].type,))
            values[name] = replace(values[y], name=name, type=type_)
            train += [op, Operation(f"{op.name}.signs", kind.name, (y,), (name,), NoAttributes(), op.span)]
        elif op.kind == "relu_backward" and op.inputs[0] in signs:
            y, dy = op.inputs
            train.append(replace(op, kind="relu_backward_signs", inputs=(dy, signs[y])))
        else:
            train.append(op)
    return replace(graph, values=values, train=tuple(train))


def _channels(value: Value) -> int:
    return value.type.shape[1] if len(value.type.shape) > 1 else 1

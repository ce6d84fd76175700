"""A copy of the control block for random numbers, so that updates do not wait for the last gradient of a dropout.

The guard overwrites the control block before the first update, and the gradient of a dropout reads that block. So all
gradients of the layers behind the first dropout were live together. With the copy a gradient's bytes are free as soon
as the parameter is updated, and dropouts can be recomputed at any time. The copy costs a launch, of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, Value
from mbc.ops.base import NoAttributes
from mbc.ops.random import Dropout
from mbc.ops.update import Guard


def copy_control(operations: Sequence[Operation], values: dict[str, Value]) -> list[Operation]:
    """Return the operations with dropouts that read a copy of the control block, where their gradients read it.

    A guard that reads gradients, or the sum of several mini-batches, follows the backward pass in any case. Then
    nothing changes.

    Args:
        operations: The operations of a step.
        values: Gets `copy.<control block>`.
    """
    drawn = [op for op in operations if isinstance(op.attributes, Dropout)]
    guard = next((op for op in operations if op.kind == "guard" and op.attributes == Guard()), None)
    if guard is None or not any(op.kind.endswith("_backward") for op in drawn):
        return [*operations]
    control, _, *gradients = guard.inputs
    if gradients:
        return [*operations]
    name = f"copy.{control}"
    values[name] = Value(name, values[control].type)
    written: list[Operation] = []
    for op in operations:
        if op is drawn[0]:
            written.append(Operation(name, "copy_control", (control,), (name,), NoAttributes()))
        written.append(replace(op, inputs=(*op.inputs[:-1], name)) if isinstance(op.attributes, Dropout) else op)
    return written

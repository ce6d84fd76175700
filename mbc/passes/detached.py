"""Removal of `detach`: a detached tensor becomes the tensor itself.

`detach` stops gradients, and has no effect once the backward pass is written. Then operations that read its result read
the tensor itself, and nothing is copied. A result that must stay, an output of the network, is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation
from mbc.ops.activation import Scale


def without_detached(operations: Sequence[Operation], wanted: Sequence[str]) -> list[Operation]:
    """Return the operations without `detach`; the values `wanted` stay."""
    itself: dict[str, str] = {}
    kept: list[Operation] = []
    for op in operations:
        inputs = tuple(itself.get(value, value) for value in op.inputs)
        if op.kind != "detach":
            kept.append(op if inputs == op.inputs else replace(op, inputs=inputs))
            continue
        itself[op.outputs[0]] = inputs[0]
        if op.outputs[0] in wanted:
            kept.append(replace(op, kind="scale", inputs=inputs, attributes=Scale(1.0)))
    return kept

"""Commutes the gradients of relu and of a maximum pool after it, so that fewer bytes move.

relu and maximum pooling can change places: relu lets the larger of two pass at least as much. So the gradient may go
through relu first, by the pooled image p, and then to where the maxima were. To the bit it is the same: an index points
to an element y that equals p (the first of equals; the last NaN), so that y > 0 exactly where p > 0, and a pixel's
gradients are either all let through or all zero. And relu's gradient is then computed at the size of the pooled image,
and relu's output need not be kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, Value


def relu_behind_pool(
    operations: Sequence[Operation], values: dict[str, Value], results: Sequence[str]
) -> list[Operation]:
    """`operations` with every `relu_backward(y, max_pool_backward(index, dp))` as `max_pool_backward(index,
    relu_backward(p, dp))`, where p and index are the maximum pool of y and nobody else reads what was between the two.

    `values` gets the gradient of the pooled image behind relu, `<between>.pooled`, and loses what was between: of dp
    there may be several readers, as where branches are summed. `results` are read after the end.
    """
    makers = {value: op for op in operations for value in op.outputs}
    reads = Counter(value for op in operations for value in op.inputs)
    reads.update(results)
    changed: dict[str, Operation] = {}
    for relu in operations:
        if relu.kind != "relu_backward":
            continue
        y, between = relu.inputs
        gather = makers.get(between)
        if gather is None or gather.kind != "max_pool_backward" or reads[between] > 1:
            continue
        index, dp = gather.inputs
        pool = makers.get(index)
        if pool is None or pool.kind != "max_pool" or pool.inputs != (y,):
            continue
        name = f"{between}.pooled"
        assert name not in values
        values[name] = replace(values[dp], name=name)
        del values[between]
        changed[gather.name] = replace(relu, inputs=(pool.outputs[0], dp), outputs=(name,))
        changed[relu.name] = replace(gather, inputs=(index, name), outputs=relu.outputs)
    return [changed.get(op.name, op) for op in operations]

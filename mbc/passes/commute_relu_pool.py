"""Commutes the gradients of ReLU and of a maximum pool after it, so that fewer bytes move.

ReLU and maximum pooling commute, because ReLU is monotonic. So the gradient may go through ReLU first, at the size of
the pooled image p, and then to the positions of the maxima. The bits are equal. An index points to an element y that
equals p (the first of equals; the last NaN), so that y > 0 exactly where p > 0. Hence the gradients of a pixel all pass
or are all zero. ReLU's gradient is then computed at the size of the pooled image, and does not need ReLU's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation, Value


def relu_behind_pool(
    operations: Sequence[Operation], values: dict[str, Value], results: Sequence[str]
) -> list[Operation]:
    """Return the operations with the gradient of ReLU before that of a maximum pool.

    Every `relu_backward(y, max_pool_backward(index, dp))` becomes `max_pool_backward(index, relu_backward(p, dp))`,
    where p and index are the maximum pool of y, and no other operation reads the value between the two.

    Args:
        operations: The operations of a step.
        values: Gets the gradient of the pooled image after ReLU, `<between>.pooled`, and loses the value between. dp
            may have several readers, for example where branches are summed.
        results: Values that are read after the step.
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

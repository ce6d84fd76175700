"""Root mean square normalisation over channels, as sources write it, as one operation.

`x * (x |> pow(2) |> mean(1, keep=true) + eps |> pow(-0.5)) * weight` is eleven passes over memory one by one, forward
and backward, of which one operation each way needs five.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from mbc.ir.graph import Network, Operation, Value
from mbc.ops.activation import Scale
from mbc.ops.arithmetic import Broadcast
from mbc.ops.elementary import Power
from mbc.ops.reduce import Reduce
from mbc.ops.rms_norm import RmsNorm


def join_rms_norms(network: Network) -> Network:
    """`network` with each such product as `rms_norm`, where nobody reads what lies between. What is not read any more
    stays in the network, and is no part of a training graph."""
    makers = {value: operation for operation in network.operations for value in operation.outputs}
    reads = Counter(value for operation in network.operations for value in operation.inputs)
    reads.update((*network.outputs, *(value for value, _ in network.losses)))
    reads.update(value for _, terms in network.metrics for value, _ in terms)
    values, written = dict(network.values), list[Operation]()
    for operation in network.operations:
        found = _rms_norm(operation, makers, reads, network.values)
        if found is not None:
            x, inverse, weight, attributes = found
            name = f"{operation.outputs[0]}.inverse"
            assert name not in values
            values[name] = replace(values[inverse], name=name)
            operation = replace(
                operation,
                kind="rms_norm",
                inputs=(x, weight),
                outputs=(*operation.outputs, name),
                attributes=attributes,
            )
        written.append(operation)
    return replace(network, values=values, operations=tuple(written))


def _rms_norm(
    operation: Operation, makers: Mapping[str, Operation], reads: Counter[str], values: Mapping[str, Value]
) -> tuple[str, str, str, RmsNorm] | None:
    """What is normalised, the inverse root mean squares, the weight of each channel, and eps; None where `operation` is
    no product of these."""

    def alone(value: str, kind: str) -> Operation | None:
        """What makes `value`, which nobody else reads, if it is of that kind."""
        maker = makers.get(value)
        return maker if maker is not None and maker.kind == kind and reads[value] == 1 else None

    if operation.attributes != Broadcast("mul"):
        return None
    normal, scale = operation.inputs
    weight, product = makers.get(scale), alone(normal, "broadcast")
    if weight is None or weight.kind != "state" or product is None or product.attributes != Broadcast("mul"):
        return None
    x, inverse = product.inputs
    shape = values[x].type.shape
    root = alone(inverse, "pow")
    shifted = root and alone(root.inputs[0], "scale")
    mean = shifted and alone(shifted.inputs[0], "reduce_sum")
    square = mean and alone(mean.inputs[0], "pow")
    if not (root and shifted and mean and square) or not values[x].per_sample or len(shape) < 2:
        return None
    shift, averages = shifted.attributes, mean.attributes
    assert isinstance(shift, Scale) and isinstance(averages, Reduce)
    fits = (
        (root.attributes, square.attributes, square.inputs) == (Power(-0.5), Power(2.0), (x,))
        and (averages.axes, averages.shape) == ((1,), (1, *shape[2:]))
        and math.isclose(averages.factor, 1 / shape[1])
        and (shift.factor, values[scale].type.shape) == (1.0, shape[1:2])
        and shift.offset > 0
    )
    return (x, inverse, weight.inputs[0], RmsNorm(shift.offset)) if fits else None

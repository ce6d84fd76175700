"""Root mean square normalisation over channels, as sources write it, as one operation.

`x * (x |> pow(2) |> mean(1, keep=true) + eps |> pow(-0.5)) * weight` is eleven passes over memory one by one, forward
and backward, of which one operation each way needs five.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from mbc.ir.graph import Attributes, Network, Operation, Value
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

    def behind(value: str, attributes: Attributes) -> str | None:
        """What `value`, which nobody else reads, is made of, by an operation with these attributes."""
        maker = makers.get(value)
        made = maker is not None and maker.attributes == attributes and reads[value] == 1
        return maker.inputs[0] if maker is not None and made else None

    if operation.attributes != Broadcast("mul"):
        return None
    normal, scale = operation.inputs
    weight, product = makers.get(scale), makers.get(normal)
    if weight is None or weight.kind != "state" or product is None or reads[normal] > 1:
        return None
    if product.attributes != Broadcast("mul") or len(values[normal].type.shape) < 2:
        return None
    x, inverse = product.inputs
    shape = values[x].type.shape
    if values[scale].type.shape != shape[1:2] or not values[x].per_sample:
        return None
    shifted = behind(inverse, Power(-0.5))
    eps = makers[shifted].attributes if shifted in makers else None
    if shifted is None or not isinstance(eps, Scale) or eps.factor != 1.0 or eps.offset <= 0:
        return None
    mean = behind(shifted, eps)
    reduced = makers[mean].attributes if mean in makers else None
    if mean is None or not isinstance(reduced, Reduce) or makers[mean].kind != "reduce_sum":
        return None
    averages = reduced.axes == (1,) and reduced.shape == (1, *shape[2:])
    square = behind(mean, reduced)
    if not averages or not math.isclose(reduced.factor, 1 / shape[1]) or square is None:
        return None
    if behind(square, Power(2.0)) != x:
        return None
    return x, inverse, weight.inputs[0], RmsNorm(eps.offset)

"""Root mean square normalisation over channels, from the operations of a source to one operation.

`x * (x |> pow(2) |> mean(1, keep=true) + eps |> pow(-0.5)) * weight`, operation by operation, stores and reads values
that a kernel with all channels of a pixel needs only once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mbc.ir.graph import Network, Operation, Value
from mbc.ops.activation import Scale
from mbc.ops.arithmetic import Broadcast
from mbc.ops.elementary import Power
from mbc.ops.reduce import Reduce
from mbc.ops.rms_norm import RmsNorm
from mbc.passes.uses import Uses


def join_rms_norms(network: Network) -> Network:
    """Return the network with each such product as `rms_norm`, if no other operation reads the values between.

    Operations that are not read any more stay in the network, but are not part of a training graph.
    """
    uses, values, written = Uses.of(network), dict(network.values), list[Operation]()
    for operation in network.operations:
        norm = _rms_norm(operation, uses, network.values)
        if norm is not None:
            x, inverse, weight, attributes = norm
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


def _rms_norm(operation: Operation, uses: Uses, values: Mapping[str, Value]) -> tuple[str, str, str, RmsNorm] | None:
    """Return the operands of the normalisation that `operation` ends; None if it ends none.

    They are the normalised value, the inverse root mean squares, the weight of each channel, and the attributes with
    eps.
    """
    if operation.attributes != Broadcast("mul"):
        return None
    normal, scale = operation.inputs
    weight, product = uses.makers.get(scale), uses.sole(normal, "broadcast")
    if weight is None or weight.kind != "state" or product is None or product.attributes != Broadcast("mul"):
        return None
    x, inverse = product.inputs
    shape = values[x].type.shape
    root = uses.sole(inverse, "pow")
    shifted = root and uses.sole(root.inputs[0], "scale")
    mean = shifted and uses.sole(shifted.inputs[0], "reduce_sum")
    square = mean and uses.sole(mean.inputs[0], "pow")
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

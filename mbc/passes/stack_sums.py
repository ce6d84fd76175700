"""Sums over the axis of a stack as sums of its parts, which then need not be stacked.

`stack(a, b)` has one more axis than `a`. Selective kernels (SKNet) sum over it, alone and after a product with one
number for each part and channel: `sum(stack(a, b) * w)` is `a * w[0] + b * w[1]`. With sums of parts, there is no value
with more axes, no copy of the parts and no repeated gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mbc.ir.graph import Attributes, Network, Operation, Value
from mbc.ops import KINDS
from mbc.ops.activation import Scale
from mbc.ops.arithmetic import Broadcast
from mbc.ops.base import NoAttributes
from mbc.ops.broadcast import gate_shape
from mbc.ops.rearrange import Split
from mbc.ops.reduce import Reduce
from mbc.ops.shape import Unflatten
from mbc.passes.uses import Uses


@dataclass(frozen=True, slots=True)
class _Stack:
    """A stack: its `parts`, stacked along axis 1, and the `weights` that multiply it, one for each part and channel."""

    parts: tuple[str, ...]
    weights: str | None = None


def sum_parts(network: Network) -> Network:
    """Return the network with each `reduce_sum` over the axis of a stack as a sum of its parts.

    If other operations also read a product of the stack, the product is summed as it is. The stack stays in the
    network; if no other operation reads it, it is not part of a training graph.
    """
    uses, values, written = Uses.of(network), dict(network.values), list[Operation]()
    for operation in network.operations:
        stack = _summed_stack(operation, uses, network.values)
        written += [operation] if stack is None else _sum(operation, stack, values)
    return replace(network, values=values, operations=tuple(written))


def _summed_stack(operation: Operation, uses: Uses, values: Mapping[str, Value]) -> _Stack | None:
    """Return the stack over whose axis `operation` sums; None if it is no such sum."""
    if not isinstance(operation.attributes, Reduce) or operation.kind != "reduce_sum":
        return None
    (x,) = operation.inputs
    shape, weights = values[x].type.shape, None
    if operation.attributes.axes != (1,) or operation.attributes.shape != shape[2:] or not values[x].per_sample:
        return None
    product = uses.sole(x, "broadcast")
    if product is not None and product.attributes == Broadcast("mul"):
        x, weights = product.inputs
        per_channel = (*shape[:3], *(1,) * (len(shape) - 3))
        if len(shape) < 4 or not values[weights].per_sample or values[weights].type.shape != per_channel:
            return None
    joined = uses.makers.get(x)
    if joined is None or joined.kind != "concat" or len(joined.inputs) < 2:
        return None
    parts = [uses.makers.get(part) for part in joined.inputs]
    if not all(part is not None and part.attributes == Unflatten((1, *shape[2:])) for part in parts):
        return None
    return _Stack(tuple(part.inputs[0] for part in parts if part is not None), weights)


def _sum(operation: Operation, stack: _Stack, values: dict[str, Value]) -> list[Operation]:
    """Return the operations that compute the output of `operation` from the parts; `values` gets the values between."""
    written: list[Operation] = []
    emit = partial(_emit, operation, values, written)
    assert isinstance(operation.attributes, Reduce)
    factor, count, terms = operation.attributes.factor, len(stack.parts), stack.parts
    if stack.weights is not None:
        names = tuple(f"weights{number}" for number in range(count))
        gate = Unflatten(gate_shape(values[terms[0]].type)[1:])
        weights = emit("split", Split((1,) * count), (stack.weights,), names)
        gates = [emit("unflatten", gate, (w,), (f"gate{i}",))[0] for i, w in enumerate(weights)]
        pairs = zip(stack.parts, gates, strict=True)
        terms = [emit("broadcast_mul", NoAttributes(), pair, (f"term{i}",))[0] for i, pair in enumerate(pairs)]
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        last = number + 1 == count and factor == 1.0
        (total,) = emit("add", NoAttributes(), (total, term), ("" if last else f"sum{number}",))
    if factor != 1.0:
        emit("scale", Scale(factor), (total,), ("",))
    return written


def _emit(
    operation: Operation,
    values: dict[str, Value],
    written: list[Operation],
    kind: str,
    attributes: Attributes,
    inputs: Sequence[str],
    suffixes: Sequence[str],
) -> tuple[str, ...]:
    """Append an operation that replaces a part of `operation`, and return its outputs.

    The output without a suffix is that of `operation`.
    """
    (own,) = operation.outputs
    types = KINDS[kind].shape(attributes, tuple(values[value].type for value in inputs))
    names: list[str] = []
    for suffix, type_ in zip(suffixes, types, strict=True):
        names.append(f"{own}.{suffix}" if suffix else own)
        if suffix:
            assert names[-1] not in values
            values[names[-1]] = replace(values[own], name=names[-1], type=type_)
    called = f"{operation.name}.{suffixes[0]}" if suffixes[0] else operation.name
    written.append(Operation(called, kind, tuple(inputs), tuple(names), attributes, operation.span))
    return tuple(names)

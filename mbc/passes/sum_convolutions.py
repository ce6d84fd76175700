"""Convolutions of a large concatenation as sums of convolutions of its parts.

The engines of libraries count the elements of a tensor by 32 bits, or become slow where they do not. A convolution of
one row cannot be divided into micro-batches, but its input channels can: the convolution of `concat(a, b)` is that of
`a` plus that of `b`, each with its part of the filter. The concatenation and its gradient then do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Network, Operation
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.rearrange import Split
from mbc.passes.graph_builder import GraphBuilder

MOST_ELEMENTS = (1 << 31) - 1  # of one row


def sum_convolutions(network: Network) -> Network:
    """Return the network without convolutions of concatenations that have too many elements."""
    builder = GraphBuilder(dict(network.values))
    joined = {op.outputs[0]: op.inputs for op in network.operations if op.kind == "concat"}
    for operation in network.operations:
        parts = joined.get(operation.inputs[0], ()) if operation.kind == "convolution" else ()
        if len(parts) < 2 or not _is_divisible(operation, builder):
            builder.operations.append(operation)
        else:
            _write_sum(operation, parts, builder)
    return replace(network, values=builder.values, operations=tuple(builder.operations))


def _is_divisible(operation: Operation, builder: GraphBuilder) -> bool:
    """Return whether a convolution is too large and reads all input channels for each result."""
    attributes, shape = operation.attributes, builder.type(operation.inputs[0]).shape
    assert isinstance(attributes, Convolution)
    return math.prod(shape[1:]) > MOST_ELEMENTS and attributes.groups == 1


def _write_sum(operation: Operation, parts: Sequence[str], builder: GraphBuilder) -> None:
    """Write a convolution of a concatenation as the sum of the convolutions of its parts."""
    name, sizes = operation.name, tuple(builder.type(part).shape[1] for part in parts)
    filters = builder.emit("split", Split(sizes), operation.inputs[1:], f"{name}.filter", span=operation.span)
    terms = [
        builder.emit("convolution", operation.attributes, pair, f"{name}.part", span=operation.span)[0]
        for pair in zip(parts, filters, strict=True)
    ]
    total = terms[0]
    for term in terms[1:-1]:
        (total,) = builder.emit("add", NoAttributes(), (total, term), f"{name}.sum", span=operation.span)
    last = replace(operation, kind="add", attributes=NoAttributes(), inputs=(total, terms[-1]))
    builder.operations.append(last)

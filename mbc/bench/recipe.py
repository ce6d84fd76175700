"""A network as other frameworks run it: layers with their biases, and the last use of each value."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbc.ir.graph import Network, Operation
from mbc.ops.random import Dropout, dropout_keep
from mbc.passes.graph_builder import live_operations


@dataclass(frozen=True, slots=True)
class Call:
    """One operation.

    Attributes:
        operation: Operation.
        operands: Inputs. The last input may be a bias, which the network adds in a separate operation.
        result: Name of the result, after a bias was added.
        dead: Values that no later call needs.
    """

    operation: Operation
    operands: tuple[str, ...]
    result: str
    dead: tuple[str, ...]

    def named(self, results: Any) -> dict[str, Any]:
        """Return the results of the call by name: one tensor, or all parts of a split tensor."""
        if isinstance(results, tuple | list):
            return dict(zip(self.operation.outputs, cast("Sequence[Any]", results), strict=True))
        return {self.result: results}


def recipe(network: Network, takes_bias: Collection[str]) -> tuple[Call, ...]:
    """Return the calls in order.

    Args:
        network: Network.
        takes_bias: Kinds of operations that accept a bias as their last operand.
    """
    kept = {*network.outputs, *(loss for loss, _ in network.losses)}
    operations = live_operations(network.operations, tuple(kept))  # without operations that only metrics need
    uses = Counter(name for operation in operations for name in operation.inputs)
    adds = {
        operation.inputs[0]: operation
        for operation in operations
        if operation.kind == "bias_add" and uses[operation.inputs[0]] == 1 and operation.inputs[0] not in kept
    }
    pairs: list[tuple[Operation, tuple[str, ...], str]] = []
    skipped: set[str] = set()
    for operation in operations:
        if operation.name in skipped:
            continue
        operands, result = operation.inputs, operation.outputs[0]
        add = adds.get(result) if operation.kind in takes_bias else None
        if add is not None:
            operands, result = (*operands, add.inputs[1]), add.outputs[0]
            skipped.add(add.name)
        pairs.append((operation, operands, result))
    last = {name: i for i, (_, operands, _) in enumerate(pairs) for name in operands}
    dead: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in kept:
            dead.setdefault(i, []).append(name)
    return tuple(Call(*pair, tuple(dead.get(i, ()))) for i, pair in enumerate(pairs))


def dropout_masks(network: Network, seed: int, step: int) -> Mapping[str, NDArray[np.bool_]]:
    """Return the mask of each dropout in step `step` of a module with `seed`, by the operation's name."""
    masks: dict[str, NDArray[np.bool_]] = {}
    for operation in network.operations:
        a = operation.attributes
        if isinstance(a, Dropout) and a.probability > 0:
            keyed = replace(a, key=zlib.crc32(operation.name.encode()))
            masks[operation.name] = dropout_keep(keyed, network.values[operation.outputs[0]].type.shape, 0, seed, step)
    return masks

"""A network as others run it: layers with their biases, and when each value is last needed."""

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
    """One operation. `operands` may have a bias at their end that the network adds in an operation of its own, whose
    result then is `result`. `dead`: values that nobody needs afterwards."""

    operation: Operation
    operands: tuple[str, ...]
    result: str
    dead: tuple[str, ...]

    def named(self, made: Any) -> dict[str, Any]:
        """What the call made by name: one tensor, or those of all parts of one that was split."""
        if isinstance(made, tuple | list):
            return dict(zip(self.operation.outputs, cast("Sequence[Any]", made), strict=True))
        return {self.result: made}


def recipe(network: Network, takes_bias: Collection[str]) -> tuple[Call, ...]:
    """The calls in order. `takes_bias`: kinds that take a bias as a last operand."""
    kept = {*network.outputs, *(loss for loss, _ in network.losses)}
    operations = live_operations(network.operations, tuple(kept))  # without what only metrics need
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
    """What each dropout keeps in step `step` of a module made with `seed`, by the operation's name."""
    found: dict[str, NDArray[np.bool_]] = {}
    for operation in network.operations:
        a = operation.attributes
        if isinstance(a, Dropout) and a.probability > 0:
            keyed = replace(a, key=zlib.crc32(operation.name.encode()))
            found[operation.name] = dropout_keep(keyed, network.values[operation.outputs[0]].type.shape, 0, seed, step)
    return found

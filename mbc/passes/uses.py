"""Who makes the values of a network, and how many read them: what a pass asks before it replaces operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.ir.graph import Network, Operation


@dataclass(frozen=True, slots=True)
class Uses:
    """`makers`: the operation of each value that one makes. `reads`: how often a value is read; outputs, losses and
    metrics of the network count."""

    makers: Mapping[str, Operation]
    reads: Counter[str]

    @staticmethod
    def of(network: Network) -> Uses:
        reads = Counter(value for operation in network.operations for value in operation.inputs)
        reads.update((*network.outputs, *(value for value, _ in network.losses)))
        reads.update(value for _, terms in network.metrics for value, _ in terms)
        return Uses({value: operation for operation in network.operations for value in operation.outputs}, reads)

    def sole(self, value: str, kind: str) -> Operation | None:
        """What makes `value`, if it is of that kind and `value` is read once."""
        maker = self.makers.get(value)
        return maker if maker is not None and maker.kind == kind and self.reads[value] == 1 else None

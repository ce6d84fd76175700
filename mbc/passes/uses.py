"""Makers and readers of the values of a network, for passes that replace operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mbc.ir.graph import Network, Operation


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of values.

    Attributes:
        makers: The operation that computes each value.
        reads: How often each value is read; outputs, losses and metrics of the network count.
    """

    makers: Mapping[str, Operation]
    reads: Counter[str]

    @staticmethod
    def of(network: Network) -> Uses:
        """Return the uses of the values of a network."""
        reads = Counter(value for operation in network.operations for value in operation.inputs)
        reads.update((*network.outputs, *(value for value, _ in network.losses)))
        reads.update(value for _, terms in network.metrics for value, _ in terms)
        return Uses({value: operation for operation in network.operations for value in operation.outputs}, reads)

    def sole(self, value: str, kind: str) -> Operation | None:
        """Return the operation that computes `value`, if it is of this kind and `value` is read once."""
        maker = self.makers.get(value)
        return maker if maker is not None and maker.kind == kind and self.reads[value] == 1 else None

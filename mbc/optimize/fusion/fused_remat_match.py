"""Matches of fused rematerialization in a training step (`mbc.optimize.remat.fused_remat` describes the technique)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mbc.ir.graph import Operation
from mbc.ops import KINDS
from mbc.ops.fused import join, names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.catalogue import FUSED_REMAT
from mbc.optimize.fusion.pattern import find


@dataclass(frozen=True, slots=True)
class FusedRemat:
    """A fused rematerialization: the launch of `operation` recomputes `value` and computes the `reductions` as well.

    Attributes:
        value: The recomputed value.
        producers: The operations that compute the value.
        reductions: The operations that the launch replaces.
        operation: The fused operation.
        inlined: A convolution that the launch recomputes and does not store.
    """

    value: str
    producers: frozenset[str]
    reductions: frozenset[str]
    operation: Operation
    inlined: frozenset[str] = frozenset()

    def can_replace(self, operation: Operation) -> bool:
        """Return whether the launch can replace that of an operation or group.

        The operation must compute the reductions, possibly with the value inlined, and nothing else that is read.
        """
        names = frozenset(names_of(operation))
        members = self.reductions | self.inlined | self.producers
        return self.reductions <= names <= members and set(operation.outputs) <= set(self.operation.outputs)


def all_fused_remats(table: CandidateTable) -> Iterator[FusedRemat]:
    """Yield every fused rematerialization, also those that have to be measured before they may be used."""
    program = table.graph.train
    producers = {output: operation for operation in program for output in operation.outputs}
    for pattern in FUSED_REMAT:
        (part,) = pattern.launches
        for operation in program:
            if operation.kind != pattern.statements[-1].kind:
                continue
            for binding in find(pattern, operation, producers):
                members = [binding.operations[number] for number in part.statements]
                joined = join(members, [binding.values[name] for name in part.writes])
                if not table.offered(joined):
                    continue
                reductions = frozenset(binding.operations[number].name for number in pattern.replaces)
                recomputed = [member for member in members if member.name not in reductions]
                outputs = {name for member in recomputed for name in member.outputs}
                (value,) = (name for name in joined.outputs if name in outputs)
                names = [member.name for member in recomputed]
                # The output of a convolution is not stored if another recomputed operation follows.
                inlined = int(len(names) > 1 and KINDS[recomputed[0].kind].flops is not None)
                yield FusedRemat(value, frozenset(names[inlined:]), reductions, joined, frozenset(names[:inlined]))

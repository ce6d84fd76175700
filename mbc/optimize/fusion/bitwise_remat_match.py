"""Bitwise matching rematerialization: convolutions that fused launches recompute and consume without storing them.

The module selects the convolutions for which the recomputing launches were measured to be faster (`REMAT_INSIDE`,
`REMAT_INSIDE_REDUCTIONS` and `PAIR_REDUCTIONS` of `mbc.optimize.fusion.catalogue_conv1x1`). Another kernel would round
some elements differently. So such a convolution runs only by kernels that give the same bits, even if they are slower,
and that loss is weighed against the time that the recomputing launches save.
"""

from __future__ import annotations

from collections.abc import Sequence

from mbc.ir.graph import Operation
from mbc.ops.fused import names_of
from mbc.optimize.candidates.estimates import RematKernels
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Fusion, is_measured


def with_bitwise_remat(fusion: Fusion) -> Fusion:
    """Return the fusion groups of the same step with the convolutions whose rematerialization saves time.

    A profile without such launches leaves plans unchanged.
    """
    every = _possible(fusion)
    if not every.table.recomputed:
        return fusion
    before, after = _Launches(fusion.programs().train), _Launches(every.programs().train)
    faster: dict[str, RematKernels] = {}
    for name, remat_kernels in every.table.recomputed.items():
        old, new = _around(name, before, after)
        if _fastest_us(every.table, new) < _fastest_us(fusion.table, old):
            faster[name] = remat_kernels
    return every.with_recomputed(faster) if faster else fusion


def _possible(fusion: Fusion) -> Fusion:
    """Return the fusion groups with all convolutions that some group recomputes.

    Where kernels of a convolution were measured, one of those has to give the same bits: an estimate must not stand in
    for it.
    """
    table = fusion.table
    recomputed: dict[str, RematKernels] = {}
    for group in fusion.possible[0]:
        for name, launches in group.recomputes.items() if is_measured(table, group) else ():
            kernels = frozenset(c.name for launch in launches for c in table.offered(launch))
            recomputed[name] = recomputed.get(name, RematKernels()) | kernels
    every = table.with_recomputed(recomputed)
    convolutions = (o for o in table.graph.train if o.name in recomputed)
    possible = {o.name for o in convolutions if (every.timed(o) if table.timed(o) else every.offered(o))}
    return fusion.with_recomputed({name: kernels for name, kernels in recomputed.items() if name in possible})


class _Launches:
    """A program with an index: for each operation, the positions of the launches that run this operation."""

    def __init__(self, program: Sequence[Operation]) -> None:
        """Build the index."""
        self.program = program
        self.running: dict[str, list[int]] = {}
        for position, launch in enumerate(program):
            for name in names_of(launch):
                self.running.setdefault(name, []).append(position)


def _around(name: str, *programs: _Launches) -> list[list[Operation]]:
    """Return, for each program, the launches that run an operation, and those that share operations with them."""
    around: list[set[int]] = [set() for _ in programs]
    pending = [name]
    while pending:
        running = pending.pop()
        for launches, positions in zip(programs, around, strict=True):
            new = set(launches.running.get(running, ())) - positions
            positions |= new
            pending += (other for position in new for other in names_of(launches.program[position]))
    return [
        [launches.program[p] for p in sorted(positions)] for launches, positions in zip(programs, around, strict=True)
    ]


def _fastest_us(table: CandidateTable, launches: Sequence[Operation]) -> float:
    return sum(min(c.time_us for c in table.candidates(launch, table.whole)) for launch in launches)

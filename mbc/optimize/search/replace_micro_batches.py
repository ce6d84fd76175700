"""Other kernels and divisions for operations of a draft, all else unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mbc.ir.graph import Operation
from mbc.ops.fused import SEPARATOR
from mbc.optimize.candidates.pareto import MicroBatch
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft, launches_of, renumbered
from mbc.plan.model import Buffer, Launch, Program


def replace_micro_batches(
    table: CandidateTable,
    draft: Draft,
    operations: Mapping[str, Operation],
    micro_batches: Mapping[str, Sequence[MicroBatch]],
) -> Draft:
    """Return the draft with other micro-batches wherever an operation or a fusion group is launched.

    Recomputations are included. The launches of each operation must be consecutive.

    Args:
        table: Candidates of the graph.
        draft: Launches and buffers.
        operations: Operations and fusion groups by name.
        micro_batches: The new micro-batches by name; others stay.
    """
    buffers = list(draft.buffers)

    def of(program: Program) -> Program:
        launches: list[Launch] = []
        start = 0
        while start < len(program.launches):
            launch = program.launches[start]
            stop = start + 1
            while stop < len(program.launches) and _continues(draft, program.launches[stop], launch):
                stop += 1
            name = SEPARATOR.join(launch.operations)
            if name not in micro_batches:
                launches += program.launches[start:stop]
            else:
                operands = _operands(draft.buffers, launch)
                launches += launches_of(table, operations[name], micro_batches[name], operands, buffers)
            start = stop
        return replace(program, launches=tuple(launches))

    train, infer = of(draft.train), of(draft.infer)
    used = {*draft.persistent, *train.entry, *infer.entry}
    for program in (train, infer):
        used |= {access.buffer for launch in program.launches for access in launch.accesses}
    # A buffer may alias one with a lower number only, so buffers keep their order.
    return renumbered(replace(draft, train=train, infer=infer, buffers=tuple(buffers)), sorted(used))


def _continues(draft: Draft, launch: Launch, first: Launch) -> bool:
    """Return whether a launch is a further micro-batch of the region that begins with `first`."""
    return (
        bool(first.operations)
        and launch.operations == first.operations
        and _operands(draft.buffers, launch) == _operands(draft.buffers, first)
    )


def _operands(buffers: Sequence[Buffer], launch: Launch) -> list[int]:
    return [access.buffer for access in launch.accesses if buffers[access.buffer].value is not None]

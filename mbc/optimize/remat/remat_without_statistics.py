"""Recomputes a convolution with statistics in its epilogue by the same convolution without them.

Without statistics the convolution takes less, and gives the same bits where both are built from the same source
(`mbc.kernels.cuda.without_statistics`). Statistics, which are small, are always kept (`mbc.optimize.remat.undo_log`):
recomputed with the convolution they would seem to cost nothing, and force the launch that computes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation
from mbc.kernels.cuda import without_statistics
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.ops.fused import names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Run
from mbc.plan.model import Kernel, Launch


def repeated_without_statistics(
    table: CandidateTable, draft: Draft, runs: Sequence[Run], program: Sequence[Operation]
) -> tuple[Run, ...]:
    """The runs of a training program, with the launch that repeats each where another one is faster. `program`: the
    operations of the runs."""
    summing = {names_of(operation): operation for operation in program if operation.kind == WITH_STATISTICS}
    alone = {operation.name: operation for operation in table.graph.train}
    found = list(runs)
    for i, run in enumerate(runs):
        launch = draft.train.launches[run.start]
        if run.stop == run.start + 1 and launch.operations in summing:
            repeat = _bare(table, draft, launch, alone[launch.operations[0]])
            if repeat is not None and repeat.work.time_us < run.time_us:
                found[i] = replace(run, repeat=repeat)
    return tuple(found)


def _bare(table: CandidateTable, draft: Draft, launch: Launch, convolution: Operation) -> Launch | None:
    work = launch.work
    assert isinstance(work, Kernel)
    by_value = {draft.buffers[access.buffer].value: access for access in launch.accesses}
    accesses = tuple(by_value[name] for name in (*convolution.inputs, *convolution.outputs))
    layouts = tuple(draft.buffers[access.buffer].layout for access in accesses)
    for candidate in table.offered(convolution):
        same = (candidate.name, candidate.layouts, candidate.measured) == (
            without_statistics(work.name),
            layouts,
            work.measured,
        )
        if same and not candidate.workspace_bytes:
            kernel = Kernel(
                candidate.provider, candidate.name, candidate.settings, candidate.time_us, candidate.measured
            )
            return Launch(kernel, (convolution.name,), launch.stream, accesses)
    return None

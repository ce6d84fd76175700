"""Recomputes a convolution with statistics in its epilogue by the same convolution without them.

Without statistics the convolution takes less time, and gives the same bits where both are built from the same source
(`mbc.kernels.cuda.without_statistics`). Statistics, which are small, are always kept (`mbc.optimize.remat.undo_log`).
If they were recomputed with the convolution, they would seem to cost nothing, and would force the launch that computes
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mbc.ir.graph import Operation
from mbc.kernels.cuda import without_statistics
from mbc.kernels.statistics import STATISTICS_GROUPS
from mbc.ops.fused import names_of
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.schedule.emit_launches import Draft
from mbc.optimize.schedule.regions import Region
from mbc.plan.model import Kernel, Launch


def remat_without_statistics(
    table: CandidateTable, draft: Draft, regions: Sequence[Region], program: Sequence[Operation]
) -> tuple[Region, ...]:
    """Return the regions of a training program, each with the launch that recomputes it if another one is faster.

    Args:
        table: Candidates of the graph.
        draft: Launches and buffers.
        regions: Regions of the training program.
        program: Operations of the regions.
    """
    summing = {names_of(operation): operation for operation in program if operation.kind in STATISTICS_GROUPS}
    alone = {operation.name: operation for operation in table.graph.train}
    changed = list(regions)
    for i, region in enumerate(regions):
        launch = draft.train.launches[region.start]
        if region.stop == region.start + 1 and launch.operations in summing:
            remat_launch = _without_statistics(table, draft, launch, alone[launch.operations[0]])
            if remat_launch is not None and remat_launch.work.time_us < region.time_us:
                changed[i] = replace(region, remat_launch=remat_launch)
    return tuple(changed)


def _without_statistics(table: CandidateTable, draft: Draft, launch: Launch, convolution: Operation) -> Launch | None:
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

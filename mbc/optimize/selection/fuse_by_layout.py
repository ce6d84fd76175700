"""Fusion where launches exist in one layout only: a group may save less than its changes of layout cost."""

from __future__ import annotations

from mbc.ir.types import Layout
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs, fuse
from mbc.optimize.selection.select import choose


def fastest_fused(table: CandidateTable, limit_bytes: int | None = None) -> Programs:
    """Return both programs with the fusion groups that make them fastest.

    Groups are chosen with each launch in its best layout, and again with all images in one layout. The best of these
    choices is the one that takes the least time in the layouts chosen for it without a limit.

    Args:
        table: Candidates of the graph.
        limit_bytes: Workspace that a launch may need; None: no limit.
    """
    key = f"fused {limit_bytes}"
    if key not in table.groups:
        fused = dict.fromkeys(fuse(table, limit_bytes, layout) for layout in (None, *Layout))
        table.groups[key] = (
            min(fused, key=lambda programs: choose(table, {}, programs=programs).train_us)
            if len(fused) > 1
            else next(iter(fused))
        )
    return table.groups[key]

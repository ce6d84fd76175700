"""Fusion where launches exist in one layout only: what a group saves may be less than its changes of layout cost."""

from __future__ import annotations

from mbc.ir.types import Layout
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.select_groups import Programs, fuse
from mbc.optimize.selection.select import choose


def fastest_fused(table: CandidateTable, limit_bytes: int | None = None) -> Programs:
    """Both programs with fusion groups that are chosen with each launch in its best layout, or with all images in one
    layout: whichever takes the least time in the layouts that are chosen for them without a limit."""
    key = f"fused {limit_bytes}"
    if key not in table.groups:
        found = dict.fromkeys(fuse(table, limit_bytes, layout) for layout in (None, *Layout))
        table.groups[key] = (
            min(found, key=lambda programs: choose(table, {}, programs=programs).train_us)
            if len(found) > 1
            else next(iter(found))
        )
    return table.groups[key]

"""What `mbc show --staircase` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.options import STAIRCASE
from mbc.report.columns import Column, render
from mbc.report.tables import over, time_cell
from mbc.staircase import Stair
from mbc.units import show_size

_STAIRS = (
    Column("without", shrinks=True, least=20),
    Column("arena", right=True),
    Column("host", right=True),
    Column("with overhead", right=True),
    Column("step", right=True),
    Column("over the first", right=True),
    Column("images/s", right=True, optional=1),
    Column(""),
)


def staircase_text(stairs: Sequence[Stair], width: int | None = None) -> str:
    """One row for each set of techniques that was left out."""
    first = next((s.figures for s in stairs if s.figures is not None), None)
    rows: list[tuple[str, ...]] = []
    for stair in stairs:
        left_out = ", ".join(t for t in STAIRCASE if t in stair.without) or "-"
        f = stair.figures
        if f is None or first is None:
            rows.append((left_out, *[""] * 6, "no plan was found"))
            continue
        rows.append(
            (
                left_out,
                show_size(f.arena_bytes),
                show_size(f.host_bytes) if f.host_bytes else "-",
                show_size(f.needed_bytes),
                time_cell(f.train_us, f.measured_share < 1),
                over(f.train_us, first.train_us),
                f"{f.images_per_s:,.0f}",
                "" if stair.fits else "exceeds the budget",
            )
        )
    return render(_STAIRS, rows, width)


def staircase_document(stairs: Sequence[Stair]) -> list[dict[str, Any]]:
    """The same for a script."""
    return [
        {
            "without": [t for t in STAIRCASE if t in stair.without],
            "fits": stair.fits,
            "figures": None if stair.figures is None else asdict(stair.figures),
        }
        for stair in stairs
    ]

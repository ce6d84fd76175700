"""The output of `mbc show --ablation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.ablation import Ablation
from mbc.options import ABLATION_ORDER
from mbc.report.columns import Column, render
from mbc.report.tables import host_note, outside_cell, over, time_cell
from mbc.units import show_rate, show_size

_COLUMNS = (
    Column("without", shrinks=True, least=20),
    Column("arena", right=True),
    Column("host", right=True),
    Column("with overhead", right=True),
    Column("step", right=True),
    Column("over the first", right=True),
    Column("images/s", right=True, optional=1),
    Column(""),
)


def ablation_text(ablations: Sequence[Ablation], width: int | None = None) -> str:
    """Format a table with a row for each set of techniques that was left out."""
    first = next((s.figures for s in ablations if s.figures is not None), None)
    rows: list[tuple[str, ...]] = []
    for ablated in ablations:
        left_out = ", ".join(t for t in ABLATION_ORDER if t in ablated.without) or "-"
        f = ablated.figures
        if f is None or first is None:
            rows.append((left_out, *[""] * 6, "no plan was found"))
            continue
        rows.append(
            (
                left_out,
                show_size(f.arena_bytes),
                outside_cell(f.host_bytes, f.peer_bytes),
                show_size(f.needed_bytes),
                time_cell(f.train_us, f.measured_share < 1),
                over(f.train_us, first.train_us),
                show_rate(f.images_per_s) if f.train_us else "-",
                "" if ablated.fits else "exceeds the budget",
            )
        )
    table = render(_COLUMNS, rows, width)
    note = host_note(table, (a.figures.host_bytes for a in ablations if a.figures is not None))
    return "\n\n".join((table, *note))


def ablation_document(ablations: Sequence[Ablation]) -> list[dict[str, Any]]:
    """Return the rows of the table for scripts."""
    return [
        {
            "without": [t for t in ABLATION_ORDER if t in ablated.without],
            "fits": ablated.fits,
            "figures": None if ablated.figures is None else asdict(ablated.figures),
        }
        for ablated in ablations
    ]

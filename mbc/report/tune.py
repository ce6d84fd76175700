"""The output of `mbc tune`, in which `~` marks images/s that are estimated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mbc.report.columns import Column, render
from mbc.report.fit import guess, reason
from mbc.report.memory import sparkline
from mbc.tune.goodput import Base, Row, Table
from mbc.tune.tuner import Spending
from mbc.tune.tuning_file import State
from mbc.units import show_rate, show_size

_BAR = 24
_COLUMNS = (
    Column("batch", right=True),
    Column("GPUs", right=True),
    Column("images/s", right=True),
    Column("noise scale", right=True, optional=2),
    Column("efficiency", right=True),
    Column("goodput", right=True),
    Column("", optional=3),
    Column("rate", right=True),
    Column("takes", right=True, optional=1),
    Column("", shrinks=True, least=12),
)


def tune_text(table: Table, base: Base, state: State, spent: Spending | None, width: int | None = None) -> str:
    """Format the table, the measurements behind it, and the chosen row."""
    lines = [render(_COLUMNS, [_cells(row, table, base) for row in table.rows], width), ""]
    if state.range_test is not None:
        test = state.range_test
        lines.append(
            f"range test, the loss at rates from {test.rates[0]:.2g} to {test.rates[-1]:.2g}: {_curve(test.losses)} "
            f"rate {test.chosen:.3g} at the base batch"
        )
    if state.noise is not None:
        lines.append(
            f"noise scale over {len(state.noise.history)} steps: {_curve(state.noise.history)} "
            f"{state.noise.value:.0f} rows"
        )
    if spent is not None and spent.range_steps + spent.noise_steps:
        took = spent.range_steps + spent.noise_steps
        lines.append(
            f"tuning took {took} steps of the base batch, {spent.share:.1%} of the {spent.training:,} of the training"
        )
    lines.append(why(table, base))
    if table.taken.momentum is not None and table.taken.momentum != base.momentum:
        lines.append(f"its rate is for momentum {table.taken.momentum:.3g}, not {base.momentum:g}")
    return "\n".join(lines)


def why(table: Table, base: Base) -> str:
    """Say which row is chosen, and why."""
    taken, fitting = table.taken, table.fitting
    on = f" on {taken.gpus} GPUs" if taken.gpus > 1 else ""
    if len(fitting) == 1:
        return f"takes batch {taken.batch}{on}: the only one that fits"
    same = [row for row in fitting if row.rows == base.rows]
    over = (
        f", {taken.goodput / max(row.goodput for row in same):.2f}x that of the base batch {same[0].batch}"
        if same
        else ""
    )
    if table.noise_scale is None:
        return (
            f"takes batch {taken.batch}{on}: most images/s{over}. The efficiency of larger batches is unknown: "
            "measure it with --data, or say --noise-scale"
        )
    faster = max(fitting, key=lambda row: row.goodput / row.efficiency)
    lost = (
        f"; batch {faster.batch} has more images/s, its rows have {faster.efficiency / taken.efficiency:.0%} of the "
        "efficiency"
        if faster.batch > taken.batch and faster is not taken
        else ""
    )
    return f"takes batch {taken.batch}{on}: most goodput{over}{lost}"


def tune_document(table: Table, base: Base, state: State, spent: Spending | None) -> dict[str, Any]:
    """Return the table for scripts."""
    return {
        "taken": _row_document(table.taken),
        "rows": [_row_document(row) for row in table.rows],
        "base": asdict(base),
        "noise_scale": table.noise_scale,
        "range_test": None if state.range_test is None else asdict(state.range_test),
        "noise": None if state.noise is None else asdict(state.noise),
        "spent": None if spent is None else {**asdict(spent), "share": spent.share},
        "why": why(table, base),
    }


def _row_document(row: Row) -> dict[str, Any]:
    document = {"batch": row.batch, "gpus": row.gpus, "rows": row.rows, "fits": row.probe.figures is not None}
    if row.probe.figures is None:
        return {**document, "why": reason(row.probe)}
    figures = {"images_per_s": row.probe.figures.images_per_s, "needed_bytes": row.probe.figures.needed_bytes}
    return {
        **document,
        **figures,
        "efficiency": row.efficiency,
        "goodput": row.goodput,
        "rate": row.rate,
        "momentum": row.momentum,
    }


def _cells(row: Row, table: Table, base: Base) -> tuple[str, ...]:
    figures = row.probe.figures
    if figures is None:
        return (str(row.batch), str(row.gpus), *[""] * 7, reason(row.probe))
    has_noise = table.noise_scale is not None
    notes = ["base"] * (row.rows == base.rows) + ["taken"] * (row is table.taken)
    return (
        str(row.batch),
        str(row.gpus),
        f"{guess(figures)}{show_rate(figures.images_per_s)}",
        f"{table.noise_scale:.0f}" if table.noise_scale is not None else "",
        f"{row.efficiency:.1%}" if has_noise else "",
        f"{guess(figures)}{show_rate(row.goodput)}",
        "█" * max(1, round(row.goodput / table.taken.goodput * _BAR)) if table.taken.goodput else "",
        "" if row.rate is None else f"{row.rate:.3g}",
        show_size(figures.needed_bytes),
        ", ".join(notes),
    )


def _curve(values: tuple[float, ...]) -> str:
    top = max(values, default=0.0)
    return sparkline([round(1000 * max(0.0, value) / top) if top else 0 for value in values], _BAR)

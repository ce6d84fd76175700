"""The output of `mbc nnunet plan`, in which `~` marks times that are estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.fit import Figures, Probe
from mbc.pytorch.nnunet.prospects import STEPS, Prospect
from mbc.report.columns import Column, render
from mbc.report.fit import guess, reason
from mbc.report.tables import time_cell
from mbc.units import show_given, show_range, show_size

_COLUMNS = (
    Column("plans", shrinks=True, optional=1),
    Column("configuration"),
    Column("batch x patch"),
    Column("fits"),
    Column("step", right=True),
    Column("its range", right=True),
    Column("epoch", right=True),
    Column("its range", right=True),
    Column("takes", right=True),
    Column("trains from", right=True),
)


def probe_line(name: str, probe: Probe) -> str:
    """Format a probe, for printing during the search."""
    size = show_size(probe.at) if name.endswith("within") else str(probe.at)
    f = probe.figures
    return f"{name} {size}: {reason(probe) if f is None else f'{time_cell(f.train_us, f.measured_share < 1)} a step'}"


def prospect_line(p: Prospect, number: int, count: int) -> str:
    """Return the line about configuration `number` of `count`, which is printed before the next one is planned."""
    f, c = p.probe.figures, p.configuration
    fits = "does not fit" if f is None else f"{_times(f, 1)[0]} a step, takes {show_size(f.needed_bytes)}"
    least = "" if p.least is None else f", trains from {show_size(p.least.budget_bytes)}"
    return f"{number} of {count}: {c.plans} {c.name}, {_size(c.batch, c.patch)}: {fits}{least}"


def prospects_text(prospects: Sequence[Prospect], gpu: str, budget_bytes: int, width: int | None = None) -> str:
    """Format a table of configurations, and a line for each largest batch or patch."""
    rows: list[tuple[str, ...]] = []
    lines: list[str] = []
    for p in prospects:
        c, f = p.configuration, p.probe.figures
        least = "?" if p.least is None else show_size(p.least.budget_bytes)
        figures = ("",) * 5 if f is None else (*_times(f, 1), *_times(f, STEPS), show_size(f.needed_bytes))
        rows.append((c.plans, c.name, _size(c.batch, c.patch), "no" if f is None else "yes", *figures, least))
        if p.largest is not None:
            lines.append(
                f"{c.plans} {c.name}: largest {_size(p.largest.batch, p.patch)}, {_times(p.largest, 1)[0]} a step, "
                f"takes {show_size(p.largest.needed_bytes)}"
            )
    return "\n".join((
        f"predicted for {gpu} within {show_given(budget_bytes)}; an epoch is {STEPS} steps, without validation", "",
        render(_COLUMNS, rows, width), *lines,
    ))  # fmt: skip


def prospects_document(prospects: Sequence[Prospect], gpu: str, budget_bytes: int, finished: bool) -> dict[str, Any]:
    """Return the predictions for scripts."""
    rows: list[dict[str, Any]] = []
    for p in prospects:
        f, least = p.probe.figures, p.least
        c = {**asdict(p.configuration), "divisors": p.configuration.divisors}
        rows.append({
            "configuration": c, "fits": f is not None, "figures": f and asdict(f),
            "epoch_s": f and STEPS * f.train_us / 1e6, "least": least and asdict(least),
            "refusal": None if f else reason(p.probe),
            "largest": p.largest and {**asdict(p.largest), "patch": p.patch},
        })  # fmt: skip
    return {"gpu": gpu, "budget_bytes": budget_bytes, "finished": finished, "rows": rows}


def _times(f: Figures, steps: int) -> tuple[str, str]:
    """Format the time of steps and its range."""
    low, high = steps * f.train_low_us, steps * f.train_high_us
    return time_cell(steps * f.train_us, guess(f) != ""), show_range(low, high)


def _size(batch: int, patch: Sequence[int]) -> str:
    return f"{batch} x {'x'.join(map(str, patch))}"

"""The output of `mbc fit`, in which `~` marks times that are estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mbc.errors import BudgetError
from mbc.fit import BatchFit, BudgetCurve, Figures, Probe
from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.options import UNLIMITED_BYTES
from mbc.report.columns import Column, render, without_columns
from mbc.report.tables import host_note, outside_cell, over, time_cell
from mbc.units import show_distinct, show_given, show_rate, show_size

_BAR = 24

_BATCHES = (
    Column("batch", right=True),
    Column("images/s", right=True),
    Column("", optional=2),
    Column("step", right=True),
    Column("over its bound", right=True, optional=1),
    Column("takes", right=True),
    Column("host", right=True, optional=3),
    Column("", shrinks=True, least=12),
)
_BUDGETS = (
    Column("budget", right=True),
    Column("step", right=True),
    Column("", optional=2),
    Column("over no limit", right=True),
    Column("images/s", right=True, optional=1),
    Column("takes", right=True),
    Column("host", right=True, optional=3),
    Column("", shrinks=True, least=12),
)


def batch_line(probe: Probe) -> str:
    """Format a probe of a batch, for printing during the search."""
    return f"batch {probe.at}: {_line(probe)}"


def budget_line(probe: Probe) -> str:
    """Format a probe of a budget, for printing during the search."""
    return f"{within(probe.at)}: {_line(probe)}"


def within(budget_bytes: int) -> str:
    """Return `within 8.00 GiB`, or `without a limit` for the budget that stands for none."""
    return "without a limit" if budget_bytes >= UNLIMITED_BYTES else f"within {show_given(budget_bytes)}"


def _line(probe: Probe) -> str:
    f = probe.figures
    if f is None:
        return reason(probe)
    step = f"{time_cell(f.train_us, f.measured_share < 1)}, " if f.train_us else ""
    return f"{step}{_images_or_cpu(f)}, takes {show_size(f.needed_bytes)}"


def _images_or_cpu(f: Figures) -> str:
    """Format images/s, or return `for the CPU` for a plan in fp64, which has no predicted times."""
    return f"{guess(f)}{show_rate(f.images_per_s)} images/s" if f.train_us else "for the CPU"


def heading(network: str, precision: Precision, device: DeviceSpec, gpus: int) -> str:
    """Say for which network and which GPU all plans are."""
    shared = f"mini-batches shared by {gpus} GPUs, " if gpus > 1 else ""
    where = f"{device.name} ({device.architecture})" if precision.runs_on_gpus else "the CPU"
    return f"{network}: {shared}{precision}, for {where}"


def _with_host_note(table: str, probes: Sequence[Probe]) -> list[str]:
    """Return the table, an empty line, and the explanation of host memory, if any."""
    return [table, "", *host_note(table, (p.figures.host_bytes for p in probes if p.figures is not None))]


def batches_text(fit: BatchFit, width: int | None = None) -> str:
    """Format a table of images/s over the batch, then the largest and the fastest batch."""
    top = fit.fastest.images_per_s
    rows: list[tuple[str, ...]] = []
    for probe in fit.probes:
        f = probe.figures
        if f is None:
            rows.append((str(probe.at), *[""] * 6, reason(probe)))
            continue
        named = (("largest", fit.largest), ("fastest", fit.fastest if top else None))
        note = " and ".join(word for word, one in named if f is one)
        rows.append(
            (
                str(probe.at),
                f"{guess(f)}{show_rate(f.images_per_s)}",
                _bar(f.images_per_s / top) if top else "",
                time_cell(f.train_us, f.measured_share < 1),
                over(f.train_us, f.least_us),
                show_size(f.needed_bytes),
                outside_cell(f.host_bytes, f.peer_bytes),
                note,
            )
        )
    largest, fastest = fit.largest, fit.fastest
    untimed = () if top else ("images/s", "step", "over its bound")
    lines = [
        *_with_host_note(render(*without_columns(_BATCHES, rows, *untimed), width), fit.probes),
        f"largest batch in {show_given(largest.budget_bytes)}{'' if fit.finished else ' so far'}: "
        f"{'at least ' if fit.at_least else ''}{largest.batch}, "
        f"{_images_or_cpu(largest)}, takes {show_size(largest.needed_bytes)}",
    ]
    if fit.untried:
        between = f"batches between {largest.batch} and {fit.refused}, which does not fit, were not tried"
        lines.append(between if not fit.finished else f"{between}: --search-for 10min tries them")
    elif fit.refused is None:
        lines.append("larger batches were not tried")
    refusals = [p.refusal for p in fit.probes if isinstance(p.refusal, BudgetError) and p.refusal.is_planned]
    if refusals:
        lines.append("a smallest plan above the budget does not prove that no plan fits: each batch is a new search")
    if any(refusal.slowest_us < math.inf for refusal in refusals):
        lines.append(
            "batches at less than half of the most images/s count as too large: `mbc compile` may have plans for them"
        )
    if fastest is not largest and top:
        lines.append(f"fastest of these: {fastest.batch}, {_images_or_cpu(fastest)}")
    return "\n".join(lines)


def budgets_text(curve: BudgetCurve, width: int | None = None) -> str:
    """Format a table of the step time over the budget, the largest budget first."""
    unlimited = curve.unlimited
    slowest = max((p.figures.train_us for p in curve.probes if p.figures is not None), default=unlimited.train_us)
    rows: list[tuple[str, ...]] = []
    for probe in reversed(curve.probes):
        f = probe.figures
        if f is None:
            rows.append((show_size(probe.at), *[""] * 6, reason(probe)))
            continue
        rows.append(
            (
                show_size(probe.at),
                time_cell(f.train_us, f.measured_share < 1),
                _bar(f.train_us / slowest),
                over(f.train_us, unlimited.train_us),
                f"{guess(f)}{show_rate(f.images_per_s)}",
                show_size(f.needed_bytes),
                outside_cell(f.host_bytes, f.peer_bytes),
                "",
            )
        )
    lines = [
        *_with_host_note(render(_BUDGETS, rows, width), curve.probes),
        f"without a limit: {time_cell(unlimited.train_us, unlimited.measured_share < 1)} in "
        f"{show_size(unlimited.needed_bytes)}; lower bound of all plans {show_size(unlimited.floor_bytes)}",
    ]
    return "\n".join(lines)


def batches_document(fit: BatchFit) -> dict[str, Any]:
    """Return the probes of batches for scripts."""
    return {
        "largest": asdict(fit.largest),
        "fastest": asdict(fit.fastest),
        "finished": fit.finished,
        "smallest_refused": fit.refused,
        "at_least": fit.at_least,
        "probes": _probes(fit.probes, "batch"),
    }


def budgets_document(curve: BudgetCurve) -> dict[str, Any]:
    """Return the probes of budgets for scripts."""
    return {
        "unlimited": asdict(curve.unlimited),
        "finished": curve.finished,
        "probes": _probes(curve.probes, "budget_bytes"),
    }


def reason(probe: Probe) -> str:
    """Say in a few words why there is no plan."""
    refusal = probe.refusal
    assert refusal is not None
    if not isinstance(refusal, BudgetError):
        return f"{refusal.code}: {refusal.message}"
    size_bytes = refusal.needed_bytes if refusal.is_planned else refusal.floor_bytes
    needed, _ = show_distinct(size_bytes, refusal.budget_bytes)
    if refusal.is_planned:
        return f"{refusal.code}: the smallest plan found takes {needed}"
    return f"{refusal.code}: the lower bound of all plans is {needed}"


def _probes(probes: Sequence[Probe], key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for probe in probes:
        if probe.figures is not None:
            rows.append({**asdict(probe.figures), key: probe.at, "fits": True})
        else:
            assert probe.refusal is not None
            rows.append(
                {key: probe.at, "fits": False, "code": probe.refusal.code, "message": probe.refusal.message}
                | (
                    {"needed_bytes": probe.refusal.needed_bytes, "floor_bytes": probe.refusal.floor_bytes}
                    if isinstance(probe.refusal, BudgetError)
                    else {}
                )
            )
    return rows


def guess(f: Figures) -> str:
    """Return the mark of figures that rest on estimates."""
    return "~" if f.measured_share < 1 else ""


def _bar(share: float) -> str:
    return "█" * max(1, round(share * _BAR))
